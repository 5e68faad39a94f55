"""The strategies by name, in either Lightning."""

from __future__ import annotations

import textwrap

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry

from lightning_memsave import MemSave, MemSaveDDPStrategy, MemSaveFSDPStrategy, MemSaveStrategy
from lightning_memsave.planner.recipes import RECIPES
from lightning_memsave.strategies.registration import register, register_strategies
from tests.strategies.quiet_runs import QUIET, fours, run


@pytest.mark.parametrize("callbacks", [[], [MemSave(microbatch=1)]], ids=["alone", "with the callback"])
def test_strategy_by_name(callbacks):
    trainer = L.Trainer(strategy="memsave", callbacks=callbacks, **QUIET)
    assert type(trainer.strategy) is MemSaveStrategy
    trainer.fit(BoringModel(), fours())
    assert trainer.strategy.memsave.recipe == RECIPES["lossless"]
    if callbacks:  # its configuration wins, for as long as it is there
        applied = callbacks[0].report.applied
        assert [a.technique for a in applied] == ["early_zero_grad", "microbatching"]
    else:
        assert [a.technique for a in trainer.strategy.memsave.applied] == ["early_zero_grad"]


def test_strategy_by_instance_and_by_ddp_name():
    trainer = L.Trainer(strategy=MemSaveStrategy(), **QUIET)
    trainer.fit(BoringModel())
    trainer = L.Trainer(strategy="memsave_ddp", devices=1, **QUIET)
    assert type(trainer.strategy) is MemSaveDDPStrategy
    with pytest.raises(ValueError, match="nosuch"):
        L.Trainer(strategy="memsave_nosuch", **QUIET)


def test_a_missing_second_namespace_is_no_problem():
    program = "\n".join(
        [
            "import sys; sys.modules['pytorch_lightning'] = None",
            "import lightning as L, lightning_memsave",
            f"L.Trainer(strategy='memsave', **{QUIET!r})",
        ]
    )
    run(program)


@pytest.mark.parametrize("name", ["memsave", "memsave_ddp", "memsave_fsdp"])
def test_each_name_is_registered_once_with_a_line_about_it(name):
    before = dict(StrategyRegistry)
    register_strategies()
    register("lightning.pytorch")
    assert dict(StrategyRegistry) == before
    entry = StrategyRegistry[name]
    assert entry["strategy"] is NAMED[name]
    assert entry["description"] == NAMED[name].__doc__.splitlines()[0] != ""


NAMED = {"memsave": MemSaveStrategy, "memsave_ddp": MemSaveDDPStrategy, "memsave_fsdp": MemSaveFSDPStrategy}


def test_a_name_that_somebody_has_taken_is_left_to_them():
    program = """
        import lightning.pytorch as pl
        from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
        StrategyRegistry.register("memsave", SingleDeviceStrategy, description="theirs")
        import lightning_memsave
        assert StrategyRegistry["memsave"]["strategy"] is SingleDeviceStrategy
        assert StrategyRegistry["memsave_ddp"]["strategy"] is lightning_memsave.MemSaveDDPStrategy
    """
    run(textwrap.dedent(program))
