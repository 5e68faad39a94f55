"""FSDP2 with memory saving."""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_memsave.strategies.memsave_mixin import MemSaveMixin


class MemSaveFSDPStrategy(MemSaveMixin, ModelParallelStrategy):
    """FSDP2 (Lightning's model-parallel strategy; the module calls `fully_shard` in `configure_model`)."""
