"""Lightning exists under two names, `lightning.pytorch` and `pytorch_lightning`, with unrelated classes.

This file finds the one that an object belongs to, and is the one place that touches Lightning's private names (seen in
2.6); `tests/strategies/test_lightning_compat.py` fails when one of them moves.
"""

from __future__ import annotations

import functools
from importlib import import_module
from types import SimpleNamespace
from typing import Any

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


def namespace_of(obj: object) -> str:
    """The namespace that the class of `obj` comes from.

    Raises:
        TypeError: none of its classes is Lightning's.
    """
    for cls in type(obj).__mro__:
        for name in NAMESPACES:
            if cls.__module__.startswith(f"{name}."):
                return name
    raise TypeError(f"{type(obj).__name__} is not a Lightning object")


@functools.cache
def internals(namespace: str) -> SimpleNamespace:
    """Lightning's private names that the loop needs, by the names used here."""
    automatic = import_module(f"{namespace}.loops.optimization.automatic")
    return SimpleNamespace(
        AutomaticOptimization=automatic._AutomaticOptimization,
        Closure=automatic.Closure,
        ClosureResult=automatic.ClosureResult,
        block_sync=import_module(f"{namespace}.loops.utilities")._block_parallel_sync_behavior,
        ResultCollection=import_module(f"{namespace}.trainer.connectors.logger_connector.result")._ResultCollection,
    )


def loaders_of(trainer: Any) -> Any:
    """What the source of a trainer's training data returns, as Lightning asks for it: a loader, or a nest of them."""
    connector = import_module(f"{namespace_of(trainer.strategy)}.trainer.connectors.data_connector")
    return connector._request_dataloader(trainer.fit_loop._data_source)


def is_compiled(module: object) -> bool:
    """Whether a LightningModule was compiled as a whole before it was handed to the trainer."""
    return getattr(module, "_compiler_ctx", None) is not None


def is_overridden(owner: Any, hook: str) -> bool:
    """Whether a user's class of a module or callback defines a hook of Lightning's; none of ours counts."""
    defined_in = next((cls for cls in type(owner).__mro__ if hook in vars(cls)), None)  # a mock has none
    ours = ("lightning.", "pytorch_lightning.", "lightning_memsave.")
    return defined_in is not None and not defined_in.__module__.startswith(ours)
