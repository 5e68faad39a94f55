"""The dense weight of a sparse one: its gradients, and that nobody keeps it."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import Ledger, apply_sparsity
from lightning_memsave.numerics.sparse_index import pack_positions
from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore
from lightning_memsave.saved_tensors.rebuilt_weights import rebuilding_weights, rebuilt
from lightning_memsave.saved_tensors.sparse_weights import densify
from lightning_memsave.techniques.sparsity import sparse_layers
from tests.techniques.sparsity_subjects import tiny


def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    with Ledger().watching(model, batch=x) as ledger:
        before = ledger.live_bytes
        loss = model(x).sum()
        kept = ledger.live_bytes - before
    loss.backward()
    return kept


def test_the_dense_weight_is_not_kept():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    x = torch.randn(2, 64, requires_grad=True)
    plain = kept_bytes(copy.deepcopy(model), x)
    apply_sparsity(model, tiny(0.9))
    assert kept_bytes(model, x) == plain == 2 * 64 * 4 + 4  # one activation, and the loss
    with SavedTensorStore(recompute=True, min_numel=1).scope():
        loss = model(x).sum()
    loss.backward()


@pytest.mark.parametrize("scope", ["alone", "store"])
def test_a_store_changes_nothing(scope):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    plain, ids = copy.deepcopy(model), torch.randint(0, 50, (4, 6))
    apply_sparsity(model, tiny())
    plain.load_state_dict(model.state_dict())
    store = SavedTensorStore(recompute=True, min_numel=1)
    if scope == "store":
        with store.scope():
            loss = model(ids).square().sum()
        # Two activations; the ReLU's mask is read off its result.
        assert store.tally.plain_bytes >= store.tally.held_bytes
    else:
        loss = model(ids).square().sum()
    loss.backward()
    plain(ids).square().sum().backward()
    for name, layer in sparse_layers(model).items():
        assert torch.equal(layer.values.grad, layer.layout.compact(plain.get_submodule(name).weight.grad))


def test_weights_that_a_model_uses_by_itself_are_recomputations_in_a_store():
    """A model that calls functions on `layer.weight` outside of the layer's own forward."""
    layer = nn.Linear(64, 64)
    apply_sparsity(nn.Sequential(layer), tiny(0.9))
    x, store = torch.randn(2, 64, requires_grad=True), SavedTensorStore(min_numel=1)
    with store.scope():
        loss = F.linear(x, layer.weight).sum()
    assert store.tally.held_bytes == 0  # `x` is the caller's, the weight is made again
    loss.backward()
    expected = torch.autograd.grad(F.linear(x, layer.layout.dense(layer.values.detach())).sum(), x)[0]
    assert torch.equal(x.grad, expected)


def test_a_lossy_store_keeps_weights_exact():
    layer = nn.Linear(64, 64, bias=False)
    apply_sparsity(nn.Sequential(layer), tiny(0.5))
    x = torch.randn(32, 64, requires_grad=True)
    expected = torch.autograd.grad(layer(x.tanh() * 1.0).sum(), [x, layer.values])
    with SavedTensorStore(lossy=Fidelity.INT4, min_numel=1).scope():
        loss = layer(x.tanh() * 1.0).sum()
    gradients = torch.autograd.grad(loss, [x, layer.values])
    assert torch.equal(gradients[0], expected[0])
    assert not torch.equal(gradients[1], expected[1])  # of the input, which is coded


# ------------------------------------------------------------------------------- the dense form
POSITIONS = torch.tensor([1, 2, 5, 11])
SHAPE = torch.Size([3, 4])
INDEX = pack_positions(POSITIONS, 12)


def scattered(values):
    return torch.zeros(12, dtype=values.dtype).index_put((POSITIONS,), values).view(SHAPE)


def test_dense_values_and_gradients_are_those_of_a_plain_scatter():
    values, factor = torch.randn(4, requires_grad=True), torch.randn(SHAPE)
    dense = densify(values, INDEX, SHAPE)
    assert torch.equal(dense, scattered(values))
    (found,) = torch.autograd.grad((dense.sin() * factor).sum(), values)
    (plain,) = torch.autograd.grad((scattered(values).sin() * factor).sum(), values)
    assert found.shape == (4,)
    assert torch.equal(found, plain)


def test_derivatives_of_any_order_of_the_dense_form():
    values = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: densify(v, INDEX, SHAPE).exp(), values)
    assert torch.autograd.gradgradcheck(lambda v: densify(v, INDEX, SHAPE).exp(), values)


def test_whoever_watches_sees_the_whole_gradient():
    values, seen = torch.randn(4, requires_grad=True), []
    densify(values, INDEX, SHAPE, seen.append).mul(torch.arange(12.0).view(SHAPE)).sum().backward()
    assert torch.equal(seen[0], torch.arange(12.0).view(SHAPE))
    assert values.grad.tolist() == [1.0, 2.0, 5.0, 11.0]


WAYS = {
    "itself": lambda w: w,
    "transposed": torch.t,
    "viewed": lambda w: w.view(2, 6),
    "cast": lambda w: w.bfloat16(),
    "cast and transposed": lambda w: w.double().transpose(0, 1),
    "cloned": lambda w: w.t().contiguous(),
}


