"""Modules whose forward changes a parameter of their own: never done twice under the name of `exact`."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave
from lightning_memsave.core.errors import NotLosslessWarning, RegionError
from tests.strategies.quiet_runs import QUIET


class Average(nn.Module):
    """Keeps a moving average of what it returns in a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.linear, self.mean = nn.Linear(8, 8), nn.Parameter(torch.zeros(8), requires_grad=False)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(y.mean(0), 0.1)
        return x + y


class HiddenAverage(Average):
    """The same, edited through `.data`, which autograd does not see."""

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.training:
            self.mean.data.lerp_(y.detach().mean(0), 0.1)
        return x + y


class NewAverage(Average):
    """The same, in memory of its own after each call."""

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.training:
            self.mean.data = 0.9 * self.mean.data + 0.1 * y.detach().mean(0)
        return x + y


class Decayed(nn.Module):
    """Shrinks a weight that is trained, each time from call number `start` on."""

    start = 1

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def edit(self, weight):
        with torch.no_grad():
            weight.mul_(0.9)

    def forward(self, x):
        self.calls.add_(1)
        if self.training and self.calls >= self.start:
            self.edit(self.linear.weight)
        return x + torch.tanh(self.linear(x))


class HiddenDecayed(Decayed):
    def edit(self, weight):
        weight.data.mul_(0.9)


class LateDecayed(HiddenDecayed):
    start = 3


class Unread(Decayed):
    """Shrinks a bias that backward does not read: what is kept in forward does not show it."""

    def __init__(self):
        super().__init__()
        self.added = nn.Parameter(torch.ones(8))

    def forward(self, x):
        self.calls.add_(1)
        y = torch.tanh(self.linear(x))
        if self.training and self.calls >= self.start:
            with torch.no_grad():
                self.added.mul_(0.9)
        return x + y + self.added


class UnreadLate(Unread):
    """The same from a call on that is not one of those that are compared."""

    start = 6


class Clamped(Decayed):
    def edit(self, weight):
        with torch.no_grad():
            weight.clamp_(-0.1, 0.1)


class HiddenClamped(Decayed):
    def edit(self, weight):
        weight.data.clamp_(-0.1, 0.1)


class Quantizer(nn.Module):
    """Vector quantization whose code book is a new parameter after each call, as is often copied."""

    def __init__(self):
        super().__init__()
        self.linear, self.sums = nn.Linear(8, 8), nn.Parameter(torch.randn(4, 8))
        self.book = nn.Parameter(torch.randn(4, 8))

    def forward(self, x):
        z = self.linear(x)
        chosen = F.one_hot(torch.cdist(z, self.book).argmin(1), 4).float()
        found = chosen @ self.book
        if self.training:
            self.sums = nn.Parameter(self.sums * 0.9 + 0.1 * chosen.t() @ z)
            self.book = nn.Parameter(self.sums / 2)
        return z + (found - z).detach()


class Initialised(nn.Module):
    """Sets its bias by the first batch, as normalising flows do."""

    def __init__(self):
        super().__init__()
        self.linear, self.bias = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x):
        if not self.is_set:
            with torch.no_grad():
                self.bias.copy_(-self.linear(x).mean(0))
                self.is_set.fill_(True)
        return x + torch.tanh(self.linear(x) + self.bias)


FAILURES: dict[str, bool] = {}
"""Of memory, in the second batch; not the module's, whose attributes are put back."""


