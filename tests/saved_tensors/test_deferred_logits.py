"""Logits that nobody has computed: losses do without them, and whoever reads them finds what plain torch would make."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchmetrics.functional.classification import multiclass_accuracy

from lightning_memsave.saved_tensors import deferred_logits as module
from lightning_memsave.saved_tensors.deferred_logits import DeferredLogits

from .scored_nets import BATCH, CLASSES, LOSSES, TIME, Scored, some_ids, step, store_of


def loss_and(reader):
    """A loss, and what `reader` finds, asked before or after it."""
    return {
        "before the loss": lambda z, y: (reader(z), F.cross_entropy(z.flatten(0, 1), y.flatten()))[::-1],
        "after the loss": lambda z, y: (F.cross_entropy(z.flatten(0, 1), y.flatten()), reader(z)),
    }


def pickled(z):
    return pickle.loads(pickle.dumps(z.detach()))


def stored(z):
    file = io.BytesIO()
    torch.save(z.detach(), file)
    return file.getvalue()


def without_gradient(z):
    with torch.no_grad():
        return z.argmax(-1)


def in_inference_mode(z):
    with torch.inference_mode():
        return z.argmax(-1).clone()


READERS = {
    "in inference mode": in_inference_mode,
    "item": lambda z: z[0, 0, 0].item(),
    "argmax": lambda z: z.argmax(-1),
    "argmax without gradient": without_gradient,
    "printed": repr,
    "formatted": lambda z: f"{z.detach()}",
    "numpy": lambda z: z.detach().numpy(),
    "list": lambda z: z[0].tolist(),
    "metric": lambda z: multiclass_accuracy(z.flatten(0, 1), some_ids().flatten(), CLASSES),
    "stacked": lambda z: torch.stack([z, z]).detach(),
    "indexed by numbers": lambda z: z[:, torch.tensor([1, 2])].detach(),
    "some classes": lambda z: z[..., 3:9].detach(),
    "pickled": pickled,
    "stored": stored,
    "strides": lambda z: (z[:, 1:].stride(), z.transpose(1, 2).stride(), z.shape, len(z), z.dtype, z.requires_grad),
    "address": lambda z: z.data_ptr() != 0,
    "storage": lambda z: z.untyped_storage().nbytes(),
    "equal": lambda z: bool((z == z).all()),
}


@pytest.mark.parametrize("when", ["before the loss", "after the loss"])
@pytest.mark.parametrize("name", READERS)
def test_a_reader_finds_the_plain_logits(name, when):
    model = Scored()
    loss_of = loss_and(READERS[name])[when]
    plain_loss, (plain_found,), plain = step(model, loss_of)
    loss, (found,), ours = step(model, loss_of, store_of(model))
    same = pickle.dumps if not isinstance(found, torch.Tensor) else lambda t: t
    assert type(found) is type(plain_found)
    if isinstance(found, torch.Tensor):
        assert torch.equal(found, plain_found)
    else:
        assert same(found) == same(plain_found) or name == "stored"
    torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=0)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


class Squared(torch.autograd.Function):
    """Goes around torch's functions: its input arrives as it is."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.square()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def hooked_later(z, y):
    rows = z.flatten(0, 1)
    z.register_hook(lambda gradient: 3 * gradient)
    return F.cross_entropy(rows, y.flatten())


def edited(z, y):
    rows, copied = z.flatten(0, 1), z.clone()
    z[..., 3:50] -= 1
    return F.cross_entropy(rows, y.flatten()) + copied.square().mean()


