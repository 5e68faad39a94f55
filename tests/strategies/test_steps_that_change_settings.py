"""Training steps that change optimizers, schedules, settings of layers, objects, or weights for a moment.

Recovery puts back what it can and says what it cannot; microbatches say what is done once for each; trials of a step
leave nothing behind. The referee is plain Lightning.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import re

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import Checkpointing, MemSave
from lightning_memsave.core.errors import MicrobatchWarning, NotLosslessWarning
from lightning_memsave.loops.own_steps import OwnStepError
from tests.strategies.quiet_runs import QUIET

LEFT: dict[str, int] = {}
"""Failures that are left, and the batch of them; not the module's, whose attributes are put back."""


def runs_out(batch_idx):
    if batch_idx == LEFT.get("batch") and LEFT["times"]:
        LEFT["times"] -= 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, batch_idx):
        ctx.batch_idx = batch_idx
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        runs_out(ctx.batch_idx)
        return gradient, None


class Step(L.LightningModule):
    """An ordinary one; memory runs out between its layers."""

    in_backward = False

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.0), nn.Linear(16, 3))
        self.other = nn.Linear(8, 3)
        self.prepare()

    def prepare(self):
        """Make what a subclass has besides."""

    def loss(self, batch, batch_idx):
        hidden = self.net[:3](batch[0])
        if self.in_backward:
            hidden = _Fails.apply(hidden, batch_idx)
        else:
            runs_out(batch_idx)
        return F.cross_entropy(self.net[3](hidden), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=0.1)


class Settings(Step):
    """Schedules of torch's own layers."""

    def training_step(self, batch, batch_idx):
        self.net[2].p = min(0.5, self.net[2].p + 0.1)
        self.net[1].momentum *= 0.8
        return self.loss(batch, batch_idx)


class Rate(Step):
    def training_step(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.9
        return self.loss(batch, batch_idx)


class RateInATensor(Rate):
    def training_step(self, batch, batch_idx):
        for group in self.optimizers().param_groups:
            group["lr"].mul_(0.9)
        return self.loss(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), torch.tensor(0.1), foreach=False)


class Scheduler(Step):
    def training_step(self, batch, batch_idx):
        self.lr_schedulers().step()
        return self.loss(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma) for gamma in (0.8, 0.9)]
        sequence = torch.optim.lr_scheduler.SequentialLR(optimizer, schedulers, [2])
        return [optimizer], [{"scheduler": sequence, "interval": "epoch"}]


class OwnScheduler(Step):
    """It is the module's, and Lightning does not know of it."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return optimizer

    def training_step(self, batch, batch_idx):
        self.scheduler.step()
        assert self.scheduler.optimizer is self.optimizers().optimizer
        return self.loss(batch, batch_idx)


class Counter:
    def __init__(self):
        self.count, self.seen = 0, collections.deque(maxlen=3)


class Agent:
    def __init__(self, counter):
        self.counter = counter


class Shared(Step):
    """Two objects that hold a third."""

    def prepare(self):
        self.counter = Counter()
        self.agent = Agent(self.counter)

    def training_step(self, batch, batch_idx):
        self.agent.counter.count += 1
        self.counter.seen.append(batch_idx)
        assert self.agent.counter is self.counter
        return self.loss(batch, batch_idx) * (1 + self.counter.count + len(self.counter.seen))


class Swapped(Step):
    """A child that is another for a moment."""

    def training_step(self, batch, batch_idx):
        own, self.other = self.other, copy.deepcopy(self.other).requires_grad_(False)
        loss = self.loss(batch, batch_idx)
        self.other = own
        return loss + self.other(batch[0]).square().mean()


class Rebuilt(Step):
    """A child that is taken away and made anew, with random weights."""

    def training_step(self, batch, batch_idx):
        del self.other
        loss = self.loss(batch, batch_idx)
        self.other = nn.Linear(8, 3).requires_grad_(False)
        self.net, self.late = self.net, nn.Identity()
        return loss + self.other(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), 0.1)


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class SlottedWithMore(Slotted):
    """Has a dictionary as well."""


class Frozen(dict):
    def update(self, *_):
        raise TypeError("frozen")

    clear = update


@dataclasses.dataclass(frozen=True)
class Count:
    count: int = 0


class Counters(Step):
    """Objects of many kinds, in containers and behind the trainer's own."""

    def prepare(self):
        self.slotted, self.mixed, self.frozen, self.replaced = Slotted(), SlottedWithMore(), Frozen(a=1), Count()
        self.listed, self.helper = [Counter()], Agent(Counter())
        self.kind = Kind.FIRST

    def on_fit_start(self):
        self.helper.trainer, self.helper.frozen = self.trainer, self.frozen

    def training_step(self, batch, batch_idx):
        for each in (self.slotted, self.mixed, self.listed[0], self.helper.counter):
            each.count += 1
        self.mixed.more = self.mixed.count
        self.replaced = dataclasses.replace(self.replaced, count=self.replaced.count + 1)
        self.kind = Kind.SECOND if self.kind is Kind.FIRST else Kind.FIRST
        counts = [each.count for each in (self.slotted, self.mixed, self.listed[0], self.helper.counter, self.replaced)]
        return self.loss(batch, batch_idx) * (sum(counts) + self.kind.value + self.frozen["a"])