class Module(L.LightningModule):
    def __init__(self, block):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.Sequential(block(), block()), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        loss = self.head(self.blocks(batch)).square().mean()
        if batch_idx == 1 and FAILURES.pop("left", False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(block, memsave=None, fails=False, num_batches=4):
    """Return the module's state after so many batches."""
    module = Module(block)
    FAILURES["left"] = fails
    batches = DataLoader(torch.randn(8 * num_batches, 8, generator=torch.Generator().manual_seed(1)), batch_size=8)
    trainer = L.Trainer(**{**QUIET, "max_steps": num_batches}, callbacks=[memsave] if memsave else [])
    trainer.fit(module, batches)
    return module.state_dict()


def assert_equal(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


AVERAGES = [Average, HiddenAverage, NewAverage]
DECAYED = [Decayed, HiddenDecayed, LateDecayed, Unread]
SAME_AGAIN = [Initialised, Clamped, HiddenClamped]
"""What these set does not depend on how often they do."""
REGIONS = [{"checkpointing": way} for way in ("blocks", "sqrt", "recursive")]


@pytest.mark.parametrize("block", AVERAGES)
@pytest.mark.parametrize("settings", REGIONS)
def test_a_region_that_edits_its_frozen_parameter_is_refused_by_name(settings, block):
    with pytest.raises(ValueError, match=rf"`checkpointing` must not select.*{block.__name__}: `mean`"):
        trained(block, MemSave(**settings, summary=False))


@pytest.mark.parametrize("block", DECAYED)
@pytest.mark.parametrize("settings", REGIONS)
def test_a_region_whose_repetition_edits_a_weight_once_more_is_an_error_that_names_it(settings, block):
    with pytest.raises(RegionError, match=r"edits in place.*`blocks\.[01]\.(linear\.weight|added)`"):
        trained(block, MemSave(**settings, summary=False))


@pytest.mark.parametrize("settings", REGIONS)
def test_an_edit_that_begins_between_the_calls_that_are_compared_is_an_error_too(settings):
    with pytest.raises(RegionError, match=r"edits in place.*`blocks\.[01]\.added`"):
        trained(UnreadLate, MemSave(**settings, summary=False), num_batches=8)


@pytest.mark.parametrize("block", SAME_AGAIN)
@pytest.mark.parametrize("settings", [{"recipe": "exact"}, *REGIONS])
def test_a_region_may_set_what_its_repetition_sets_again(settings, block):
    memsave = MemSave(**settings, summary=False)
    assert_equal(trained(block, memsave), trained(block))
    assert memsave.report.loss_class == "exact"


@pytest.mark.parametrize("block", [*AVERAGES, *DECAYED])
def test_the_recipe_exact_goes_on_without_regions_and_says_what_was_edited_twice(block):
    memsave = MemSave("exact", summary=False)
    with pytest.warns(NotLosslessWarning, match=r"run again does not put back the parameters `blocks\.[01]\."):
        trained(block, memsave)
    assert memsave.report.loss_class == "changed"


@pytest.mark.parametrize("block", [*AVERAGES, Decayed, HiddenDecayed])
def test_memory_that_runs_out_behind_an_edit_makes_the_result_another_and_says_so(block):
    memsave = MemSave(summary=False)
    with pytest.warns(NotLosslessWarning, match=r"the parameters `blocks\.0\.(mean|linear\.weight)`"):
        trained(block, memsave, fails=True)
    (microbatching,) = [each for each in memsave.report.applied if each.technique == "microbatching"]
    assert (memsave.report.loss_class, microbatching.summary) == ("changed", "batches run again")


def test_memory_that_runs_out_in_a_batch_that_edits_nothing_costs_nothing():
    memsave = MemSave(summary=False)
    assert_equal(trained(Initialised, memsave, fails=True), trained(Initialised))
    assert memsave.report.loss_class == "exact"


@pytest.mark.parametrize("block", [Clamped, HiddenClamped])
def test_nobody_knows_of_an_edit_whether_the_failed_try_would_have_put_it_back(block):
    memsave = MemSave(summary=False)
    with pytest.warns(NotLosslessWarning, match=r"the parameters `blocks\.0\.linear\.weight`"):
        found = trained(block, memsave, fails=True)
    assert_equal(found, trained(block))
    assert memsave.report.loss_class == "changed"


def test_a_parameter_that_was_replaced_is_put_back_when_memory_runs_out():
    memsave = MemSave(summary=False)
    assert_equal(trained(Quantizer, memsave, fails=True), trained(Quantizer))
    assert memsave.report.loss_class == "exact"


@pytest.mark.filterwarnings("ignore:memsave. the batch was run in")
@pytest.mark.parametrize(
    ("block", "name"),
    [
        *((block, "mean") for block in AVERAGES),
        *((block, "linear.weight") for block in DECAYED[:2]),
        (Quantizer, "book"),
    ],
)
def test_microbatches_that_change_a_parameter_each_say_so(block, name):
    memsave = MemSave(microbatch=4, summary=False)
    with pytest.warns(NotLosslessWarning, match=f"`blocks.0.{name}`"):
        trained(block, memsave)
    assert memsave.report.loss_class == "changed"


@pytest.mark.parametrize("block", [*AVERAGES, *DECAYED, Quantizer])
@pytest.mark.filterwarnings("ignore:tiling had no effect")
def test_tiles_leave_such_modules_whole_and_as_they_were(block):
    memsave = MemSave(tiling="samples", summary=False)
    assert_equal(trained(block, memsave), trained(block))
    assert memsave.report.loss_class == "exact"
