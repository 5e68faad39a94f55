"""Lightning's private names that this package uses, each named when it moves; and the names that it registers."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from types import FunctionType, SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, MemSaveDDPStrategy, MemSaveStrategy, lightning_compat
from lightning_memsave.lightning_compat import NAMESPACES, counterpart, namespace_of
from lightning_memsave.lightning_compat import _translated as translated
from lightning_memsave.loops.microbatch_loop import MicrobatchClosure, MicrobatchLoop
from lightning_memsave.planner.recipes import RECIPES
from lightning_memsave.strategies.memsave_mixin import MemSaveMixin

QUIET = {
    "accelerator": "cpu",
    "max_steps": 3,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def fours() -> DataLoader:
    return DataLoader(RandomDataset(32, 64), batch_size=4)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_private_names_of_lightning(namespace):
    pl = SimpleNamespace(
        AutomaticOptimization=translated(lightning_compat.AutomaticOptimization, namespace),
        Closure=translated(lightning_compat.Closure, namespace),
    )
    for name in ("_training_step", "_make_step_fn", "_make_backward_fn", "_make_zero_grad_fn", "_make_closure"):
        assert callable(getattr(pl.AutomaticOptimization, name)), f"_AutomaticOptimization.{name} has moved"
    loop = pl.AutomaticOptimization(L.Trainer(**QUIET))
    assert {"optim_progress", "_skip_backward", "trainer"} <= set(vars(loop)), "attributes of the loop have moved"
    closure = pl.Closure(lambda: None)
    assert {"_step_fn", "_backward_fn", "_zero_grad_fn"} <= set(vars(closure)), "attributes of Closure have moved"
    results = import_module(f"{namespace}.trainer.connectors.logger_connector.result")._ResultCollection(True)
    assert {"batch", "batch_size"} <= set(vars(results)), "attributes of the results have moved"
    assert callable(translated(lightning_compat.block_sync, namespace))


@pytest.mark.parametrize("cls", [MicrobatchLoop, MicrobatchClosure, MemSaveMixin, MemSaveStrategy, MemSaveDDPStrategy])
def test_a_counterpart_derives_from_the_other_namespace_alone(cls):
    other = counterpart(cls, "pytorch_lightning")
    assert counterpart(cls, "lightning.pytorch") is cls
    assert counterpart(cls, "pytorch_lightning") is other
    assert not any(base.__module__.startswith("lightning.pytorch.") for base in other.__mro__)
    for name, value in vars(cls).items():
        if isinstance(value, FunctionType):
            assert vars(other)[name].__code__ is value.__code__


def test_private_attributes_of_the_trainer():
    trainer, module = L.Trainer(**QUIET), BoringModel()
    trainer.fit(module)
    epoch_loop = trainer.fit_loop.epoch_loop
    assert isinstance(epoch_loop._batches_that_stepped, int)
    assert hasattr(trainer, "_results")
    assert hasattr(module, "_current_fx_name")
    assert hasattr(trainer._logger_connector, "_current_fx")
    assert hasattr(module, "_trainer")
    assert isinstance(epoch_loop.automatic_optimization, lightning_compat.AutomaticOptimization)


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


def test_several_devices_become_ddp():
    trainer = L.Trainer(strategy="memsave", devices=2, **QUIET)
    assert type(trainer.strategy) is MemSaveDDPStrategy
    assert trainer.strategy.num_processes == 2


def test_the_loop_is_put_back_after_fit():
    trainer = L.Trainer(callbacks=[MemSave(microbatch=1)], **QUIET)
    before = trainer.fit_loop.epoch_loop.automatic_optimization
    trainer.fit(BoringModel())
    assert trainer.fit_loop.epoch_loop.automatic_optimization is before
    assert trainer.global_step == 3


def test_adoption_keeps_the_users_strategy():
    trainer = L.Trainer(callbacks=[MemSave()], **QUIET)
    chosen = trainer.strategy
    chosen.optimizer_step = wrapped = chosen.optimizer_step  # somebody's own, which stays
    trainer.fit(BoringModel())
    assert trainer.strategy is chosen
    assert vars(chosen)["optimizer_step"] is wrapped
    assert type(chosen) is L.pytorch.strategies.SingleDeviceStrategy  # again
    assert namespace_of(chosen) == "lightning.pytorch"


@pytest.mark.parametrize(
    "where", ["setup", "configure_optimizers", "on_fit_start", "training_step", "validation_step", "on_fit_end"]
)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_fit_that_fails_gives_the_strategy_back(where, error):
    def fails(*_, **__):
        raise error("mine")

    module, trainer = BoringModel(), L.Trainer(callbacks=[MemSave()], **QUIET)
    setattr(module, where, fails)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        trainer.fit(module)
    assert type(trainer.strategy) is L.pytorch.strategies.SingleDeviceStrategy
    assert not [name for name in vars(trainer.strategy) if "memsave" in name]
    memsave = MemSave()
    options = {name: value for name, value in QUIET.items() if name != "accelerator"}
    trainer = L.Trainer(callbacks=[memsave], strategy=trainer.strategy, **options)  # it can be used again
    trainer.fit(BoringModel())
    assert memsave.report.peak_bytes


@pytest.mark.parametrize("order", ["memsave first", "pytorch_lightning first"])
def test_the_other_namespace(order):
    """In a process of its own, because importing `pytorch_lightning` cannot be undone."""
    imports = ["import lightning_memsave", "import pytorch_lightning as pl"]
    by_name = "import lightning_memsave.strategies.pytorch_lightning" if order == "memsave first" else ""
    program = "\n".join(
        [
            *(imports if order == "memsave first" else reversed(imports)),
            "import logging, warnings; warnings.simplefilter('ignore')",
            "from pytorch_lightning.demos.boring_classes import BoringModel, RandomDataset",
            "from torch.utils.data import DataLoader",
            f"quiet = {QUIET!r}",
            by_name,
            "trainer = pl.Trainer(strategy='memsave', **quiet)",
            "trainer.fit(BoringModel())",
            "assert [a.technique for a in trainer.strategy.memsave.applied] == ['early_zero_grad']",
            "memsave = lightning_memsave.MemSave(microbatch=1)",
            "data = DataLoader(RandomDataset(32, 64), batch_size=4)",
            "pl.Trainer(callbacks=[memsave], **quiet).fit(BoringModel(), data)",
            "assert memsave.report.peak_bytes > 0 and memsave.report.microbatch_size == 1",
            "from pickle import dumps, loads",
            "from lightning_memsave.strategies.pytorch_lightning import MemSaveStrategy",
            "assert loads(dumps(MemSaveStrategy)) is MemSaveStrategy is type(trainer.strategy)",
        ]
    )
    run(program)


def test_a_missing_second_namespace_is_no_problem():
    program = "\n".join(
        [
            "import sys; sys.modules['pytorch_lightning'] = None",
            "import lightning as L, lightning_memsave",
            f"L.Trainer(strategy='memsave', **{QUIET!r})",
        ]
    )
    run(program)


def test_torch_private_names_of_the_optimizer_swap():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert callable(optimizer._patch_step_function)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert optimizer.step._wrapped_by_lr_sched is True
    optimizer.step()
    assert optimizer._opt_called is True
