"""BatchNorm in microbatches: accuracy on digits against the size of the microbatch, for each way to normalise.

WideResNet-10-1 on 16x16 images, batches of 100, three seeds; whole batches are the baseline. About 15 minutes.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.measurement import environment, save_rows
from lightning_memsave import MemSave, Microbatching
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.demo.data import load_digits_32
from lightning_memsave.demo.model import ImageClassifier, WideResNet
from lightning_memsave.demo.run import _quiet

SEEDS, SIZES, EPOCHS, WARMUP = (0, 1, 2), (1, 2, 4, 8, 100), 6, 14
WHOLE = ("whole batches", None)


def settings() -> list[tuple[str, Microbatching | None]]:
    found: list[tuple[str, Microbatching | None]] = [WHOLE]
    for size in SIZES:
        if size < 100:  # the whole batch is what it is compared with
            found.append((f"ghost, microbatch {size}", Microbatching(size=size)))
        found.append(
            (
                f"running, microbatch {size}",
                Microbatching(size=size, batchnorm="running", batchnorm_warmup=WARMUP),
            )
        )
    return found


def smaller(dataset: TensorDataset) -> TensorDataset:
    images, labels = dataset.tensors
    return TensorDataset(F.avg_pool2d(images, 2), labels)


def train(seed: int, microbatching: Microbatching | None) -> tuple[float, float, MemSave, float]:
    train_set, test_set = map(smaller, load_digits_32(seed))
    torch.manual_seed(seed)
    module = ImageClassifier(WideResNet(depth=10, width=1), lr=0.05)
    memsave = MemSave("measure", microbatch=microbatching or False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    generator = torch.Generator().manual_seed(seed)
    start = time.process_time()
    with _quiet():
        trainer.fit(module, DataLoader(train_set, 100, shuffle=True, drop_last=True, generator=generator))
        seconds = time.process_time() - start
        tested = trainer.test(module, DataLoader(test_set, 360), verbose=False)[0]
    accuracy = next(value for name, value in tested.items() if "accuracy" in name)
    return accuracy, float(trainer.callback_metrics.get("train/loss", float("nan"))), memsave, seconds


def main() -> None:
    rows: list[dict[str, Any]] = []
    for seed in SEEDS:
        for setting, microbatching in settings():
            accuracy, _, memsave, seconds = train(seed, microbatching)
            report = memsave.report
            if setting == WHOLE[0]:
                plain_peak, plain_seconds = report.peak_bytes, seconds
            row = {
                "benchmark": "microbatching_batchnorm",
                "model": f"WideResNet-10-1, digits at 16x16, batch 100, SGD momentum, {EPOCHS} epochs",
                "setting": setting,
                "seed": seed,
                "peak_bytes": report.peak_bytes,
                **{f"{category}_bytes": report.by_category[category] for category in CATEGORIES},
                "factor": plain_peak / report.peak_bytes,
                "cpu_seconds_run": seconds,
                "cpu_time_ratio": seconds / plain_seconds,
                "quality": "test accuracy, fraction of 360 images",
                "quality_value": accuracy,
                **environment(),
            }
            rows.append(row)
            save_rows("microbatching_batchnorm", rows)
            print(seed, setting, f"{accuracy:.3f}", f"{report.peak_bytes / plain_peak:.3f}", flush=True)
    for setting, _ in settings():
        values = [row["quality_value"] for row in rows if row["setting"] == setting]
        error = statistics.stdev(values) / len(values) ** 0.5
        print(f"{setting}: {statistics.mean(values):.3f} +- {error:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