class Kind(enum.Enum):
    FIRST, SECOND = 1, 2


class Grows(Step):
    """Has a layer more from some batch on, and the optimizer a group."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            self.net.insert(1, nn.Linear(16, 16))
            self.optimizers().add_param_group({"params": list(self.net[1].parameters())})
        hidden = self.net[:-1](batch[0])
        runs_out(batch_idx)
        return F.cross_entropy(self.net[-1](hidden), batch[1])


class ZerosStay(Step):
    """A head that no batch uses has gradients of zeros, so that weight decay moves it."""

    in_backward = True

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch, batch_idx)
        return loss if batch_idx else loss + self.other(batch[0]).square().mean()


PUT_BACK = [
    Settings,
    Rate,
    RateInATensor,
    Scheduler,
    OwnScheduler,
    Shared,
    Swapped,
    Rebuilt,
    Counters,
    Grows,
    ZerosStay,
]


def trained(kind, memsave=None, batch=None, times=1):
    """Return the module after five batches, of which one runs out of memory some times."""
    LEFT.update(batch=batch, times=times)
    L.seed_everything(0, verbose=False)
    module = kind()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(60, 8, generator=generator), torch.randint(0, 3, (60,), generator=generator)
    trainer = L.Trainer(**{**QUIET, "max_steps": 5}, callbacks=[memsave] if memsave else [])
    trainer.fit(module, DataLoader(TensorDataset(*rows), batch_size=12))
    return module


def assert_equal(found, expected):
    expected = expected.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("kind", PUT_BACK)
def test_recovery_puts_back_what_a_step_changes(kind, batch):
    memsave = MemSave(summary=False)
    assert_equal(trained(kind, memsave, batch), trained(kind))
    assert (memsave.report.loss_class, memsave.report.num_oom_recovered) == ("exact", 1)


@pytest.mark.filterwarnings("ignore:Microbatches change")
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Settings, r"`net\.1\.momentum`, `net\.2\.p`"),
        (Rate, "an optimizer's `lr`"),
        (RateInATensor, "an optimizer's `lr`"),
        (Scheduler, "an optimizer's `lr`, a scheduler's `last_epoch`"),
    ],
)
def test_microbatches_name_settings_that_each_of_them_changes(kind, name):
    memsave = MemSave(microbatch=4, summary=False)
    trained(kind, memsave)
    assert any(re.match(f"training_step changes {name}", reason) for reason in memsave.report.loss_class_reasons)


@pytest.mark.filterwarnings("ignore:.*had no effect")
@pytest.mark.parametrize("kind", [Rate, Scheduler, Settings])
def test_a_rehearsal_leaves_settings_as_they_were(kind):
    assert_equal(trained(kind, MemSave(checkpointing="sqrt", summary=False)), trained(kind))


class Block(nn.Sequential):
    """One whose dropout is another in each of its calls."""


class TwoRates(Step):
    def prepare(self):
        self.block = Block(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 8))

    def training_step(self, batch, batch_idx):
        found = batch[0]
        for self.block[2].p in (0.1, 0.6, 0.3):
            found = self.block(found)
        return self.loss((found, batch[1]), batch_idx)


def test_a_region_is_repeated_with_the_settings_of_its_call():
    memsave = MemSave(checkpointing=Checkpointing(modules=("Block",)), summary=False)
    assert_equal(trained(TwoRates, memsave), trained(TwoRates))
    assert memsave.report.loss_class == "exact"


# ----------------------------------------------------------------------------- weights that are others for a moment
class Perturbed(Step):
    """An adversary's step, taken back behind the loss."""

    def move(self, weight, sign):
        with torch.no_grad():
            weight.add_(sign)

    def training_step(self, batch, batch_idx):
        for sign in (1, -1):
            for weight in self.other.parameters():
                self.move(weight, sign)
            if sign > 0:
                loss = self.other(batch[0]).square().mean() + self.loss(batch, batch_idx)
        return loss


