"""The strategies for `pytorch_lightning`; importing this module registers their names there."""

from __future__ import annotations

from lightning_memsave.lightning_compat import counterpart
from lightning_memsave.strategies import ddp, fsdp, memsave_strategy
from lightning_memsave.strategies.registration import register

MemSaveStrategy, MemSaveDDPStrategy, MemSaveFSDPStrategy = (
    counterpart(cls, "pytorch_lightning")
    for cls in (memsave_strategy.MemSaveStrategy, ddp.MemSaveDDPStrategy, fsdp.MemSaveFSDPStrategy)
)
for _cls in (MemSaveStrategy, MemSaveDDPStrategy, MemSaveFSDPStrategy):
    _cls.__module__ = __name__  # spawned processes look them up here

register("pytorch_lightning")
