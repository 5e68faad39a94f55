"""Lazy layers, whose parameters have no shape before the first call: a recipe does without what needs one."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, OptimizerState
from tests.strategies.quiet_runs import QUIET


class Lazy(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.LazyLinear(32), nn.GELU(), nn.LazyLinear(8))

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def trained(memsave=None):
    module = Lazy()
    batches = DataLoader(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)), 8)
    torch.manual_seed(2)
    L.Trainer(**{**QUIET, "max_epochs": 2}, callbacks=[memsave] if memsave else []).fit(module, batches)
    return module


@pytest.mark.parametrize("recipe", ["lossless", "exact", "balanced"])
def test_recipes_train_what_plain_lightning_trains(recipe):
    memsave = MemSave(recipe, summary=False)
    found, plain = trained(memsave), trained()
    assert memsave.report.loss_class == "exact"
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("precision", "bf16-sr"),
        ("optimizer_state", "8bit"),
        ("optimizer_state", OptimizerState(first_moment="32bit", gradients="release")),
        ("checkpointing", "sqrt"),
        ("budget", "1GiB"),
    ],
    ids=str,
)
def test_what_needs_shapes_says_so_before_training(name, setting):
    with pytest.raises(ValueError, match=f"`{name}` needs parameters that have their shapes, got 'net.0.weight'"):
        trained(MemSave(**{name: setting}, summary=False))
