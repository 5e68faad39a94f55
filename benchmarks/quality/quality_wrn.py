"""Accuracy of WideResNet-28-2 with memory saving, against a baseline trained beside it (to run: `harness/parts.py`).

A seed has the same first weights, training images and order in each setting, and test images of its own. Sizes, by the
minutes on one core that a baseline takes: `--size short`, which shows that it trains (1), `medium` (2), both on images
that are averaged to 16x16 pixels, `large` (15) and `long` (90), on whole ones.

`--size converged` (30) is for the accuracy that a training ends with, in five seeds. Its rows say as well where a
run stood when three quarters of its steps were over. Runs go on at the last epoch that has ended when started again.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.parts import Study
from benchmarks.harness.resuming import ResumedRun, checkpoint_of
from benchmarks.models.wrn import (
    BATCH_SIZE,
    COMBINED,
    STATE_8BIT,
    Classifier,
    FractalConfig,
    as_float,
    fit,
    load,
    quiet,
)
from lightning_memsave.demo.model import WideResNet

DATA = FractalConfig(jitter=0.08)
"""So hard that the baseline of the medium size reaches 80 to 85 %."""
DENSEST = "sparsity 0.85, int4-chain, 8-bit momentum, into-state, bf16"
SETTINGS: dict[str, dict[str, Any]] = {
    "baseline": {"recipe": "measure"},
    "sparsity 0.85": {"recipe": "measure", "sparsity": 0.85},
    "int4-chain": {"recipe": "measure", "activations": "int4-chain"},
    "bf16, 8-bit momentum": {"recipe": "measure", "precision": "bf16-sr", "optimizer_state": STATE_8BIT},
    "microbatch 4": {"microbatch": 4},
    f"{DENSEST}, microbatch 4": {"microbatch": 4, **COMBINED[DENSEST]},
    f"{DENSEST}, whole batch": {"recipe": "measure", **COMBINED[DENSEST]},
}
"""The densest row of `bench_wrn.py` that reaches 120x, and what each of its techniques does alone; and all of them but
microbatches, to see what the batch statistics of microbatches cost beside the others."""
SIZES = {
    "short": {"pixels": 16, "num_train": 1500, "epochs": 5, "num_test": 500},
    "medium": {"pixels": 16, "num_train": 4000, "epochs": 5, "num_test": 10_000},
    "large": {"pixels": 32, "num_train": 5000, "epochs": 6, "num_test": 10_000},
    "long": {"pixels": 32, "num_train": 20_000, "epochs": 10, "num_test": 10_000},
    "converged": {"pixels": 32, "num_train": 5000, "epochs": 24, "num_test": 10_000},
}
PAPERS_FOUR, SMALLEST = (
    "the paper's four: sparsity 0.9, bf16, blocks",
    "sparsity 0.95, int4-chain, 4-bit momentum, bf16",
)
CONVERGED: dict[str, dict[str, Any]] = {
    "baseline": {"recipe": "measure"},
    "microbatch 4": {"microbatch": 4},
    f"{PAPERS_FOUR}, microbatch 4": {"microbatch": 4, **COMBINED[PAPERS_FOUR]},
    f"{DENSEST}, microbatch 4": {"microbatch": 4, **COMBINED[DENSEST]},
    f"{SMALLEST}, microbatch 2": {"microbatch": 2, **COMBINED[SMALLEST]},
}
"""Trained to the end: 87x, 123x and 188x at 32 pixels, and what the statistics of microbatches do alone."""
NUM_SEEDS = 5


class Validated(Classifier):
    """`Classifier` with a validation in the middle of training."""

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = as_float(batch)
        self.log("validation/accuracy", (self.model(images).argmax(1) == labels).float().mean())


def train(seed: int, arguments: dict[str, Any], *, size: dict[str, int], resumes: bool = False) -> dict[str, Any]:
    """Train and test; a run that `resumes` is validated as well when three quarters of its epochs are over."""

    def images(num_images: int, image_seed: int) -> TensorDataset:
        pixels, labels = load(num_images, image_seed, DATA).tensors
        smaller = F.avg_pool2d(pixels.float(), 32 // size["pixels"]).round().to(torch.uint8)
        return TensorDataset(smaller, labels)

    torch.manual_seed(seed)
    module = (Validated if resumes else Classifier)(WideResNet(num_classes=DATA.num_classes), DATA.num_classes, lr=0.1)
    order = torch.Generator().manual_seed(seed)
    data = DataLoader(images(size["num_train"], 2 * seed), BATCH_SIZE, shuffle=True, drop_last=True, generator=order)
    test = DataLoader(images(size["num_test"], 2 * seed + 1), 250)
    found: dict[str, Any] = {}
    if resumes:
        run = ResumedRun(checkpoint_of(seed, arguments, size), order, "validation/accuracy")
        rest = {"validation": test, "check_val_every_n_epoch": size["epochs"] * 3 // 4, "num_sanity_val_steps": 0}
        memsave, trainer = fit(
            module, data, arguments, run, max_epochs=size["epochs"], checkpoint=run.checkpoint, **rest
        )
        seconds, peak_bytes = run.cpu_seconds, run.peak_bytes
        assert run.validated is not None
        found["quality_value_at_three_quarters"] = 100 * run.validated
        run.remove()
    else:
        start = time.process_time()
        memsave, trainer = fit(module, data, arguments, max_epochs=size["epochs"])
        seconds, peak_bytes = time.process_time() - start, memsave.report.peak_bytes
    with quiet():
        tested = trainer.test(module, test, verbose=False)[0]
    return {
        "peak_bytes": peak_bytes,
        "cpu_seconds_run": seconds,
        "quality": "test accuracy, per cent",
        "quality_value": 100 * tested["test/accuracy"],
        **found,
    }


def study(size: dict[str, int]) -> Study:
    is_converged = size == SIZES["converged"]
    return Study(
        name="wrn_quality",
        model="WideResNet-28-2, batch 100, SGD momentum, BatchNorm, generated fractals",
        settings=CONVERGED if is_converged else SETTINGS,
        size=size,
        train=functools.partial(train, size=size, resumes=is_converged),
        num_seeds=NUM_SEEDS if is_converged else None,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--size", choices=SIZES, default="short")
    options, sys.argv[1:] = parser.parse_known_args()
    study(SIZES[options.size]).main()
