"""Training with compressed activations to the end, over three seeds: WideResNet on digits, a GPT on Python's source.

Each setting sees the same weights, batches and random numbers. `"exact"` must not differ in any bit. About 45 minutes
on 1 core; `digits` or `bytes` as an argument runs one of the two.
"""

from __future__ import annotations

import functools
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from benchmarks.harness.measurement import Subject, environment, measure_memory, save_rows
from benchmarks.memory_time.bench_activation_compression import compressed
from benchmarks.models.subjects import next_token_loss, plain_gpt
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.demo.data import load_digits_32
from lightning_memsave.demo.run import DemoConfig, _quiet, _run

PLAIN = "plain"


# ------------------------------------------------------------------------------- WideResNet on digits
SEEDS = (0, 1, 2)
MEASURES = ("test_accuracy", "last_5_losses_mean")


class Recorder(Callback):
    """The loss of each step, and the weights at the end."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.weights: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: object) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights = {name: value.clone() for name, value in pl_module.model.state_dict().items()}

    def equals(self, other: Recorder) -> bool:
        """Whether losses, weights and buffers are equal in every bit."""
        pairs = zip(self.weights.values(), other.weights.values(), strict=True)
        return self.losses == other.losses and all(torch.equal(a, b) for a, b in pairs)


def digits(settings: tuple[str, ...] = (PLAIN, "exact", "int8", "int4", "int4-chain", "int2")) -> None:
    """The demo's training for three epochs, with `activations` alone."""
    rows: list[dict[str, Any]] = []
    for seed in SEEDS:
        config, data = DemoConfig(seed=seed, wandb=False, epochs=3, batchnorm_momentum=0.1), load_digits_32(seed)
        for setting in settings:
            recorder, start = Recorder(), time.process_time()
            options = {"recipe": "measure", "activations": False if setting == PLAIN else setting}
            with _quiet():
                result = _run(setting, options, config, data, None, recorder)
            seconds, report = time.process_time() - start, result.report
            if setting == PLAIN:
                plain, plain_report, plain_seconds = recorder, report, seconds
            assert setting != "exact" or recorder.equals(plain), "exact is not exact"
            row = {
                "benchmark": "activation_compression_digits",
                "model": f"WideResNet-28-2, digits, batch 100, SGD momentum, {config.epochs} epochs",
                "setting": setting,
                "seed": seed,
                "peak_bytes": report.peak_bytes,
                **{f"{category}_bytes": report.by_category[category] for category in CATEGORIES},
                "factor": plain_report.peak_bytes / report.peak_bytes,
                "cpu_seconds_run": seconds,
                "cpu_time_ratio": seconds / plain_seconds,
                "quality": "test accuracy, fraction of 360 images; mean training loss of the last 5 steps",
                "test_accuracy": result.test_accuracy,
                "last_5_losses_mean": statistics.mean(recorder.losses[-5:]),
                "equals_plain": recorder.equals(plain),
            }
            rows.append(row | environment())
            save_rows("activation_compression_digits", rows)
            print(row, flush=True)
    rows += [mean_row(rows, setting) for setting in settings]
    save_rows("activation_compression_digits", rows)


def mean_row(rows: list[dict[str, Any]], setting: str) -> dict[str, Any]:
    """Means over seeds, and whether they differ from the plain ones by more than two standard errors of that."""
    first = next(row for row in rows if row["setting"] == setting)
    summary: dict[str, Any] = {"benchmark": first["benchmark"], "model": first["model"], "setting": setting}
    summary["seed"] = "mean"
    for measure in MEASURES:
        ours, plain = ([row[measure] for row in rows if row["setting"] == s] for s in (setting, PLAIN))
        difference = statistics.mean(ours) - statistics.mean(plain)
        error = ((statistics.variance(ours) + statistics.variance(plain)) / len(SEEDS)) ** 0.5
        summary[measure] = statistics.mean(ours)
        summary[f"{measure}_difference"] = difference
        summary[f"{measure}_standard_error"] = error
        summary[f"{measure}_within_two"] = abs(difference) <= 2 * error
    print(summary, flush=True)
    return summary | environment()


# ------------------------------------------------------------------------------- a GPT on bytes
SHAPE = {"num_layers": 4, "width": 128, "context": 128, "batch_size": 16, "dropout": 0.0}
NUM_VALIDATION_BATCHES = 32
BOUNDS = {"exact": 0.0, "int8": 0.005, "int4": 0.01}


def source_text() -> tuple[Tensor, Tensor]:
    """The bytes of Python's own standard library; the last 5 % of its files are for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    cut = round(0.95 * len(files))
    parts = (b"".join(path.read_bytes() for path in part) for part in (files[:cut], files[cut:]))
    train, validation = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, validation


def draw_batches(text: Tensor, count: int, seed: int) -> Tensor:
    """[count, batch, context] windows of `text`."""
    context = SHAPE["context"]
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - context, (count, SHAPE["batch_size"]), generator=generator)
    return text[starts[..., None] + torch.arange(context)].long()


BYTE_SETTINGS = (PLAIN, "exact", "int8", "exact+int8", "int4", "exact+int4")


def byte_text(settings: tuple[str, ...] = BYTE_SETTINGS, num_steps: int = 300) -> None:
    """AdamW steps on the standard library's source, and the loss on files that were not seen; over three seeds."""
    train, validation = source_text()
    unseen = draw_batches(validation, NUM_VALIDATION_BATCHES, 2)
    rows: list[dict[str, Any]] = []
    for seed in SEEDS:
        batches = draw_batches(train, num_steps, 10 * seed + 1)
        for setting in settings:
            sizes = measure_memory(compressed(byte_gpt(seed), setting))
            subject, start = compressed(byte_gpt(seed), setting), time.process_time()
            for ids in batches:
                subject.batch.copy_(ids)
                subject.step()
            seconds = time.process_time() - start
            subject.model.eval()
            with torch.no_grad():
                loss = statistics.mean(float(next_token_loss(subject.model(ids), ids)) for ids in unseen)
            weights = list(subject.model.parameters())
            if setting == PLAIN:
                plain_loss, plain_weights, plain_peak, plain_seconds = loss, weights, sizes["peak_bytes"], seconds
            equals = loss == plain_loss and all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))
            assert setting != "exact" or equals, "exact is not exact"
            excess = loss / plain_loss - 1
            row = {
                "benchmark": "activation_compression_bytes",
                "model": f"GPT of plain modules, 4 layers, width 128, batch 16 x 128, AdamW, {num_steps} steps",
                "setting": setting,
                "seed": seed,
                **sizes,
                "factor": plain_peak / sizes["peak_bytes"],
                "cpu_seconds_run": seconds,
                "cpu_time_ratio": seconds / plain_seconds,
                "quality": "validation loss, nats per byte of unseen files of Python's standard library",
                "quality_value": loss,
                "relative_difference": excess,
                "bound": BOUNDS.get(setting, ""),
                "within_bound": abs(excess) <= BOUNDS[setting] if setting in BOUNDS else "",
                "equals_plain": equals,
            }
            rows.append(row | environment())
            save_rows("activation_compression_bytes", rows)
            print(row, flush=True)


def byte_gpt(seed: int) -> Callable[[str], Subject]:
    return functools.partial(plain_gpt, seed=seed, **SHAPE)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or ("bytes", "digits"):
        {"bytes": byte_text, "digits": digits}[name]()
