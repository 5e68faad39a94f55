"""What low precision and lean optimizer state do to training: three seeds, each against float32 with the same one.

`text`: a GPT on the source of Python's standard library, AdamW; the loss on files that were not seen. `muon`: the same
with Muon for the matrices of its blocks. `digits`: WideResNet-28-2 on digits of 8x8, SGD with momentum; accuracy on 360
images that were not seen. Each setting sees the weights and batches of float32 with that seed; state is low-bit for
every parameter. About 20 minutes on one core, most of it the emulation of 16-bit arithmetic. Names of tasks as
arguments run only these; rows that are there are kept.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness.bfloat16 import faster_bfloat16
from benchmarks.harness.measurement import Subject, environment, put_row, read_rows
from benchmarks.memory_time.bench_low_precision import ALL
from benchmarks.models.subjects import next_token_loss, plain_gpt
from benchmarks.quality.quality_activation_compression import source_text
from lightning_memsave import LowPrecision, OptimizerState, apply_low_precision, apply_optimizer_state
from lightning_memsave.demo.data import load_digits_32
from lightning_memsave.demo.model import WideResNet
from lightning_memsave.torch_internals.held_optimizers import stepping

NAME = "low_precision_quality"
SEEDS = (0, 1, 2)
CONTEXT, BATCH, NUM_STEPS, NUM_VALIDATION_BATCHES, LEARNING_RATE = 64, 4, 200, 32, 3e-4
NUM_DRAWN = 16
"""Windows of which a batch is the first; the rows so far were drawn so."""
DIGITS_BATCH, EPOCHS = 50, 5
SETTINGS: dict[str, tuple[str | None, dict[str, Any] | None]] = {
    "float32": (None, None),
    "plain bf16": (None, None),
    "bf16-sr": ("bf16-sr", None),
    "bf16+8": ("bf16+8", None),
    "bf16-kahan": ("bf16-kahan", None),
    "int8-sr": ("int8-sr", None),
    "fp16-scaled": ("fp16-scaled", None),
    "bf16-gradients": ("bf16-gradients", None),
    "bf16-sr + 8bit": ("bf16-sr", ALL),
    "int8-sr + 8bit": ("int8-sr", ALL),
    "8bit": (None, ALL),
    "4bit": (None, ALL | {"first_moment": "4bit"}),
    "fp8": (None, ALL | {"first_moment": "fp8"}),
    "factored": (None, ALL | {"second_moment": "factored"}),
    "4bit-factored": (None, ALL | {"first_moment": "4bit", "second_moment": "factored"}),
    "lowrank 16": (None, ALL | {"projection": "galore", "rank": 16}),
    "apollo 16": (None, ALL | {"projection": "apollo", "rank": 16}),
    "apollo 1": (None, ALL | {"projection": "apollo", "rank": 1}),
}
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Task:
    """Something to learn."""

    model: str
    quality: str
    settings: tuple[str, ...]
    make: Callable[[str, int], Subject]
    """(setting, seed) -> a model and its optimizer."""
    batches: Callable[[int], Iterator[Any]]
    """Of training, for a seed."""
    loss: Callable[[Any, Any], Tensor]
    """(model, batch) -> mean loss."""
    cosine_steps: int | None = None
    """Over which the learning rate falls to zero along a cosine; without, it stays."""
    test: Callable[[Any, int], float]
    """(function of a batch's inputs, seed) -> quality."""


# ---------------------------------------------------------------------------------------------------- text
def draw_batches(text: Tensor, count: int, seed: int) -> Tensor:
    """[count, batch, context] windows of `text`."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - CONTEXT, (count, NUM_DRAWN), generator=generator)[:, :BATCH]
    return text[starts[..., None] + torch.arange(CONTEXT)].long()


def text_batches(seed: int) -> Iterator[Tensor]:
    return iter(draw_batches(source_text()[0], NUM_STEPS, 1 + seed))


def text_subject(setting: str, seed: int) -> Subject:
    subject = plain_gpt(setting, BATCH, CONTEXT, num_layers=2, width=64, num_heads=4, dropout=0.0, seed=seed)
    for group in subject.optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    return subject


class MuonAndAdamW(torch.optim.Optimizer):
    """Muon for the matrices of the blocks, AdamW for the rest, as one optimizer that only steps both."""

    def __init__(self, model: nn.Module) -> None:
        blocks = {name: p for name, p in model.named_parameters() if p.ndim == 2 and "blocks" in name}
        rest = [p for name, p in model.named_parameters() if name not in blocks]
        muon = torch.optim.Muon(list(blocks.values()), LEARNING_RATE, adjust_lr_fn="match_rms_adamw")
        self.optimizers = (muon, torch.optim.AdamW(rest, LEARNING_RATE))
        super().__init__([*model.parameters()], {})

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for each in self.optimizers:
            each.step()
        return loss


def muon_subject(setting: str, seed: int) -> Subject:
    subject = text_subject(setting, seed)
    return replace(subject, optimizer=MuonAndAdamW(subject.model))


def text_loss(model: Any, ids: Tensor) -> Tensor:
    return next_token_loss(model(ids).float(), ids)


def text_test(model: Any, seed: int) -> float:
    unseen = draw_batches(source_text()[1], NUM_VALIDATION_BATCHES, 2)
    return statistics.mean(float(text_loss(model, ids)) for ids in unseen)


# ---------------------------------------------------------------------------------------------------- digits
def digits(seed: int) -> tuple[Batch, Batch]:
    train, test = ((F.avg_pool2d(part.tensors[0], 4), part.tensors[1]) for part in load_digits_32(seed))
    return train, test


def digits_batches(seed: int) -> Iterator[Batch]:
    images, labels = digits(seed)[0]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for index in torch.randperm(len(labels), generator=generator).split(DIGITS_BATCH)[
            : len(labels) // DIGITS_BATCH
        ]:
            yield images[index], labels[index]


def digits_subject(setting: str, seed: int) -> Subject:
    torch.manual_seed(seed)
    model = WideResNet()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    return Subject(setting, model, optimizer, None, lambda: None)


def digits_loss(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def digits_test(model: Any, seed: int) -> float:
    images, labels = digits(seed)[1]
    return 100 * float((model(images).argmax(1) == labels).double().mean())


_OF_SECOND_MOMENTS = ("factored", "4bit-factored", "apollo 16", "apollo 1")
ON_DIGITS = tuple(name for name in SETTINGS if name not in ("fp16-scaled", "lowrank 16", *_OF_SECOND_MOMENTS))
"""Convolutions of float16 take minutes for a step on a CPU; SGD has no second moments."""
TASKS = {
    "text": Task(
        model=f"GPT of plain modules, 2 layers, width 64, batch {BATCH} x {CONTEXT}, AdamW, {NUM_STEPS} steps, "
        f"learning rate {LEARNING_RATE}",
        quality="validation loss, nats per byte of unseen files of Python's standard library",
        settings=tuple(SETTINGS),
        make=text_subject,
        batches=text_batches,
        loss=text_loss,
        test=text_test,
    ),
    "muon": Task(
        model=f"Muon and AdamW: GPT of plain modules, 2 layers, width 64, batch {BATCH} x {CONTEXT}, "
        f"{NUM_STEPS} steps, learning rate {LEARNING_RATE}",
        quality="validation loss, nats per byte of unseen files of Python's standard library",
        settings=("float32", "8bit", "4bit"),
        make=muon_subject,
        batches=text_batches,
        loss=text_loss,
        test=text_test,
    ),
    "digits": Task(
        model=f"WideResNet-28-2, digits 8x8, batch {DIGITS_BATCH}, SGD momentum, {EPOCHS} epochs, cosine",
        quality="test accuracy, per cent of 360 images",
        settings=ON_DIGITS,
        cosine_steps=EPOCHS * (1437 // DIGITS_BATCH),
        make=digits_subject,
        batches=digits_batches,
        loss=digits_loss,
        test=digits_test,
    ),
}


def prepared(task: Task, setting: str, seed: int) -> Subject:
    subject = task.make(setting, seed)
    precision, state = SETTINGS[setting]
    if setting == "plain bf16":
        subject.model.bfloat16()
    for optimizer in stepping([subject.optimizer]) if state is not None else ():
        apply_optimizer_state(optimizer, OptimizerState(**state), subject.model)
    if precision is not None:
        config = LowPrecision(format=precision, seed=seed)  # type: ignore[arg-type]
        apply_low_precision(subject.model, subject.optimizer, config)
    return subject


def train(task: Task, setting: str, seed: int) -> dict[str, float]:
    subject = prepared(task, setting, seed)
    model, optimizer = subject.model, subject.optimizer
    precision = SETTINGS[setting][0]
    is_16bit = setting == "plain bf16" or (precision is not None and precision != "bf16-gradients")
    dtype = torch.float16 if precision == "fp16-scaled" else torch.bfloat16
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, task.cosine_steps) if task.cosine_steps else None
    start = time.process_time()
    with faster_bfloat16(), torch.autocast("cpu", dtype, enabled=is_16bit):
        for batch in task.batches(seed):
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            (loss if precision is None else optimizer.scale_loss(loss)).backward()  # type: ignore[attr-defined]
            optimizer.step()
            if schedule is not None:
                schedule.step()
        seconds = time.process_time() - start
        model.eval()
        with torch.no_grad():
            return {"quality_value": task.test(model, seed), "cpu_seconds_run": seconds}


def run(task: Task) -> None:
    for setting in task.settings:
        for seed in SEEDS:
            same = [row for row in read_rows(NAME) if (row["model"], row["seed"]) == (task.model, str(seed))]
            if any(row["setting"] == setting for row in same):
                continue
            found = train(task, setting, seed)
            base = float(next((row for row in same if row["setting"] == "float32"), found)["quality_value"])
            difference = found["quality_value"] - base
            row = {
                "benchmark": NAME,
                "model": task.model,
                "setting": setting,
                "seed": seed,
                **found,
                "quality": task.quality,
                "difference": difference,
                "relative_difference": difference / base,
                **environment(),
            }
            put_row(NAME, row, ("model", "setting", "seed"))
            print(setting, seed, found, difference, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or TASKS:
        run(TASKS[name])