class HiddenPerturbed(Perturbed):
    def move(self, weight, sign):
        weight.data.add_(sign)


class ListedPerturbed(Perturbed):
    def move(self, weight, sign):
        with torch.no_grad():
            torch._foreach_add_([weight], sign)


class ReplacedPerturbed(HiddenPerturbed):
    """What they were is kept in other memory."""

    def move(self, weight, sign):
        if sign > 0:
            weight.before = weight.data.clone()
            weight.data.add_(1)
        else:
            weight.data = weight.before


@pytest.mark.parametrize("batch", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", [Perturbed, HiddenPerturbed, ListedPerturbed, ReplacedPerturbed])
def test_weights_that_a_failed_try_has_left_perturbed_are_named(kind, batch):
    memsave = MemSave(summary=False)
    with pytest.warns(NotLosslessWarning, match=r"does not put back the parameters `other\.weight`, `other\.bias`"):
        trained(kind, memsave, batch)
    assert memsave.report.loss_class == "changed"


@pytest.mark.parametrize("kind", [Perturbed, HiddenPerturbed, ListedPerturbed, ReplacedPerturbed])
def test_without_a_failure_they_cost_nothing(kind):
    memsave = MemSave(summary=False)
    assert_equal(trained(kind, memsave), trained(kind))
    assert memsave.report.loss_class == "exact"


class Shadow(Step):
    """An average in tensors of an object's own, which are edited in place."""

    def prepare(self):
        self.shadow = Agent([weight.detach().clone() for weight in self.other.parameters()])

    def training_step(self, batch, batch_idx):
        for average in self.shadow.counter:
            average.mul_(0.9)
        return self.loss(batch, batch_idx)


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_tensors_that_an_object_holds_are_not_put_back_and_named(batch):
    memsave = MemSave(summary=False)
    with pytest.warns(NotLosslessWarning, match="does not put back the parameters `shadow`"):
        trained(Shadow, memsave, batch)
    assert memsave.report.loss_class == "changed"


@pytest.mark.parametrize("settings", [{"microbatch": 4}, {"checkpointing": "sqrt"}])
@pytest.mark.filterwarnings("ignore:Microbatches change", "ignore:.*had no effect")
def test_a_trial_leaves_objects_as_they_were(settings):
    plain, ours = trained(Counters), trained(Counters, MemSave(**settings, summary=False))
    if "checkpointing" in settings:
        assert_equal(ours, plain)
    assert ours.helper.trainer is ours.trainer
    assert ours.helper.frozen is ours.frozen


# ----------------------------------------------------------------------------- optimizers that a step steps itself
class StepsItself(Step):
    """As the outer loop of meta-learning does, under automatic optimization."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch, batch_idx)
        loss.backward()
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


class Probe(Step):
    """Steps an optimizer of its own for a probe of what is learned."""

    def prepare(self):
        self.probe = nn.Linear(16, 3)
        self.of_probe = torch.optim.Adam(self.probe.parameters(), 0.01)

    def training_step(self, batch, batch_idx):
        self.of_probe.zero_grad()
        F.cross_entropy(self.probe(self.net[:3](batch[0]).detach()), batch[1]).backward()
        self.of_probe.step()
        return self.loss(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.net.parameters(), 0.01)


NO_LOSS = pytest.mark.filterwarnings("ignore:.training_step. returned")


@NO_LOSS
@pytest.mark.parametrize("kind", [StepsItself, Probe])
def test_no_question_or_rehearsal_steps_an_optimizer(kind):
    memsave = MemSave(microbatch=4, summary=False)
    with pytest.warns(MicrobatchWarning, match=r"`training_step` steps an optimizer \((SGD|Adam)\) itself"):
        assert_equal(trained(kind, memsave), trained(kind))
    assert memsave.report.loss_class == "exact"
    with pytest.raises(OwnStepError, match='`checkpointing="blocks"` does not'):
        trained(kind, MemSave(checkpointing="sqrt", summary=False))


@NO_LOSS
@pytest.mark.parametrize("times", [1, 2, 3])
def test_recovery_that_plans_regions_steps_none_either(times):
    memsave = MemSave(summary=False)
    assert_equal(trained(StepsItself, memsave, 1, times), trained(StepsItself))
    assert (memsave.report.loss_class, memsave.report.num_oom_recovered) == ("exact", times)


# ----------------------------------------------------------------------------- what cannot be had again
class ReadsGradients(Step):
    """Scales its loss by a gradient of the last batch."""

    in_backward = True

    def training_step(self, batch, batch_idx):
        last = self.net[0].weight.grad
        return self.loss(batch, batch_idx) * (1 if last is None else 1 + last.norm().detach())


def norm_of_gradients(module):
    found = [getattr(p, "grad") for p in module.parameters()]  # noqa: B009  # as some write it
    return sum(float(gradient.norm()) for gradient in found if gradient is not None)


class ReadsGradientsElsewhere(Step):
    def scale(self):
        return 1 + norm_of_gradients(self.net)

    def training_step(self, batch, batch_idx):
        return self.loss(batch, batch_idx) * self.scale()


@pytest.mark.parametrize("kind", [ReadsGradients, ReadsGradientsElsewhere])
def test_gradients_of_the_last_batch_are_there_for_a_step_that_reads_them(kind):
    memsave = MemSave(summary=False)
    assert_equal(trained(kind, memsave), trained(kind))
    assert memsave.report.loss_class == "exact"


def test_gradients_of_the_last_batch_that_a_failed_try_has_freed_are_named():
    memsave = MemSave(summary=False)
    with pytest.warns(NotLosslessWarning, match=r"ReadsGradients\.training_step, which may read gradients of the last"):
        trained(ReadsGradients, memsave, 2)
    assert memsave.report.loss_class == "changed"


class NoRoomForCopies(TorchDispatchMode):
    def __init__(self, times):
        super().__init__()
        self.left = times

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.left and "clone" in str(func):
            self.left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return func(*args, **(kwargs or {}))


class AtTheStart(L.Callback):
    """Copies fail from the start of the second batch on."""

    def __init__(self, times):
        self.times, self.open = times, contextlib.ExitStack()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            self.open.enter_context(NoRoomForCopies(self.times))

    def on_train_batch_end(self, *_):
        self.open.close()

    def on_exception(self, *_):
        self.open.close()


def test_a_copy_at_the_start_of_a_batch_for_which_there_is_no_room_is_tried_again_and_called_what_it_is():
    def fit(times):
        trainer = L.Trainer(**{**QUIET, "max_steps": 3}, callbacks=[AtTheStart(times), MemSave(summary=False)])
        trainer.fit(Step(), DataLoader(TensorDataset(torch.ones(36, 8), torch.ones(36, dtype=torch.long)), 12))

    LEFT.clear()
    fit(1)
    with pytest.raises(torch.OutOfMemoryError, match=r"before a batch was begun.*Nothing has been changed"):
        fit(100)
