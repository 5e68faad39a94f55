"""What the graph does not show: signs, ends of intervals, other people's hooks."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_memsave import Checkpointing, apply_checkpointing
from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore
from lightning_memsave.saved_tensors.offload import Offloader


def exact():
    return SavedTensorStore(recompute=True, min_numel=1)


def int4(**options):
    return SavedTensorStore(lossy=Fidelity.INT4, min_numel=1, **options)


def gradient(function, store=None, seed=0):
    """Gradients of `function(h)` by the input behind h, [32, 64], and the weight that it is given."""
    torch.manual_seed(seed)
    x, w = torch.randn(32, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

    def loss():
        h = (x @ w).exp().log()  # not a view of a leaf, not cheap
        return function(h, w).square().mean()

    if store is None:
        total = loss()
    else:
        with store.scope():
            total = loss()
    total.backward()
    return torch.cat([x.grad, w.grad])


@pytest.mark.parametrize("ends", [(0.0, float("inf")), (float("-inf"), 0.5), (-0.3, 0.7), (-3.1, 3.1), (0.1, 0.6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_intervals_with_ends_of_any_kind(ends, dtype):
    def function(h, w):
        return F.hardtanh(h.to(dtype), *ends) @ w.to(dtype)

    assert torch.equal(gradient(function), gradient(function, SavedTensorStore(min_numel=1)))


@pytest.mark.parametrize("sign_reader", [torch.abs, F.leaky_relu])
def test_signs_survive_whoever_keeps_the_tensor_first(sign_reader):
    torch.manual_seed(0)
    x, w = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    store, h = int4(), None
    with store.scope():
        h = (x @ w).exp().log()
        first = h @ w.clone().requires_grad_()
        for _ in range(3):
            first = F.gelu(first)  # others come: h is coded
        out = sign_reader(h)
    (grad,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (plain,) = torch.autograd.grad(sign_reader((x @ w).exp().log()).sum(), x)
    assert torch.allclose(grad, plain, atol=1e-5)


def test_a_square_of_a_code_is_not_taken_for_linear():
    def function(h, w):
        y = h @ w
        return (y * y) @ w

    for store, num in ((exact(), 1), (int4(recompute=True), 0)):
        gradient(function, store)
        assert store.tally.entries["recomputed"] == num


def test_a_copy_is_not_an_alias():
    torch.manual_seed(0)
    x, w = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    with exact().scope():
        h = (x @ w).exp()
        out = (h.clone() @ w).sum() + (h * 2).sin().sum()
    out.backward(retain_graph=True)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_what_others_hooks_keep_is_left_alone():
    def shifted(h, w):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t + 10, lambda t: t - 10):
            y = h * w[0].detach()
        return y @ w

    def on_cpu(h, w):
        with torch.autograd.graph.save_on_cpu():
            y = h * w[0].detach()
        return y @ w

    def region(h, w):
        return checkpoint(lambda t: F.dropout(F.layer_norm(F.gelu(t), (64,)), 0.1), h, use_reentrant=False) @ w

    for function in (shifted, on_cpu, region):
        assert torch.allclose(gradient(function), gradient(function, exact()), rtol=1e-4, atol=1e-6)


def test_a_region_runs_twice_and_no_more():
    calls = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x):
            calls.append(self)
            return F.relu(self.norm(self.conv(x)))

    model = nn.Sequential(Block(), Block())
    apply_checkpointing(model, Checkpointing(modules=Block))
    with int4(recompute=True, fuse=True).scope():
        loss = model(torch.randn(2, 4, 8, 8)).sum()
    assert calls == [*model]
    loss.backward()
    assert calls == [*model, *reversed(model)]


def masked(logits):
    with torch.no_grad():
        logits[:, :10] = -100.0


def hooked(logits):
    logits.register_hook(lambda g: g * 3)


@pytest.mark.parametrize("change", [masked, hooked, lambda logits: logits.retain_grad()])
def test_a_loss_on_logits_that_somebody_touched_is_not_chunked(change):
    head, x, target = nn.Linear(16, 400), torch.randn(64, 16), torch.randint(10, 400, (64,))

    def run(store):
        head.zero_grad()
        with store.scope():
            logits = head(x)
            change(logits)
            loss = F.cross_entropy(logits, target)
        loss.backward()
        return head.weight.grad.clone()

    assert torch.equal(run(SavedTensorStore()), run(SavedTensorStore(chunk_loss=True)))


def test_all_targets_ignored():
    head, x = nn.Linear(16, 400), torch.randn(64, 16)
    with SavedTensorStore(chunk_loss=True).scope():
        loss = F.cross_entropy(head(x), torch.full((64,), -100))
    loss.backward()
    assert bool((head.weight.grad.nan_to_num() == 0).all())


def test_nan_under_a_relu_passes_its_gradient():
    def function(h, w):
        h = h.clone()
        h[0, 0] = float("nan")
        return F.relu(h).sum(0, keepdim=True)

    plain, ours = gradient(function), gradient(function, SavedTensorStore(min_numel=1))
    assert torch.equal(plain.isnan(), ours.isnan())


def test_a_dropped_store_closes_its_file_at_once():
    gc.collect()
    gc.disable()
    try:
        store = SavedTensorStore(offloader=Offloader())
        w = torch.randn(200, 200, requires_grad=True)
        with store.scope():
            loss = ((torch.randn(200, 200) @ w) @ w).sum()
        file = store.offloader._file._file
        loss.backward()
        del store, loss
        assert file.closed
    finally:
        gc.enable()


DEAD = {
    "layer norm": lambda h: F.layer_norm(h, h.shape[-2:]),
    "log sigmoid": F.logsigmoid,
    "square": torch.square,
    "gated": lambda h: F.silu(h) * h,
    "variance": torch.var,
    "norm": torch.norm,
    "gelu": F.gelu,
}
EDITED = {
    "silu": lambda h: F.silu(h, inplace=True),
    "mish": lambda h: F.mish(h, True),
    "clamp": lambda h: h.clamp_(-1, 1),
    "relu": lambda h: F.relu(h, inplace=True),
    "an item": lambda h: h[0].mul_(2),
}


@pytest.mark.parametrize("lossy", [Fidelity.EXACT, Fidelity.INT8])
@pytest.mark.parametrize("before", [None, lambda h: h * 1.5, lambda h: h + 1])
@pytest.mark.parametrize("dead", DEAD)
@pytest.mark.parametrize("edit", EDITED)
def test_what_is_only_logged_may_keep_a_tensor_that_is_edited(edit, dead, before, lossy):
    """Plain torch never looks at what the logged value keeps; nor may what is computed again come from there."""
    torch.manual_seed(0)
    first, last = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
    x = torch.randn(4, 8, 16, 16)

    def loss_of():
        h = first(x) if before is None else before(first(x))
        logged = DEAD[dead](h)
        EDITED[edit](h)
        return last(h).square().mean(), logged

    try:
        (plain,) = torch.autograd.grad(loss_of()[0], first.weight)
    except RuntimeError:
        pytest.skip("plain torch refuses it")
    with SavedTensorStore(recompute=True, lossy=lossy).scope():
        loss, logged = loss_of()
    (gradient,) = torch.autograd.grad(loss, first.weight)
    del logged  # alive until now
    if lossy is Fidelity.EXACT:
        assert torch.equal(gradient, plain)
    else:
        assert (gradient - plain).norm() < 0.05 * plain.norm()


@torch.no_grad()
def clamp(h):
    h.clamp_(min=0)


@torch.no_grad()
def into(h):
    torch.mul(h, 2, out=h)


UNSEEN = {
    "without gradients": clamp,
    "into it": into,
    "detached": lambda h: h.detach().mul_(2),
    "an initialiser": lambda h: nn.init.ones_(h.detach()),
}


@pytest.mark.parametrize("derived", [lambda h: h * 2, torch.relu, torch.tanh])
@pytest.mark.parametrize("edit", UNSEEN)
def test_what_was_computed_before_an_edit_is_not_computed_again_from_what_is_kept_after_it(edit, derived):
    torch.manual_seed(0)
    first, last, x = nn.Linear(64, 64), nn.Linear(64, 64), torch.randn(32, 64)

    def loss_of():
        h = first(x)
        k = derived(h)
        UNSEEN[edit](h)
        return (last(h) + last(k)).square().mean()

    try:
        (plain,) = torch.autograd.grad(loss_of(), last.weight)
    except RuntimeError:
        pytest.skip("plain torch refuses it")
    with exact().scope():
        loss = loss_of()
    assert torch.equal(torch.autograd.grad(loss, last.weight)[0], plain)


LATER = {
    "an item": lambda h: h.__setitem__(0, 0.0),
    "several": lambda h: torch._foreach_mul_([h], 2.0),
    "an operator": lambda h: torch.ops.aten.mul_.Scalar(h, 2.0),
}


@pytest.mark.parametrize("edit", LATER)
def test_what_is_computed_again_is_held_before_its_source_is_edited(edit):
    """The source is computed again itself, and kept by what is only logged."""
    torch.manual_seed(0)
    first, last, x = nn.Linear(64, 64), nn.Linear(64, 64), torch.randn(32, 64)

    def loss_of():
        h = F.gelu(first(x))
        logged = h.square().mean()
        loss = last(h * 2).square().mean()
        LATER[edit](h)
        return loss, logged

    (plain,) = torch.autograd.grad(loss_of()[0], last.weight)
    with exact().scope():
        loss, logged = loss_of()
    assert torch.equal(torch.autograd.grad(loss, last.weight)[0], plain)
    del logged


def test_tensors_without_storage_are_edited_as_ever():
    weight = torch.randn(8, 8, requires_grad=True)
    adjacency = torch.eye(8).to_sparse()
    with exact().scope():
        adjacency *= 0.5
        mapped = torch.func.vmap(lambda row: row.clone().add_(1))(torch.randn(4, 8))
        loss = (torch.sparse.mm(adjacency, weight) @ mapped.T).sum()
    loss.backward()
    assert torch.allclose(weight.grad, 0.5 * mapped.sum(0).expand(8, 8))
