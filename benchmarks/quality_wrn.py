"""Accuracy of WideResNet-28-2 with memory saving, against a baseline trained beside it (how to run: `parts.py`).

A seed has the same first weights, training images and order in each setting, and test images of its own.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_memsave.demo.model import WideResNet
from parts import Study
from wrn import BATCH_SIZE, COMBINED, MODEL, Classifier, FractalConfig, fit, load, quiet

NUM_TRAIN, EPOCHS, NUM_TEST, LR = 2500, 4, 2000, 0.1
DATA = FractalConfig(noise=0.1)
SETTINGS: dict[str, dict[str, Any]] = {
    "baseline": {"recipe": "measure"},
    "candidate": {"microbatch": 5, **COMBINED["+ bf16"]},
}


def train(seed: int, arguments: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(seed)
    module = Classifier(WideResNet(num_classes=DATA.num_classes), DATA.num_classes, lr=LR)
    order = torch.Generator().manual_seed(seed)
    images = DataLoader(load(NUM_TRAIN, 2 * seed, DATA), BATCH_SIZE, shuffle=True, drop_last=True, generator=order)
    start = time.process_time()
    memsave, trainer = fit(module, images, arguments, max_epochs=EPOCHS)
    seconds = time.process_time() - start
    with quiet():
        tested = trainer.test(module, DataLoader(load(NUM_TEST, 2 * seed + 1, DATA), 250), verbose=False)[0]
    return {
        "peak_bytes": memsave.report.peak_bytes,
        "cpu_seconds_run": seconds,
        "quality": f"test accuracy, per cent of {NUM_TEST} images",
        "quality_value": 100 * tested["test/accuracy"],
    }


STUDY = Study(
    name="wrn_quality",
    model=f"{MODEL}, generated images",
    settings=SETTINGS,
    size={"num_train": NUM_TRAIN, "epochs": EPOCHS},
    train=train,
)

if __name__ == "__main__":
    STUDY.main()
