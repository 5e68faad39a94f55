"""Record what the console shows: python docs/recordings.py writes docs/console.md."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning_utilities.core import rank_zero
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, verify
from lightning_memsave.measuring import operation_cost
from lightning_memsave.planner.search_space import OVERHEAD
from lightning_memsave.prediction import after_fit, budgeted_run
from lightning_memsave.reporting.console import print_verification
from lightning_memsave.torch_internals.fake_tensors import is_fake
from lightning_memsave_cli import main

PAGE = Path(__file__).parent / "console.md"
HEAD = """\
# What the console shows

A network of 24 residual blocks of width 256 on 512 rows, AdamW, trained for four steps on a CPU. Written by
`python docs/recordings.py`; a test runs it again and compares all but times, percentages and single bytes.
"""


class Blocks(L.LightningModule):
    """Residual blocks; above `most` samples at once memory is out, as on a device that is full."""

    def __init__(self, most: int = 10**9, num_blocks: int = 24) -> None:
        super().__init__()
        self.most = most
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
            for _ in range(num_blocks)
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


def fit(memsave: MemSave, module: L.LightningModule, logger: CSVLogger | bool = False) -> None:
    """Train for four steps."""
    quiet = {"logger": logger, "enable_checkpointing": False, "enable_progress_bar": False, "barebones": False}
    trainer = L.Trainer(callbacks=[memsave], max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader(torch.randn(2048, 256), batch_size=512))


def within(budget: str, num_blocks: int = 24) -> None:
    """Train within a budget, or show the error; the plan takes as long as it takes."""
    try:
        fit(MemSave(budget=budget, planning_seconds=3600), Blocks(num_blocks=num_blocks))
    except ValueError as error:
        print(textwrap.fill(f"ValueError: {error}", 120))


def compare() -> None:
    """Compare three fits by what they logged."""
    settings = {"plain": MemSave("measure"), "exact": MemSave("exact"), "int4": MemSave(activations="int4")}
    with tempfile.TemporaryDirectory() as folder:
        for name, memsave in settings.items():
            with contextlib.redirect_stdout(io.StringIO()):
                fit(memsave, Blocks(), CSVLogger(folder, name, version=""))
        main(["compare", *(f"{name}={folder}/{name}" for name in settings)])


def plan_int4() -> None:
    """Predict a step with 4-bit activations, beside the plain one."""
    here = SimpleNamespace(Blocks=Blocks, batch=batch)
    with patch.dict(sys.modules, my_module=here), patch.dict(os.environ, COLUMNS="100"):  # as wide as the page
        main(["plan", "my_module:Blocks", "--batch", "my_module:batch", "--activations", "int4"])


def batch() -> torch.Tensor:
    """Return the batch."""
    return torch.randn(512, 256)


def verify_int4() -> None:
    """Compare a step with 4-bit activations to a plain one."""
    console = Console(width=100, color_system=None)
    print_verification(verify(Blocks(), batch(), MemSave(activations="int4")), console, num_shown=1)


RECORDINGS: dict[str, tuple[str, Callable[[], None]]] = {
    "A fit": ("MemSave()", lambda: fit(MemSave(), Blocks())),
    "A recipe": ('MemSave("exact")', lambda: fit(MemSave("exact"), Blocks())),
    "Memory runs out": ("MemSave()", lambda: fit(MemSave(), Blocks(most=128))),
    "A budget": ('MemSave(budget="60MiB")', lambda: within("60MiB")),
    "A budget that is too small for 6 blocks": ('MemSave(budget="6MiB")', lambda: within("6MiB", num_blocks=6)),
    "Runs compared": ("lightning-memsave compare plain=logs/plain exact=logs/exact int4=logs/int4", compare),
    "A plan without a run": (
        "lightning-memsave plan my_module:Blocks --batch my_module:batch --activations int4",
        plan_int4,
    ),
    "A step verified": (
        "lightning-memsave verify my_module:Blocks --batch my_module:batch --activations int4",
        verify_int4,
    ),
}


def record(run: Callable[[], None]) -> str:
    """Return what a run shows on the console, without Lightning's own lines."""
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)
    # Two lines have times.
    handler.addFilter(lambda each: re.match("memsave: (?!finding out|planning:)", each.getMessage()) is not None)
    logger, before = rank_zero.log, rank_zero.log.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    seconds, after_fit.LEAST_SECONDS = after_fit.LEAST_SECONDS, 600.0  # as much time as it takes
    measured, budgeted_run.overhead_of = budgeted_run.overhead_of, lambda *_: OVERHEAD  # of whatever machine
    speed = patch.object(operation_cost, "measure_speed", lambda *_: operation_cost.Speed(flops=5e10, bytes=1e10))
    try:
        with contextlib.redirect_stdout(shown), warnings.catch_warnings(), speed:
            warnings.simplefilter("ignore")
            run()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
        after_fit.LEAST_SECONDS, budgeted_run.overhead_of = seconds, measured
    return re.sub(r"[ \t]+$", "", shown.getvalue(), flags=re.MULTILINE).strip()


def comparable(text: str) -> str:
    """Return the text of a page without what differs between machines: times, percentages, bytes of kernels."""
    text = re.sub(r"^│(step time|seconds per|samples per).*", r"│\1", text, flags=re.MULTILINE)
    text = re.sub(r"[\d.]+ times its seconds", "times its seconds", text)
    return re.sub(r"\d\.\de-\d\d|[\d.]+ %|\(\d+ bytes\)", "#", text)


def section(title: str) -> str:
    """Return a section of the page."""
    code, run = RECORDINGS[title]
    return f"## {title}\n\n`{code}`\n\n```text\n{record(run)}\n```\n"


if __name__ == "__main__":
    PAGE.write_text("\n".join([HEAD, *map(section, RECORDINGS)]))
