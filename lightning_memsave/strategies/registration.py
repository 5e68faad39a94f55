"""The strategies that can be named: `"memsave"`, `"memsave_ddp"`, `"memsave_fsdp"`, in each Lightning namespace.

`"memsave"` is one device, or DDP when there are several.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from lightning_memsave.strategies.memsave_strategy import mixin


def strategy_classes(namespace: str, module: str) -> dict[str, Any]:
    """Build the strategy classes of one namespace, importable from `module` (spawned processes look them up there)."""
    strategies: Any = import_module(f"{namespace}.strategies")
    mixed: Any = mixin(namespace)

    class MemSaveDDPStrategy(mixed, strategies.DDPStrategy):  # type: ignore[misc]  # bases known at run time
        """DDP with memory saving."""

    class MemSaveFSDPStrategy(mixed, strategies.ModelParallelStrategy):  # type: ignore[misc]  # bases known at run time
        """FSDP2 (Lightning's model-parallel strategy; the module calls `fully_shard` in `configure_model`)."""

    class MemSaveStrategy(mixed, strategies.SingleDeviceStrategy):  # type: ignore[misc]  # bases known at run time
        """One device with memory saving; becomes `MemSaveDDPStrategy` when the trainer asks for several."""

        def __init__(self, accelerator: Any = None, checkpoint_io: Any = None, precision_plugin: Any = None) -> None:
            super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
            self._devices: list[torch.device] | None = None
            # The connector fills these in on any strategy that has them.
            self.cluster_environment, self.num_nodes = None, 1

        @property
        def parallel_devices(self) -> list[torch.device] | None:
            """The devices that the trainer chose."""
            return self._devices

        @parallel_devices.setter
        def parallel_devices(self, devices: list[torch.device] | None) -> None:
            self._devices = devices
            if devices:
                self._root_device = torch.device(devices[0])

        def _configure_launcher(self) -> None:
            """Called last by the connector (private, seen in Lightning 2.6)."""
            if len(self._devices or ()) <= 1 and self.num_nodes == 1:
                return
            ddp = MemSaveDDPStrategy(
                accelerator=self._accelerator,
                parallel_devices=self._devices,
                checkpoint_io=self._checkpoint_io,
                precision_plugin=self._precision_plugin,
                cluster_environment=self.cluster_environment,
            )
            ddp.num_nodes, ddp._memsave = self.num_nodes, self._memsave
            self.__class__, self.__dict__ = MemSaveDDPStrategy, ddp.__dict__
            self.set_world_ranks()
            self._configure_launcher()

    named = {"memsave": MemSaveStrategy, "memsave_ddp": MemSaveDDPStrategy, "memsave_fsdp": MemSaveFSDPStrategy}
    for cls in named.values():
        cls.__module__, cls.__qualname__ = module, cls.__name__
    for name, cls in named.items():
        if name not in strategies.StrategyRegistry:
            strategies.StrategyRegistry.register(name, cls, description=(cls.__doc__ or "").partition("\n")[0])
    return {cls.__name__: cls for cls in named.values()}


def register_strategies() -> None:
    """Register the names in `lightning.pytorch` now, and in `pytorch_lightning` once somebody imports it.

    Not sooner: importing `pytorch_lightning` redirects Lightning's own log messages to itself.
    """
    _register_in("lightning.pytorch")
    if sys.modules.get("pytorch_lightning") is not None:
        _register_in("pytorch_lightning")
    elif not any(isinstance(finder, _RegisterOnceImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _RegisterOnceImported())


def _register_in(namespace: str) -> None:
    import_module(f"lightning_memsave.strategies.{namespace.replace('.', '_')}")


class _RegisterOnceImported(MetaPathFinder):
    """Finds nothing itself: runs our registration right after the import of `pytorch_lightning`."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "pytorch_lightning":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register_in(name)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]  # this loader only
        return spec
