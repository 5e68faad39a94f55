"""The named recipes as one word of `MemSave`: WideResNet-28-2 and a small GPT-2, trained by Lightning for some steps.

CPU seconds are of steps that nobody measures, on one thread; their ratio is to the plain run, which comes just before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.measurement import environment, turns, write_rows
from benchmarks.models.subjects import gpt
from lightning_memsave import MemSave
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.demo.model import ImageClassifier, WideResNet

RECIPES = ("measure", "exact", "balanced", "extreme")
NUM_MEASURED = 3  # the first step, which nobody measures, and two that are measured


class Language(L.LightningModule):
    """The GPT-2 of the other benchmarks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = gpt("recipes").model

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Clock(L.Callback):
    """CPU seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.process_time() - self._start)


def images() -> TensorDataset:
    return TensorDataset(torch.randn(800, 3, 32, 32), torch.randint(0, 10, (800,)))


def run(make: Callable[[], L.LightningModule], data: TensorDataset, batch_size: int, recipe: str) -> tuple[Any, float]:
    """The report, and the median of a step's CPU seconds."""
    torch.manual_seed(0)
    memsave, clock = MemSave(recipe, summary=False), Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[clock, memsave],
        max_steps=NUM_MEASURED + turns(3),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(make(), DataLoader(data, batch_size=batch_size))
    return memsave.report, statistics.median(clock.seconds[NUM_MEASURED:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = []
    for model, make, data, batch_size in (
        ("WideResNet-28-2, batch 100, SGD momentum", lambda: ImageClassifier(WideResNet()), images(), 100),
        (
            "GPT-2, 4 layers, width 256, batch 8 x 128, AdamW",
            Language,
            TensorDataset(torch.randint(0, 1000, (64, 128))),
            8,
        ),
    ):
        plain = None
        for recipe in RECIPES:
            report, seconds = run(make, data, batch_size, recipe)
            plain = plain or (report, seconds)
            rows.append(
                {
                    "benchmark": "recipes",
                    "model": model,
                    "setting": recipe,
                    "peak_bytes": report.peak_bytes,
                    **{f"{category}_bytes": report.by_category[category] for category in CATEGORIES},
                    "factor": plain[0].peak_bytes / report.peak_bytes,
                    "microbatch_samples": report.microbatch_size or batch_size,
                    "cpu_seconds": seconds,
                    "cpu_time_ratio": seconds / plain[1],
                    "loss_class": report.loss_class,
                    **environment(),
                }
            )
            print(
                model, recipe, report.peak_bytes, f"{rows[-1]['factor']:.2f}x", f"{seconds / plain[1]:.2f}x", flush=True
            )
    write_rows("recipes", rows)
