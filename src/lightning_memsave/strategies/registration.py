"""The strategies that can be named: `"memsave"`, `"memsave_ddp"`, `"memsave_fsdp"`, in each Lightning namespace.

`"memsave"` is what `"auto"` would choose: one device, or DDP when there are several.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from lightning_memsave.strategies.mixin import mixin
from lightning_memsave.strategies.namespaces import installed_namespaces


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
    """Register the names in every Lightning namespace that is installed."""
    for namespace in installed_namespaces():
        import_module(f"lightning_memsave.strategies.{namespace.replace('.', '_')}")
