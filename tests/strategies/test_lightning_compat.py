"""Lightning's private names that this package uses, each named when it moves; and the names that it registers."""

from __future__ import annotations

from importlib import import_module
from types import FunctionType, SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_memsave import MemSaveDDPStrategy, MemSaveStrategy, lightning_compat
from lightning_memsave.lightning_compat import NAMESPACES, counterpart
from lightning_memsave.lightning_compat import _translated as translated
from lightning_memsave.loops.microbatch_loop import MicrobatchClosure, MicrobatchLoop
from lightning_memsave.strategies.memsave_mixin import MemSaveMixin
from tests.strategies.quiet_runs import QUIET


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


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_private_attributes_that_are_read_with_a_default(namespace):
    strategies, callbacks = (import_module(f"{namespace}.{name}") for name in ("strategies", "callbacks"))
    assert {"_ddp_kwargs", "_ddp_comm_hook"} <= vars(strategies.DDPStrategy()).keys()
    assert "_tensor_parallel_size" in vars(strategies.ModelParallelStrategy())
    assert callbacks.BatchSizeFinder()._early_exit is False
    assert import_module(namespace).LightningModule()._compiler_ctx is None


def test_torch_private_names_of_the_optimizer_swap():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    assert callable(optimizer._patch_step_function)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert optimizer.step._wrapped_by_lr_sched is True
    optimizer.step()
    assert optimizer._opt_called is True
