"""Accuracy of WideResNet-28-2 with memory saving, against a baseline trained beside it (to run: `harness/parts.py`).

A seed has the same first weights, training images and order in each setting, and test images of its own. Sizes, by the
minutes on one core that a baseline takes: `--size short`, which shows that it trains (1), `medium` (2), both on images
that are averaged to 16x16 pixels, `large` (15) and `long` (90), on whole ones.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.parts import Study
from benchmarks.models.wrn import BATCH_SIZE, COMBINED, STATE_8BIT, Classifier, FractalConfig, fit, load, quiet
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
}


def train(seed: int, arguments: dict[str, Any], *, size: dict[str, int]) -> dict[str, Any]:
    def images(num_images: int, image_seed: int) -> TensorDataset:
        pixels, labels = load(num_images, image_seed, DATA).tensors
        smaller = F.avg_pool2d(pixels.float(), 32 // size["pixels"]).round().to(torch.uint8)
        return TensorDataset(smaller, labels)

    torch.manual_seed(seed)
    module = Classifier(WideResNet(num_classes=DATA.num_classes), DATA.num_classes, lr=0.1)
    order = torch.Generator().manual_seed(seed)
    data = DataLoader(images(size["num_train"], 2 * seed), BATCH_SIZE, shuffle=True, drop_last=True, generator=order)
    start = time.process_time()
    memsave, trainer = fit(module, data, arguments, max_epochs=size["epochs"])
    seconds = time.process_time() - start
    with quiet():
        tested = trainer.test(module, DataLoader(images(size["num_test"], 2 * seed + 1), 250), verbose=False)[0]
    return {
        "peak_bytes": memsave.report.peak_bytes,
        "cpu_seconds_run": seconds,
        "quality": "test accuracy, per cent",
        "quality_value": 100 * tested["test/accuracy"],
    }


def study(size: dict[str, int]) -> Study:
    return Study(
        name="wrn_quality",
        model="WideResNet-28-2, batch 100, SGD momentum, BatchNorm, generated fractals",
        settings=SETTINGS,
        size=size,
        train=functools.partial(train, size=size),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--size", choices=SIZES, default="short")
    options, sys.argv[1:] = parser.parse_known_args()
    study(SIZES[options.size]).main()
