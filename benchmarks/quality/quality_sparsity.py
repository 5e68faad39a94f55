"""What each method of sparsity reaches on digits and on text, three seeds each, beside dense.

Names of results (`digits`, `text`, `picture`) as arguments run only these; rows that are there are kept. About 50
minutes on 1 core.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.measurement import RESULTS as ROWS
from benchmarks.harness.measurement import Subject, environment, save_rows
from benchmarks.memory_time.bench_sparsity import held_bytes
from benchmarks.models.subjects import next_token_loss, plain_gpt
from benchmarks.quality.quality_activation_compression import source_text
from lightning_memsave import MaskUpdates, Sparsity, UpdateSchedule, apply_sparsity
from lightning_memsave.demo.data import load_digits_32
from lightning_memsave.demo.model import WideResNet

SEEDS = (0, 1, 2)
EPOCHS, BATCH = 5, 50
METHODS = ("static", "set", "rigl", "dsr", "gradual")
SPARSITIES = (0.5, 0.8, 0.9, 0.95)


def train_digits(seed: int, config: Sparsity | None) -> dict[str, Any]:
    """WideResNet-28-2 on digits of 8x8, their own size; accuracy on 360 images that were not seen."""
    train, test = load_digits_32(seed)
    images, labels = F.avg_pool2d(train.tensors[0], 4), train.tensors[1]
    torch.manual_seed(seed)
    model = WideResNet()
    if config is not None:
        apply_sparsity(model, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    num_steps = EPOCHS * (len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / num_steps)
    )
    updates = None if config is None else MaskUpdates(model, optimizer, config, num_steps)
    start, held, num_moved = time.process_time(), 0, 0
    subject = Subject("", model, optimizer, None, lambda: None)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(labels)).split(BATCH)[: len(labels) // BATCH]:
            optimizer.zero_grad()
            F.cross_entropy(model(images[index]), labels[index]).backward()
            optimizer.step()
            schedule.step()
            held = max(held, held_bytes(subject)["held_bytes"])
            num_moved += 0 if updates is None else updates.step()
    seconds = time.process_time() - start
    model.eval()
    with torch.no_grad():
        predicted = model(F.avg_pool2d(test.tensors[0], 4)).argmax(1)
    return {
        "held_bytes": held,
        "held_bytes_end": held_bytes(subject)["held_bytes"],
        "cpu_seconds_run": seconds,
        "num_moved": num_moved,
        "quality_value": (predicted == test.tensors[1]).float().mean().item(),
    }


def digits() -> None:
    """Every method at every sparsity beside dense, three seeds each; rows that are there are kept."""
    compare_methods(
        "sparsity_digits",
        f"WideResNet-28-2, digits 8x8, batch {BATCH}, SGD momentum, {EPOCHS} epochs",
        "test accuracy, fraction of 360 images",
        SPARSITIES,
        train_digits,
    )


# ---------------------------------------------------------------------------------------------------- text
TEXT_BATCH, TEXT_CONTEXT, TEXT_STEPS, TEXT_VALIDATION = 8, 64, 150, 16


@functools.cache
def text_parts() -> tuple[Tensor, Tensor]:
    return source_text()


def windows(text: Tensor, count: int, seed: int) -> Tensor:
    """[count, batch, context]"""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - TEXT_CONTEXT, (count, TEXT_BATCH), generator=generator)
    return text[starts[..., None] + torch.arange(TEXT_CONTEXT)].long()


def train_text(seed: int, config: Sparsity | None) -> dict[str, Any]:
    """A small GPT on bytes of Python's standard library; the loss is of files that were not seen."""
    subject = plain_gpt("", TEXT_BATCH, TEXT_CONTEXT, num_layers=2, width=96, num_heads=4, dropout=0.0, seed=seed)
    model = subject.model
    if config is not None:
        # Blocks only: embeddings and head of bytes are small, and dense in sparse transformers.
        apply_sparsity(model, dataclasses.replace(config, modules="blocks.*"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    updates = None if config is None else MaskUpdates(model, optimizer, config, TEXT_STEPS)
    train, validation = text_parts()
    start, held, num_moved = time.process_time(), 0, 0
    subject = Subject("", model, optimizer, None, lambda: None)
    for ids in windows(train, TEXT_STEPS, 1 + seed):
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()
        held = max(held, held_bytes(subject)["held_bytes"])
        num_moved += 0 if updates is None else updates.step()
    seconds = time.process_time() - start
    with torch.no_grad():
        losses = [float(next_token_loss(model(ids), ids)) for ids in windows(validation, TEXT_VALIDATION, 2)]
    return {
        "held_bytes": held,
        "held_bytes_end": held_bytes(subject)["held_bytes"],
        "cpu_seconds_run": seconds,
        "num_moved": num_moved,
        "quality_value": statistics.mean(losses),
    }


def text() -> None:
    compare_methods(
        "sparsity_text",
        f"GPT of plain modules, 2 layers, width 96, batch {TEXT_BATCH} x {TEXT_CONTEXT}, AdamW, {TEXT_STEPS} steps",
        "validation loss, nats per byte of unseen files of Python's standard library",
        SPARSITIES,
        train_text,
    )


# ---------------------------------------------------------------------------------------------------- both
def compare_methods(
    name: str,
    model: str,
    quality: str,
    sparsities: tuple[float, ...],
    train: Callable[[int, Sparsity | None], dict[str, Any]],
) -> None:
    path = ROWS / f"{name}.csv"
    rows: list[dict[str, Any]] = list(csv.DictReader(path.open())) if path.exists() else []
    moves = {"schedule": UpdateSchedule(every=10)}
    settings: list[tuple[str, float, Sparsity | None]] = [("dense", 0.0, None)]
    settings += [
        (method, s, Sparsity(sparsity=s, method=method, distribution="erk", **({} if method == "static" else moves)))
        for s in sparsities
        for method in METHODS
    ]
    done = {(row["setting"], float(row["sparsity"]), int(row["seed"])) for row in rows}
    for setting, sparsity, config in settings:
        for seed in SEEDS:
            if (setting, sparsity, seed) in done:
                continue
            run = train(seed, config)
            dense = next((row for row in rows if row["setting"] == "dense"), run)
            row = {
                "benchmark": name,
                "model": model,
                "setting": setting,
                "sparsity": sparsity,
                "seed": seed,
                **run,
                "factor": float(dense["held_bytes"]) / run["held_bytes"],
                "cpu_time_ratio": run["cpu_seconds_run"] / float(dense["cpu_seconds_run"]),
                "quality": quality,
                **environment(),
            }
            rows.append(row)
            save_rows(name, rows)
            print(setting, sparsity, seed, run, flush=True)


def picture() -> None:
    """What each method reaches at each sparsity, with standard errors; dense as a band."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "memsave"  # the same bytes each time
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    titles = {"sparsity_digits": "digits: test accuracy", "sparsity_text": "text: validation loss, nats per byte"}
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        with (ROWS / f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        sparsities = sorted({float(row["sparsity"]) for row in rows} - {0.0})
        for number, setting in enumerate(dict.fromkeys(row["setting"] for row in rows)):
            own = [row for row in rows if row["setting"] == setting]
            groups = [[float(r["quality_value"]) for r in own if float(r["sparsity"]) in (s, 0.0)] for s in sparsities]
            means = [statistics.mean(group) for group in groups]
            errors = [statistics.stdev(group) / math.sqrt(len(group)) for group in groups]
            if setting == "dense":
                panel.axhspan(means[0] - errors[0], means[0] + errors[0], color="0.8", label="dense")
                continue
            places = [i + 0.08 * (number - 3) for i in range(len(sparsities))]
            panel.errorbar(places, means, errors, marker="o", markersize=4, capsize=3, label=setting)
        panel.set_xticks(range(len(sparsities)), [f"{s:.0%}" for s in sparsities])
        panel.set(title=title, xlabel="weights that are zero", xlim=(-0.5, len(sparsities) - 0.5))
    panels[0].legend(loc="lower left", fontsize="small")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "sparsity.svg"
PARTS = {"digits": digits, "text": text, "picture": picture}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