@torch.no_grad()
def set_low(z):
    z[..., CLASSES // 2 :] = -1e4


def masked(z, y):
    rows = z.flatten(0, 1)
    set_low(z)
    return F.cross_entropy(rows, y.flatten())


def mask_that_changes(z, y):
    mask = y > 9
    rows, target = z[mask], y[mask]
    mask.fill_(True)
    return F.cross_entropy(z.flatten(0, 1), y.flatten()) * rows.detach().square().mean() / len(target)


def kept_gradient(z, y):
    z.retain_grad()
    loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
    (of_z,) = torch.autograd.grad(loss, z, create_graph=True)
    return loss + of_z.square().sum()


def edited_then_squared(z, y):
    z.mul_(2)
    first = Squared.apply(z).mean()
    z[..., ::2] = -5
    return first.detach() + Squared.apply(z).mean()


def edited_sibling(z, y):
    z.flatten(0, 1).tanh_()
    return Squared.apply(z).mean()


def read_in_inference_mode(z, y):
    loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
    in_inference_mode(z)
    return loss + z.logsumexp(-1).square().mean()


def in_a_region(z, y):
    loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
    rows = lambda: z.flatten(0, 1).sin()  # noqa: E731
    return loss + checkpoint(lambda: F.cross_entropy(rows(), y.flatten()), use_reentrant=False)


@torch.jit.script
def scripted(z: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(z, -1).square().mean()


USES = {
    "a function of the user's": lambda z, y: Squared.apply(z).mean(),
    "a function of the user's, and a loss": lambda z, y: (
        Squared.apply(z.transpose(1, 2)).mean() + F.cross_entropy(z.flatten(0, 1), y.flatten())
    ),
    "a function of log-probabilities": lambda z, y: Squared.apply(z.log_softmax(-1)).mean(),
    "edited, then a function of the user's": edited_then_squared,
    "edited sibling, then a function of the user's": edited_sibling,
    "read in inference mode": read_in_inference_mode,
    "in a checkpointed region": in_a_region,
    "hooked behind a view": hooked_later,
    "edited behind views": edited,
    "masked behind a view": masked,
    "a mask that changes": mask_that_changes,
    "its own gradient": kept_gradient,
    "scripted": lambda z, y: scripted(z),
    "capped": lambda z, y: F.cross_entropy((z / 30).tanh().mul(30).flatten(0, 1), y.flatten()),
    "a z-loss beside": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()) + z.logsumexp(-1).square().mean(),
    "soft targets": lambda z, y: F.cross_entropy(z.flatten(0, 1), F.one_hot(y.flatten(), CLASSES).to(z.dtype)),
    "log-probabilities twice": lambda z, y: F.cross_entropy(z.log_softmax(-1).flatten(0, 1), y.flatten()),
    "gathered": lambda z, y: -z.log_softmax(-1).gather(-1, y[..., None]).mean(),
    "another view of rows": lambda z, y: F.cross_entropy(z.reshape(-1, CLASSES // 2), y.flatten().repeat(2) % 100),
    "narrower": lambda z, y: F.cross_entropy(z.bfloat16().double().flatten(0, 1), y.flatten()),
}


@pytest.mark.parametrize("name", USES)
def test_other_uses_are_those_of_plain_logits(name):
    model = Scored()
    plain_loss, _, plain = step(model, USES[name])
    store = store_of(model)
    for _ in range(3):  # the first one may learn that this is no head
        loss, _, ours = step(model, USES[name], store)
        torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=0)
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo asks for it
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_loss_gets_plain_logits(backend):
    model = Scored()
    loss_of = torch.compile(lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()), backend=backend)
    plain_loss, _, plain = step(model, LOSSES["flatten"])
    store = store_of(model)
    for _ in range(2):
        loss, _, ours = step(model, loss_of, store)
        torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=0)
        for a, b in zip(ours, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


def test_logits_are_read_until_the_weight_changes():
    model = Scored()
    with store_of(model).scope():
        z, other = model(some_ids()), model(some_ids())
        loss = F.cross_entropy(z.flatten(0, 1), some_ids().flatten())
    loss.backward()
    assert torch.equal(z, model(some_ids()))
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert z.shape == other.shape == (BATCH, TIME, CLASSES)
    z.argmax(-1)
    with pytest.raises(RuntimeError, match="Read logits before the optimizer's step"):
        other.argmax(-1)


@pytest.mark.parametrize("frozen", ["head.weight", "head.bias", "table.weight", "head"])
def test_frozen_parameters(frozen, products):
    model = Scored()
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(frozen))
    plain_loss, _, plain = step(model, LOSSES["shifted"])
    loss, _, ours = step(model, LOSSES["shifted"], store_of(model))
    assert products == []
    torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=0)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


