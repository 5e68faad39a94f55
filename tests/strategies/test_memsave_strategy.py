"""`MemSaveStrategy`: one device, and DDP where there are several."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.plugins import AsyncCheckpointIO, DoublePrecision
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, MemSaveDDPStrategy, MemSaveStrategy
from lightning_memsave.planner.recipes import RECIPES
from tests.strategies.quiet_runs import QUIET


def test_several_devices_become_ddp():
    trainer = L.Trainer(strategy="memsave", devices=2, **QUIET)
    assert type(trainer.strategy) is MemSaveDDPStrategy
    assert trainer.strategy.num_processes == 2


def test_one_device_stays_one():
    trainer = L.Trainer(strategy=MemSaveStrategy(), devices=1, **QUIET)
    assert type(trainer.strategy) is MemSaveStrategy
    assert trainer.strategy.root_device == torch.device("cpu")
    assert (trainer.world_size, trainer.strategy.is_global_zero) == (1, True)
    assert trainer.strategy.parallel_devices == [torch.device("cpu")]


def test_the_first_of_the_devices_is_the_root():
    strategy = MemSaveStrategy()
    assert strategy.parallel_devices is None
    strategy.parallel_devices = [torch.device("meta"), torch.device("cpu")]
    assert strategy.root_device == torch.device("meta")


def test_several_nodes_of_one_device_each_become_ddp():
    trainer = L.Trainer(strategy="memsave", devices=1, num_nodes=2, **QUIET)
    assert type(trainer.strategy) is MemSaveDDPStrategy
    assert (trainer.strategy.num_nodes, trainer.world_size) == (2, 2)


def test_ddp_takes_over_what_the_strategy_was_made_with():
    plugin, checkpoint_io = DoublePrecision(), AsyncCheckpointIO()
    made = MemSaveStrategy(checkpoint_io=checkpoint_io, precision_plugin=plugin)
    session = made.memsave
    trainer = L.Trainer(strategy=made, devices=3, **QUIET)
    assert trainer.strategy is made, "the object that the user holds"
    assert type(made) is MemSaveDDPStrategy
    assert made.precision_plugin is plugin
    assert made.checkpoint_io is checkpoint_io
    assert made.memsave is session
    assert made.parallel_devices == [torch.device("cpu")] * 3


@pytest.mark.parametrize("slots", [{}, {"microbatch": 2}], ids=str)
def test_weights_are_those_of_plain_lightning(slots):
    def fitted(**options):
        torch.manual_seed(0)
        module = BoringModel()
        L.Trainer(limit_val_batches=0, **options, **QUIET).fit(module)
        return module.layer.weight

    ours = fitted(strategy="memsave", callbacks=[MemSave(**slots)] if slots else [])
    assert torch.equal(ours, fitted())  # batches of one sample


def test_the_recipe_is_lossless_until_a_callback_says_otherwise():
    strategy = MemSaveStrategy()
    assert strategy.memsave.recipe == RECIPES["lossless"]
    assert strategy.memsave is strategy.memsave


def test_a_strategy_by_name_has_the_callback_that_measures_and_sums_up():
    trainer = L.Trainer(strategy="memsave", max_epochs=1, **QUIET)
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 64), batch_size=8))
    memsave, *others = trainer.callbacks
    assert isinstance(memsave, MemSave)
    assert not any(isinstance(each, MemSave) for each in others)
    assert memsave.report.peak_bytes == sum(memsave.report.by_category.values()) > 0
    own = MemSave("measure")
    trainer = L.Trainer(strategy="memsave", callbacks=[own], max_epochs=1, **QUIET)
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 64), batch_size=8))
    assert [each for each in trainer.callbacks if isinstance(each, MemSave)] == [own]
