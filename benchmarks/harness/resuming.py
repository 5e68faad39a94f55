"""Runs of hours, which go on at the last epoch that has ended when they are started again."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from benchmarks.harness.rows import ROOT
from lightning_memsave import MemSave

FOLDER = ROOT / "build" / "runs"
"""Checkpoints of runs that have not ended; git ignores it."""


def checkpoint_of(*run: object) -> Path:
    """Return where the checkpoint of a run lies; each of `run` tells it from others by its `repr`."""
    return FOLDER / f"{hashlib.sha256(repr(run).encode()).hexdigest()[:16]}.ckpt"


class ResumedRun(Callback):
    """Writes a checkpoint after each epoch but the last, with what the run needs besides weights and optimizer.

    Args:
        path: the checkpoint.
        order: draws the order of training samples.
        metric: what is validated, by its name in the logs.
    """

    def __init__(self, path: Path, order: torch.Generator, metric: str) -> None:
        self._path, self._order, self._metric = path, order, metric
        self._start, self._seconds_before = 0.0, 0.0
        self.peak_bytes = 0
        """Of all parts: what is logged at the end of an epoch takes some bytes, which the next part does not know."""
        self.validated: float | None = None
        """The metric when it was validated last."""

    @property
    def checkpoint(self) -> Path | None:
        """What to go on from; `None` for a run that begins."""
        return self._path if self._path.exists() else None

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the whole run, the parts before it was started again included."""
        return self._seconds_before + time.process_time() - self._start

    def remove(self) -> None:
        """Forget the run, which has ended."""
        self._path.unlink(missing_ok=True)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.process_time()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated = float(trainer.callback_metrics[self._metric])

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        memsave = next(each for each in trainer.callbacks if isinstance(each, MemSave))
        self.peak_bytes = max(self.peak_bytes, memsave.report.peak_bytes or 0)
        if trainer.current_epoch + 1 == trainer.max_epochs:
            return  # a run without a step has no peak
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".unfinished")  # a run may be ended while it writes
        trainer.save_checkpoint(unfinished)
        unfinished.replace(self._path)

    def state_dict(self) -> dict[str, Any]:
        return {
            "order": self._order.get_state(),
            "cpu_seconds": self.cpu_seconds,
            "validated": self.validated,
            "peak_bytes": self.peak_bytes,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._order.set_state(state_dict["order"])
        self._seconds_before, self.validated = state_dict["cpu_seconds"], state_dict["validated"]
        self.peak_bytes = state_dict["peak_bytes"]
