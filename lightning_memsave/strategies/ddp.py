"""DDP with memory saving."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy

from lightning_memsave.strategies.memsave_mixin import MemSaveMixin


class MemSaveDDPStrategy(MemSaveMixin, DDPStrategy):
    """DDP with memory saving."""
