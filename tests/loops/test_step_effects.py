"""What a step does besides its loss makes the class `changed`, and is named."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import SumMetric

from lightning_memsave import MemSave, Microbatching
from lightning_memsave.core.errors import NotLosslessWarning
from lightning_memsave.loops.step_effects import StepEffects, gradients_set_aside, hooks_on_gradients
from tests.loops.loss_runs import CLASSES, Base, applied, batches, compare, fit


class Averages(Base):
    """A teacher that follows in `training_step`."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def loss(self, z, y):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.head.weight, 0.1)
        return F.cross_entropy(z, y) + self.teacher.weight.square().sum() * z.mean()


class Remembers(Base):
    """Hidden state from batch to batch."""

    hidden = None

    def loss(self, z, y):
        loss = F.cross_entropy(z if self.hidden is None else z + self.hidden, y)
        self.hidden = z.detach().mean(0)
        return loss


class CountsBatches(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def loss(self, z, y):
        self.seen += 1
        return F.cross_entropy(z, y)


class SkipsSome(Base):
    def loss(self, z, y):
        return None if not z.requires_grad or (y == 0).sum() > 1 else F.cross_entropy(z, y)


class DrawsFromPython(Base):
    def loss(self, z, y):
        return F.cross_entropy(z * random.choice([0.5, 1.5]), y)


class DrawsFromNumpy(Base):
    def loss(self, z, y):
        return F.cross_entropy(z * float(np.random.rand()), y)  # noqa: NPY002


class HasHooks(Base):
    def __init__(self):
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


CHANGED = {
    Averages: "changes `teacher.weight`",
    Remembers: "changes `hidden`",
    CountsBatches: "changes `seen`",
    SkipsSome: "returned None for some",
    DrawsFromPython: "draws random numbers",
    DrawsFromNumpy: "draws random numbers",
    HasHooks: "hooks get the gradients.*`head.weight`",
}


@pytest.mark.parametrize("kind", CHANGED)
def test_what_a_step_does_besides_its_loss_makes_the_class_changed(kind):
    microbatch = Microbatching(size=4, reduction="mean") if kind is SkipsSome else 4
    module = kind() if kind is not HasHooks else Base()
    plain, ours = module, copy.deepcopy(module)
    if kind is HasHooks:  # deepcopy drops hooks
        ours = HasHooks()
        ours.load_state_dict(plain.state_dict())
    memsave = MemSave(microbatch=microbatch)
    with pytest.warns(NotLosslessWarning, match=CHANGED[kind]):
        fit(ours, batches(), memsave)
    assert applied(memsave.report).loss_class == "changed"


def test_strict_refuses_it():
    memsave = MemSave(microbatch=Microbatching(size=4, strict=True))
    with pytest.raises(ValueError, match=r"strict.*changes `seen`"):
        fit(CountsBatches(), batches(), memsave)


class SetsTensors(Base):
    """A weight of the loss that is made anew in each step, and in each part of it."""

    def __init__(self, grows=0.0):
        super().__init__()
        self.settings, self.weight, self.grows = {}, None, grows

    def loss(self, z, y):
        before = 0.0 if self.weight is None else float(self.weight)
        self.weight = torch.tensor(0.5 + self.grows * before)
        self.settings.update(weight=self.weight.clone(), name="cross entropy")
        return self.settings["weight"] * F.cross_entropy(z, y)


def test_tensors_that_are_made_anew_with_the_same_values_are_no_change():
    report, apart, messages = compare(SetsTensors(), batches())
    assert applied(report).loss_class == "exact"
    assert apart < 1e-5
    assert messages == []
    report, _, messages = compare(SetsTensors(grows=0.1), batches())
    assert applied(report).loss_class == "changed"
    assert "`settings`" in messages[0]
    assert "`weight`" in messages[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
def test_tensors_that_cannot_be_compared_are_a_change_and_no_error(make):
    class Makes(Base):
        def loss(self, z, y):
            self.made, self.held = make(), {"made": make()}
            return F.cross_entropy(z, y)

    report, apart, _ = compare(Makes(), batches())
    assert applied(report).loss_class == "changed"
    assert apart < 1e-4


def test_tensors_of_no_number_are_equal():
    class Makes(Base):
        def loss(self, z, y):
            self.made = torch.full((3,), torch.nan)
            return F.cross_entropy(z, y)

    assert applied(compare(Makes(), batches())[0]).loss_class == "exact"


def test_a_cache_that_a_step_fills_once_is_no_change():
    class Caches(Base):
        mask = None

        def loss(self, z, y):
            if self.mask is None:
                self.mask = torch.ones(CLASSES)
            return F.cross_entropy(z * self.mask, y)

    report, apart, _ = compare(Caches(), batches())
    assert applied(report).loss_class == "exact"
    assert apart < 1e-4


def step(module, what):
    """Run `what` as a step, and return what is seen of it."""
    effects = StepEffects(module, torch.device("cpu"), reads_values=True)
    what(module)
    return effects


class Normed(Base):
    def __init__(self):
        super().__init__()
        self.norm, self.count = nn.BatchNorm1d(4), 0
        self.register_buffer("seen", torch.zeros(()))


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        (lambda m: m.norm(torch.randn(3, 4, generator=torch.Generator())), []),  # once per batch, or named elsewhere
        (lambda m: m.seen.add_(1), ["`seen`"]),
        (lambda m: m.head.weight.data.add_(0), []),  # behind autograd's back
        (lambda m: nn.init.ones_(m.head.weight), ["`head.weight`"]),
        (lambda m: setattr(m, "count", 2), ["`count`"]),
        (lambda m: setattr(m, "count", 0), []),
        (lambda m: setattr(m, "_current_fx_name", "training_step"), []),
        (lambda m: m.metric.update(1.0), []),  # which are merged
    ],
)
def test_what_has_changed_is_named(what, expected):
    module = Normed()
    module.metric = SumMetric()
    assert step(module, what).changes() == expected


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda m: torch.rand(1), True),
        (lambda m: random.random(), True),
        (lambda m: np.random.rand(), True),  # noqa: NPY002
        (lambda m: torch.rand(1, generator=m.generator), True),
        (lambda m: torch.rand(1, generator=torch.Generator()), False),
        (lambda m: torch.ones(1), False),
    ],
)
def test_random_numbers_of_every_kind_are_seen(draw, expected):
    module = Base()
    module.generator = torch.Generator()
    assert step(module, draw).has_drawn is expected


def test_a_step_that_calls_backward_is_seen_whether_gradients_are_made_or_added_to():
    def backward(module):
        module.head.weight.sum().backward()

    module = Base()
    assert not step(module, lambda m: m.head.weight.sum()).has_made_gradients
    assert step(module, backward).has_made_gradients
    assert step(module, backward).has_made_gradients


def test_what_a_step_adds_to_gradients_is_dropped():
    module = Base()
    module.head.weight.grad = kept = torch.ones_like(module.head.weight)
    with gradients_set_aside(module):
        assert module.head.weight.grad is None
        module.head(torch.ones(2, 16)).sum().backward()
        assert module.head.bias.grad is not None
    assert module.head.weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert module.head.bias.grad is None


def test_hooks_on_gradients_are_named():
    module = Base()
    assert hooks_on_gradients(module) == []
    handle = module.head.bias.register_hook(lambda gradient: gradient)
    assert hooks_on_gradients(module) == ["`head.bias`"]
    handle.remove()
    assert hooks_on_gradients(module) == []
    handle = module.head.bias.register_post_accumulate_grad_hook(lambda p: None)
    assert hooks_on_gradients(module) == ["`head.bias`"]
    handle.remove()
    assert hooks_on_gradients(module) == []
