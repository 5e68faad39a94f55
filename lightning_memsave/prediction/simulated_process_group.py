"""Strategies of a run on paper: one device, or one process of several whose others are not there.

Torch's "fake" process group answers every collective at once, as if all processes had the same. DDP and FSDP2 are the
real ones, so buckets, views into them, shards and what is gathered from them are allocated by their own code.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_memsave.core.errors import setting_error
from lightning_memsave.lightning_compat import counterpart
from lightning_memsave.torch_internals.dispatch_mode import DispatchMode

T = TypeVar("T")


@contextlib.contextmanager
def on_paper(namespace: str, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield settings of a `Trainer` that starts no process and moves no module; this is rank 0 of its processes.

    Args:
        namespace: of Lightning.
        settings: as for `Trainer`. A strategy is copied.

    Raises:
        ValueError: the strategy is neither one device's, nor DDP, nor Lightning's for FSDP2; `devices` or `num_nodes`
            is no number; or this process is one of several already.
    """
    num_processes = num_processes_of(settings)
    strategy = _strategy(namespace, settings.get("strategy", "auto"), num_processes)
    options = {"devices": 1, **settings, "strategy": strategy, "accelerator": "cpu"}
    if isinstance(strategy, counterpart(SimulatedDevice, namespace)):
        yield options
        return
    if dist.is_initialized():
        remedy = "Predict before the run, or in a process of its own."
        raise setting_error(
            "devices", "cannot be predicted in a process that has a process group", num_processes, remedy
        )
    excepthook = sys.excepthook  # replaced with every group
    dist.init_process_group("fake", rank=0, world_size=num_processes)
    try:
        yield options
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def num_processes_of(settings: Mapping[str, Any]) -> int:
    """Return the number of processes on all nodes together.

    Raises:
        ValueError: `devices` or `num_nodes` is no number.
    """
    numbers = [settings.get(name, 1) for name in ("devices", "num_nodes")]
    for name, number in zip(("devices", "num_nodes"), numbers, strict=True):
        if type(number) is not int or number < 1:
            raise setting_error(name, "must be an integer of at least 1 in a prediction", number, "As the run has.")
    return math.prod(numbers)


def _strategy(namespace: str, strategy: str | Strategy, num_processes: int) -> Any:
    strategies = import_module(f"{namespace}.strategies")
    if strategy in ("auto", "memsave") or isinstance(strategy, strategies.SingleDeviceStrategy):
        if num_processes == 1:
            return counterpart(SimulatedDevice, namespace)(device="cpu")
        strategy = "ddp"
    named = strategies.StrategyRegistry
    if isinstance(strategy, str) and strategy not in named:
        raise setting_error("strategy", "must be one that Lightning knows", strategy, "For example 'ddp'.")
    kind: Any = named[strategy]["strategy"] if isinstance(strategy, str) else type(strategy)
    is_ours = issubclass(kind, strategies.DDPStrategy | strategies.ModelParallelStrategy)
    if not is_ours or issubclass(kind, strategies.DeepSpeedStrategy):  # which derives from DDP's
        rule = "must be one device's, DDP or FSDP2 ('memsave_fsdp') in a prediction"
        remedy = "Others own the step, and cannot be run without their processes."
        raise setting_error("strategy", rule, strategy if isinstance(strategy, str) else kind.__name__, remedy)
    found = named.get(strategy) if isinstance(strategy, str) else copy.deepcopy(strategy)
    found.__class__ = _simulated(kind, namespace)
    return found


class SimulatedDevice(SingleDeviceStrategy):
    """One device; neither moves a module, which torch refuses for fake parameters, nor brings it back."""

    def model_to_device(self) -> None:
        """Leave the module where it is."""

    def teardown(self) -> None:
        """Leave the module where it is."""


class SimulatedProcess(Strategy):
    """Mixin of a strategy of several processes, for one of them; the process group is there already."""

    _ddp_kwargs: dict[str, Any]

    def _configure_launcher(self) -> None:
        pass

    def setup_environment(self) -> None:
        """Set up ranks and meshes, which are made of numbers."""
        with _disable_current_modes():
            super().setup_environment()

    def model_to_device(self) -> None:
        """Leave the module where it is."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Wrap the model; called for DDP only, where `init_sync` would compare numbers of all processes."""
        ddp = _LonelyDDP(model, **{**self._ddp_kwargs, "init_sync": False})
        ddp.register_comm_hook(None, noop_hook)  # the "fake" group would not hand it the result
        return ddp

    def barrier(self, *_: object, **__: object) -> None:
        """Wait for nobody."""

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return what this process has."""
        return obj

    def teardown(self) -> None:
        """Leave the module where it is."""


@functools.cache
def _simulated(kind: type, namespace: str) -> type:
    """Return a class of strategies for one process of several; under the name of the strategy, for messages."""
    return type(kind.__name__, (counterpart(SimulatedProcess, namespace), kind), {"__module__": __name__})


class _LonelyDDP(nn.parallel.DistributedDataParallel):
    """Orders its buckets anew after the first step, for which it must read numbers."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with _RealNumbers():
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # as above


class _RealNumbers(DispatchMode):
    """DDP's own indices, which are its only int32 tensors, are real among fake tensors."""

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        """Run operations on DDP's indices without fake tensors, and any other as it is."""
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_index = all(t.dtype == torch.int32 for t in tensors) if tensors else kwargs.get("dtype") == torch.int32
        with _disable_current_modes() if is_index else contextlib.nullcontext():
            return func(*args, **kwargs)