@pytest.mark.parametrize("way", WAYS)
def test_views_and_casts_are_made_again_to_the_bit(way):
    values = torch.randn(4, requires_grad=True)
    tensor = WAYS[way](densify(values, INDEX, SHAPE))
    found = rebuilt(tensor).get()
    assert (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
    assert torch.equal(found, tensor)


def test_what_is_computed_from_a_dense_form_is_not_made_again():
    values = torch.randn(4, requires_grad=True)
    dense = densify(values, INDEX, SHAPE)
    for tensor in (dense * 2, dense + dense, values, values.view(2, 2), densify(values * 1, INDEX, SHAPE)):
        assert rebuilt(tensor) is None


def test_values_that_change_in_place_before_backward_raise():
    values, x = torch.randn(4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    with rebuilding_weights():
        loss = F.linear(x, densify(values, INDEX, SHAPE)).sum()
    with torch.no_grad():
        values.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("has_hooks", [False, True])
def test_other_tensors_go_to_the_hooks_around(has_hooks):
    values, x = torch.randn(4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
    packed = []

    def function(weight):
        return (F.linear(x.sin(), weight).exp()).sum()

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t)
    with hooks if has_hooks else contextlib.nullcontext(), rebuilding_weights():
        loss = function(densify(values, INDEX, SHAPE))
    assert SHAPE not in packed
    assert SHAPE[::-1] not in packed
    assert ((2, 3) in packed, (2, 4) in packed) == (has_hooks, has_hooks)
    found = torch.autograd.grad(loss, [x, values])
    expected = torch.autograd.grad(function(scattered(values)), [x, values])
    assert all(map(torch.equal, found, expected))


class Mixed(nn.Module):
    """Linears, a convolution and one weight that is used twice, transposed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.conv = nn.Conv1d(4, 4, 3, padding=1, bias=False)

    def forward(self, x):  # [B, 4, 32]
        x = self.second(self.first(self.conv(x)).tanh())
        return F.linear(x, self.first.weight) @ self.first.weight


COPIES = {"first": 32 * 64, "second": 64 * 32, "conv": 4 * 4 * 3}
"""Elements of each weight, of which autocast makes one copy for all uses if it is trained."""


def under_autocast(model, x, store=None):
    """Bytes that are kept for backward, the output, and the gradients of input and weights."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    with Ledger().watching(model, batch=x) as ledger:
        before = ledger.live_bytes
        with contextlib.nullcontext() if store is None else store.scope(), torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        kept = ledger.live_bytes - before
    out.float().square().sum().backward()
    return kept, out.detach(), [x.grad, *(p.grad for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("batch", [1, 16], ids=["inputs as large as a weight", "larger inputs"])
@pytest.mark.parametrize("frozen", [[], ["first"], ["second"], ["first", "second", "conv"]], ids=str)
def test_copies_of_autocast_are_made_again_to_the_bit(frozen, batch):
    model, x = Mixed(), torch.randn(batch, 4, 32)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    plain, out, gradients = under_autocast(model, x)
    # A store that computes nothing else again, as `min_numel` leaves activations alone.
    store = SavedTensorStore(recompute=True, min_numel=1)
    store._recompute = lambda *_: None
    kept, ours, found = under_autocast(model, x, store)
    assert torch.equal(out, ours)
    assert all(map(torch.equal, found, gradients))
    # Trained: one copy of each. Frozen: one for each use by a Linear; those of `conv` and of `@` stay.
    saved = {name: 2 * size for name, size in COPIES.items()}
    saved["first"] *= 2 if "first" in frozen else 1
    if "conv" in frozen:
        del saved["conv"]
    assert plain - kept == sum(saved.values())


def test_copies_stay_where_a_store_computes_nothing_again_or_weights_do_not_stay():
    model, x = Mixed(), torch.randn(2, 4, 32)
    plain = under_autocast(model, x)[0]
    assert under_autocast(model, x, SavedTensorStore(min_numel=1))[0] >= plain - 1024
    store = SavedTensorStore(recompute=True, min_numel=10**6)
    assert under_autocast(model, x, store)[0] == plain
    store = SavedTensorStore(recompute=True, min_numel=1)
    store.weights_stay, store._recompute = False, lambda *_: None
    assert under_autocast(model, x, store)[0] == plain


def test_a_weight_that_changes_before_backward_raises_as_without_autocast():
    model, x = Mixed(), torch.randn(2, 4, 32)
    with SavedTensorStore(recompute=True, min_numel=1).scope(), torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().sum()
    with torch.no_grad():
        model.second.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_of_gradients_pass_through_copies():
    def penalty(store):
        torch.manual_seed(1)
        model, x = Mixed(), torch.randn(2, 4, 32, requires_grad=True)
        with store.scope() if store else contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16):
            out = model(x).tanh().sum()
        (of_x,) = torch.autograd.grad(out, x, create_graph=True)
        of_x.square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain, ours = penalty(None), penalty(SavedTensorStore(recompute=True, min_numel=1))
    assert len(plain) == len(ours) > 2
    assert all(map(torch.equal, ours, plain))
