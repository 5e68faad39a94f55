"""Sparse layers beside dense ones: bytes and time of a step, and what the methods reach on digits and on text.

Names of results (`wrn`, `bert`, `digits`, `text`, `picture`) as arguments run only these; about 50 minutes on 1 core.
"""

from __future__ import annotations

import copy
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
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from harness import RESULTS as ROWS
from harness import (
    Subject,
    environment,
    measure_cpu_seconds,
    measure_memory,
    measured_rows,
    save_rows,
    time_columns,
    write_rows,
)
from lightning_memsave import MaskUpdates, Sparsity, UpdateSchedule, apply_sparsity
from lightning_memsave.demo.data import load_digits_32
from lightning_memsave.demo.model import WideResNet
from lightning_memsave.numerics.positions import index_bytes
from lightning_memsave.techniques.sparsity import sparse_layers
from models import next_token_loss, plain_gpt, wide_resnet
from quality_activation_compression import source_text

QUALITY = "tensors that differ in any bit from masked dense (loss, gradients, buffers)"


def held_bytes(subject: Subject) -> dict[str, int]:
    """What stays between steps: weights with positions and buffers, gradients, optimizer state."""
    model, optimizer = subject.model, subject.optimizer
    if all(p.grad is None for p in model.parameters()):
        subject.step()
    sizes = {
        "held_weights_bytes": sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        "held_gradients_bytes": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "held_state_bytes": sum(
            t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
        ),
    }
    return {**sizes, "held_bytes": sum(sizes.values())}


# ---------------------------------------------------------------------------------------------------- a step
def sparse_wide_resnet(setting: str, batch_size: int) -> Subject:
    subject = wide_resnet(setting, batch_size)
    if "bf16" in setting:
        subject.model.bfloat16()
        subject.batch = subject.batch[0].bfloat16(), subject.batch[1]
    if "sparse" in setting:
        fraction = setting.partition("sparse ")[2].partition(",")[0]
        config = Sparsity(sparsity=fraction if ":" in fraction else float(fraction))
        apply_sparsity(subject.model, config)
    model, (images, labels) = subject.model, subject.batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loss() -> Tensor:
        return F.cross_entropy(model(images).float(), labels)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return Subject(setting, model, optimizer, subject.batch, step, loss)


def num_different(subject: Subject) -> tuple[str, float]:
    """One forward and backward pass against the same weights in dense layers, gradients masked."""
    dense = WideResNet().to(next(subject.model.parameters()).dtype)
    dense.load_state_dict(subject.model.state_dict())
    images, labels = subject.batch
    layers = sparse_layers(subject.model)

    def outcome(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        gradients = []
        for name, module in model.named_modules():
            for own, p in module.named_parameters(recurse=False):
                gradient = p.grad
                if name in layers and own == "weight":
                    gradient = layers[name].layout.compact(gradient)
                gradients.append(gradient)
        buffers = [b for n, b in model.named_buffers() if not n.endswith("values_index")]
        return [loss.detach(), *gradients, *buffers]

    pairs = zip(outcome(copy.deepcopy(subject.model)), outcome(dense), strict=True)
    return QUALITY, sum(not torch.equal(ours, expected) for ours, expected in pairs)


def wrn() -> None:
    """float32, and bfloat16 at a smaller batch, as its convolutions are slow on CPUs."""
    rows = []
    for dtype, batch_size, settings in (
        ("", 20, ("dense", "sparse 0.5", "sparse 2:4", "sparse 0.9", "sparse 0.95")),
        (", bf16", 4, ("dense", "sparse 0.9")),
    ):
        subjects = [sparse_wide_resnet(setting + dtype, batch_size) for setting in settings]
        name = f"WideResNet-28-2{dtype}, batch {batch_size}, SGD momentum"
        rows += measured_rows("sparsity", name, subjects, num_different, held_bytes, repeats=5)
    write_rows("sparsity", rows)


# ---------------------------------------------------------------------------------------------------- a transformer
def bert_subject(setting: str) -> Subject:
    """BERT-base, one sequence: what is held between steps is the model's, whatever the batch."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(attn_implementation="eager")).eval()  # without dropout
    if setting != "dense":
        apply_sparsity(model, Sparsity(sparsity=float(setting.partition(" ")[2])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids, labels = torch.randint(0, 30_000, (1, 16)), torch.tensor([1])

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()

    return Subject(setting, model, optimizer, (ids, labels), step)


def bert() -> None:
    """Bytes held against density x dense plus positions, for the layers that are sparse; time of a tiny step."""
    rows: list[dict[str, Any]] = []
    dense_sizes: dict[str, int] = {}
    subjects = []
    for setting in ("dense", "sparse 0.9", "sparse 0.95"):
        subject = bert_subject(setting)
        subjects.append(subject)
        memory, sizes = measure_memory(subject, workspace=False), held_bytes(subject)
        if setting == "dense":
            dense_peak, dense_sizes = memory["peak_bytes"], sizes
        layers = sparse_layers(subject.model).values()
        total = sum(layer.dense_shape.numel() for layer in layers)
        density = 1.0 - float(setting.partition(" ")[2]) if layers else 1.0
        positions = sum(
            index_bytes(round(density * layer.dense_shape.numel()), layer.dense_shape.numel()) for layer in layers
        )
        # Four float32 numbers for each weight: itself, its gradient, two moments.
        expected = dense_sizes["held_bytes"] - 16 * total + 16 * density * total + positions
        rows.append(
            {
                "benchmark": "sparsity_bert",
                "model": "BERT-base, batch 1 x 16, AdamW",
                "setting": setting,
                **memory,
                "factor": dense_peak / memory["peak_bytes"],
                **sizes,
                "held_factor": dense_sizes["held_bytes"] / sizes["held_bytes"],
                "quality": "held bytes over density x dense + positions",
                "quality_value": sizes["held_bytes"] / expected,
            }
        )
    torch.set_num_threads(1)
    seconds = measure_cpu_seconds(subjects, 5)
    for row, taken in zip(rows, seconds, strict=True):
        row |= time_columns(taken, seconds[0]) | environment()
    write_rows("sparsity_bert", rows)


# ---------------------------------------------------------------------------------------------------- accuracy
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
    schedule = UpdateSchedule(every=10)
    settings: list[tuple[str, float, Sparsity | None]] = [("dense", 0.0, None)]
    settings += [
        (method, s, Sparsity(sparsity=s, method=method, schedule=schedule, distribution="erk"))
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


PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "sparsity.svg"
PARTS = {"wrn": wrn, "bert": bert, "digits": digits, "text": text, "picture": picture}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
