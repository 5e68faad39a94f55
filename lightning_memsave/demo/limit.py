"""A limit on tensors' bytes that ends a step as a full device would: torch's own error, in forward or in backward."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from lightning_memsave.core.units import format_bytes
from lightning_memsave.lightning_compat import Batch
from lightning_memsave.measuring.ledger import Ledger


class SimulatedLimit(Callback):
    """Raises `torch.OutOfMemoryError` in training steps that take more.

    It comes before `MemSave` among the callbacks, and `after` behind it, so that its ledger is the outer one.

    Args:
        limit_bytes: of tensors on the model's device that are alive at once.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._ledger: _LimitedLedger | None = None
        self.after = _Closes(self)
        """The callback that ends the count of a step."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Count from here on."""
        self._ledger = _LimitedLedger(pl_module.device, self._limit_bytes)
        self._ledger.watching(pl_module, trainer.optimizers, batch)
        self._ledger.__enter__()

    def close(self) -> None:
        """Stop counting."""
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.__exit__(None, None, None)


class _Closes(Callback):
    def __init__(self, limit: SimulatedLimit) -> None:
        self._limit = limit

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._limit.close()

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        self._limit.close()


class _LimitedLedger(Ledger):
    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        super().__init__(device)
        self._limit_bytes = limit_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if (needed := self.live_bytes) > self._limit_bytes:
            del out
            raise torch.OutOfMemoryError(
                f"Simulated: out of memory, {format_bytes(needed)} of {format_bytes(self._limit_bytes)} are needed."
            )
        return out