def test_logits_read_under_autocast_are_plain_torchs():
    model = Scored(torch.float32)
    loss_of = lambda z, y: (z.log_softmax(-1).square().mean() + z.float().square().mean(), z)  # noqa: E731
    plain_loss, (plain_z,), plain = step(model, loss_of, dtype=torch.bfloat16)
    loss, (z,), ours = step(model, loss_of, store_of(model), dtype=torch.bfloat16)
    assert torch.equal(loss, plain_loss)
    assert z.dtype == plain_z.dtype
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_where_gradients_are_off_nothing_is_deferred():
    model = Scored()
    with store_of(model).scope():
        with torch.no_grad():
            assert type(model(some_ids())) is torch.Tensor
        assert type(model(some_ids())) is DeferredLogits


def test_a_wide_layer_that_is_no_head_is_deferred_once(products):
    model = Scored()
    store = store_of(model)
    for _ in range(3):
        step(model, lambda z, y: z.relu().sum(), store)
    assert len(products) == 1


def test_a_head_stays_one_when_its_logits_are_read(products):
    model = Scored()
    store = store_of(model)
    for number in range(4):
        step(model, loss_and(READERS["argmax"])["after the loss"] if number % 2 else LOSSES["view"], store)
    assert len(products) == 2


def test_the_gradient_of_logits_that_go_around_torchs_functions():
    torch.manual_seed(0)
    shapes = {"rows": (5, 7, 2), "weight": (9, 2), "bias": (9,)}
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes.values()]

    def squared(is_log, *given):
        rows, *parameters = given
        form = module.Form(1, torch.float64, is_log=is_log)
        z = module._Stand.apply(rows.transpose(1, 2), *parameters, form)
        z.call = module.HeadCall(rows, *parameters, {})
        z._recipe = lambda: form.of(rows.transpose(1, 2), *parameters)
        z.call.members.append(lambda: z)
        return Squared.apply(z)

    for is_log in (False, True):
        assert torch.autograd.gradcheck(lambda *given, is_log=is_log: squared(is_log, *given), inputs)


def test_logits_that_nobody_reads_are_freed_with_the_last_reference():
    model = Scored()
    with store_of(model).scope():
        z = model(some_ids())
        loss = F.cross_entropy(z.flatten(0, 1), some_ids().flatten())
    head_call = module.weakref.ref(z.call)
    del z
    assert head_call() is None
    loss.backward()


def test_parameters_that_are_not_the_modules_own_are_left_alone():
    """A parametrised weight is no parameter, as are those of low-rank and of sparse layers."""
    model = Scored(bias=False)
    nn.utils.parametrizations.weight_norm(model.head)
    with store_of(model).scope():
        assert type(model(some_ids())) is torch.Tensor


def test_an_edit_that_a_users_function_cannot_follow_is_an_error():
    model = Scored()
    with store_of(model).scope():
        z = model(some_ids())
        z.view_as(z)[0, 0, 0].item()
        some = z[..., ::2]
        some.mul_(3)
        loss, right = Squared.apply(z).mean(), Squared.apply(z.view_as(z)).mean()
    right.backward()
    with pytest.raises(RuntimeError, match="edited through a view"):
        loss.backward()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_logits_are_those_of_the_parameters_before_a_write_through_data(name):
    model = Scored()
    plain = model(some_ids()).detach()
    with store_of(model).scope():
        z = model(some_ids())
        getattr(model.head, name).data.mul_(2)
        assert torch.equal(z.detach(), plain)


@pytest.mark.parametrize("target", [-1, CLASSES, CLASSES + 5])
@pytest.mark.parametrize("is_read", [False, True])
def test_a_target_that_is_no_class_is_torchs_error(target, is_read):
    model, y = Scored(), torch.full((BATCH * TIME,), target)
    with store_of(model).scope():
        z = model(some_ids())
        if is_read:
            z.sum()
        with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
            F.cross_entropy(z.flatten(0, 1), y)


def test_a_head_with_one_input_is_not_deferred():
    head = nn.Linear(1, CLASSES)
    with store_of(head).scope():
        assert type(head(torch.randn(3, 4, 1))) is torch.Tensor
