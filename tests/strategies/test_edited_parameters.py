"""Modules whose forward changes a parameter of their own: never done twice under the name of `exact`."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave
from lightning_memsave.core.errors import NotLosslessWarning
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError
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


def trained(block, memsave=None, fails=False):
    """Return the module's state after four batches."""
    module = Module(block)
    FAILURES["left"] = fails
    batches = DataLoader(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), batch_size=8)
    trainer = L.Trainer(**{**QUIET, "max_steps": 4}, callbacks=[memsave] if memsave else [])
    trainer.fit(module, batches)
    return module.state_dict()


def assert_equal(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


@pytest.mark.parametrize("settings", [{"recipe": "exact"}, {"checkpointing": "blocks"}, {"checkpointing": "sqrt"}])
def test_a_region_that_edits_its_parameter_is_refused_by_name(settings):
    with pytest.raises(ValueError, match=r"`checkpointing` must not select.*Average: `mean`"):
        trained(Average, MemSave(**settings, summary=False))


@pytest.mark.parametrize("settings", [{"recipe": "exact"}, {"checkpointing": "blocks"}, {"checkpointing": "sqrt"}])
def test_a_region_may_set_initial_values_in_its_first_call(settings):
    memsave = MemSave(**settings, summary=False)
    assert_equal(trained(Initialised, memsave), trained(Initialised))
    assert memsave.report.loss_class == "exact"


def test_memory_that_runs_out_behind_an_edit_ends_the_run_and_says_which_parameter():
    with pytest.raises(OutOfMemoryUnrecoverableError, match=r"edits the parameter `blocks\.0\.mean` in place"):
        trained(Average, MemSave(summary=False), fails=True)


def test_a_parameter_that_was_replaced_is_put_back_when_memory_runs_out():
    memsave = MemSave(summary=False)
    assert_equal(trained(Quantizer, memsave, fails=True), trained(Quantizer))
    assert memsave.report.loss_class == "exact"


@pytest.mark.filterwarnings("ignore:memsave. the batch was run in")
@pytest.mark.parametrize(("block", "name"), [(Average, "mean"), (Quantizer, "book")])
def test_microbatches_that_change_a_parameter_each_say_so(block, name):
    memsave = MemSave(microbatch=4, summary=False)
    with pytest.warns(NotLosslessWarning, match=f"`blocks.0.{name}`"):
        trained(block, memsave)
    assert memsave.report.loss_class == "changed"


@pytest.mark.parametrize("block", [Average, Quantizer])
@pytest.mark.filterwarnings("ignore:tiling had no effect")
def test_tiles_leave_such_modules_whole_and_as_they_were(block):
    memsave = MemSave(tiling="samples", summary=False)
    assert_equal(trained(block, memsave), trained(block))
    assert memsave.report.loss_class == "exact"
