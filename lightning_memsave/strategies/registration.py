"""The strategies that can be named: `"memsave"`, `"memsave_ddp"`, `"memsave_fsdp"`.

`"memsave"` is one device, or DDP when there are several.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from lightning_memsave.lightning_compat import counterpart
from lightning_memsave.strategies.ddp import MemSaveDDPStrategy
from lightning_memsave.strategies.fsdp import MemSaveFSDPStrategy
from lightning_memsave.strategies.memsave_strategy import MemSaveStrategy

_NAMED = {"memsave": MemSaveStrategy, "memsave_ddp": MemSaveDDPStrategy, "memsave_fsdp": MemSaveFSDPStrategy}


def register(namespace: str) -> None:
    """Register the names in one Lightning namespace; twice does nothing."""
    registry: Any = import_module(f"{namespace}.strategies").StrategyRegistry
    for name, cls in _NAMED.items():
        if name not in registry:
            description = (cls.__doc__ or "").partition("\n")[0]
            registry.register(name, counterpart(cls, namespace), description=description)


def register_strategies() -> None:
    """Register the names in `lightning.pytorch`, and in `pytorch_lightning` if that was imported before.

    Importing it here would redirect Lightning's own log messages to it.
    """
    register("lightning.pytorch")
    if sys.modules.get("pytorch_lightning") is not None:
        import_module("lightning_memsave.strategies.pytorch_lightning")
