"""One device with memory saving, or DDP where the trainer asks for several."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_memsave.strategies.ddp import MemSaveDDPStrategy
from lightning_memsave.strategies.memsave_mixin import MemSaveMixin


class MemSaveStrategy(MemSaveMixin, SingleDeviceStrategy):
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
        """Become DDP where there are several devices; the connector calls this last (private in Lightning)."""
        if len(self._devices or ()) <= 1 and self.num_nodes == 1:
            return
        ddp: Any = MemSaveDDPStrategy(
            accelerator=self._accelerator,
            parallel_devices=self._devices,
            checkpoint_io=self._checkpoint_io,
            precision_plugin=self._precision_plugin,
            cluster_environment=self.cluster_environment,
        )
        ddp.num_nodes, ddp._memsave = self.num_nodes, self._memsave
        becomes: Any = self
        becomes.__class__, becomes.__dict__ = MemSaveDDPStrategy, ddp.__dict__
        ddp.set_world_ranks()
        ddp._configure_launcher()
