"""Record what the console shows: python docs/recordings.py writes docs/console.md."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
from lightning_utilities.core import rank_zero
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave
from lightning_memsave.prediction import after_fit
from lightning_memsave.torch_internals.fake_tensors import is_fake

PAGE = Path(__file__).parent / "console.md"
HEAD = """\
# What the console shows

A network of 24 residual blocks of width 256 on 512 rows, AdamW, trained for four steps on a CPU. Written by
`python docs/recordings.py`; a test runs it again and compares every line but times.
"""


class Blocks(L.LightningModule):
    """Residual blocks; above `most` samples at once memory is out, as on a device that is full."""

    def __init__(self, most: int = 10**9) -> None:
        super().__init__()
        self.most = most
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)) for _ in range(24)
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        if len(batch) > self.most and not is_fake(batch):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 GiB.")
        for block in self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(memsave: MemSave, module: L.LightningModule) -> None:
    """Train for four steps."""
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    trainer = L.Trainer(callbacks=[memsave], max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(torch.randn(2048, 256), batch_size=512))


RECORDINGS: dict[str, tuple[str, Callable[[], None]]] = {
    "A fit": ("MemSave()", lambda: fit(MemSave(), Blocks())),
    "A recipe": ('MemSave("exact")', lambda: fit(MemSave("exact"), Blocks())),
    "Memory runs out": ("MemSave()", lambda: fit(MemSave(), Blocks(most=128))),
}


def record(run: Callable[[], None]) -> str:
    """Return what a run shows on the console, without Lightning's own lines."""
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)
    # One line has times.
    handler.addFilter(lambda each: re.match("memsave: (?!finding out)", each.getMessage()) is not None)
    logger, before = rank_zero.log, rank_zero.log.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    seconds, after_fit.LEAST_SECONDS = after_fit.LEAST_SECONDS, 600.0  # as much time as it takes
    try:
        with contextlib.redirect_stdout(shown), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        after_fit.LEAST_SECONDS = seconds
    return re.sub(r"[ \t]+$", "", shown.getvalue(), flags=re.MULTILINE).strip()


def page() -> str:
    """Return the text of the page."""
    parts = [f"## {title}\n\n`{code}`\n\n```text\n{record(run)}\n```\n" for title, (code, run) in RECORDINGS.items()]
    return "\n".join([HEAD, *parts])


if __name__ == "__main__":
    PAGE.write_text(page())
