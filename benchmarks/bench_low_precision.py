"""Bytes per parameter of weights, gradients and optimizer state, time of a step, and what becomes of the training.

Bytes and time: a GPT of plain modules with AdamW. Quality: a smaller one, trained on the source of Python's standard
library; the loss is of files that were not seen. Both small, because a CPU without bfloat16 instructions emulates them:
there the time of the update is what says something. One thread, about 15 minutes. `nothing kept` means that embeddings,
norms and small tensors have low-bit state too.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from harness import Subject, environment, measure_cpu_seconds, measure_memory, save_rows, time_columns
from lightning_memsave import LowPrecision, OptimizerState, apply_low_precision, apply_optimizer_state
from models import next_token_loss, plain_gpt
from quality_activation_compression import source_text

ALL = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}
RELEASE = {"gradients": "release"}
SETTINGS: dict[str, tuple[str | None, dict[str, Any] | None]] = {
    "float32": (None, None),
    "plain bf16": (None, None),
    "bf16-sr": ("bf16-sr", None),
    "bf16+8": ("bf16+8", None),
    "bf16-kahan": ("bf16-kahan", None),
    "bf16-sr + 8bit + release": ("bf16-sr", RELEASE),
    "bf16-sr + 8bit + release, nothing kept": ("bf16-sr", ALL | RELEASE),
    "bf16+8 + 8bit + release, nothing kept": ("bf16+8", ALL | RELEASE),
    "bf16-sr + 4bit + release": ("bf16-sr", {"format": "4bit"} | RELEASE),
    "bf16-sr + 4bit + release, nothing kept": ("bf16-sr", {"format": "4bit"} | ALL | RELEASE),
}
CONTEXT, BATCH = 64, 16
LEARNING_RATE, NUM_STEPS, NUM_VALIDATION_BATCHES = 3e-4, 300, 32


def large(setting: str) -> Subject:
    return plain_gpt(setting, batch_size=2, context=128)


def small(setting: str) -> Subject:
    return plain_gpt(setting, BATCH, CONTEXT, num_layers=2, width=64, num_heads=4, dropout=0.0)


def draw_batches(text: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """[count, batch, context] windows of `text`."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - CONTEXT, (count, BATCH), generator=generator)
    return text[starts[..., None] + torch.arange(CONTEXT)].long()


def changed(subject: Subject, lr: float = 1e-3, release: bool = True) -> Subject:
    """`subject` under its setting; whatever has bfloat16 weights runs under autocast."""
    precision, state = SETTINGS[subject.setting]
    model, optimizer = subject.model, subject.optimizer
    for group in optimizer.param_groups:
        group["lr"] = lr
    if subject.setting == "plain bf16":
        model.bfloat16()
    if state is not None:
        config = OptimizerState(**state)
        config = config if release else dataclasses.replace(config, gradients="keep")
        apply_optimizer_state(optimizer, config, model)
    if precision is not None:
        apply_low_precision(model, optimizer, LowPrecision(format=precision))

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=subject.setting != "float32"):
            return next_token_loss(model(subject.batch).float(), subject.batch)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return Subject(subject.setting, model, optimizer, subject.batch, step, loss)


def bytes_per_parameter(setting: str) -> dict[str, float]:
    """Of weights with their corrections, the most gradients that are alive at one time, and state."""
    subject = large(setting)
    num_parameters = sum(p.numel() for p in subject.model.parameters())
    alive, most = set(), 0

    def counted(p: nn.Parameter) -> None:
        nonlocal most
        alive.add(p)
        most = max(most, sum(q.grad.nbytes for q in alive if q.grad is not None))

    for p in subject.model.parameters():
        p.register_post_accumulate_grad_hook(counted)  # before the one that releases
    subject = changed(subject)
    subject.step()
    subject.step()
    weights = sum(t.nbytes for t in (*subject.model.parameters(), *subject.model.buffers()))
    leaves = (t for state in subject.optimizer.state.values() for t in tree_leaves(state) if torch.is_tensor(t))
    state = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in leaves}.values())
    found = {"weights": weights, "gradients": most, "state": state}
    sizes = {f"{kind}_bytes_per_parameter": size / num_parameters for kind, size in found.items()}
    return {**sizes, "bytes_per_parameter": sum(found.values()) / num_parameters}


def update_seconds(setting: str, repeats: int = 7) -> float:
    """CPU seconds of `optimizer.step()` for 10 million parameters."""
    subject = changed(large(setting), release=False)
    num_parameters = sum(p.numel() for p in subject.model.parameters())
    taken = []
    for _ in range(repeats):
        for p in subject.model.parameters():
            p.grad = torch.randn_like(p)
        start = time.process_time()
        subject.optimizer.step()
        taken.append(time.process_time() - start)
    return statistics.median(taken[1:]) * 1e7 / num_parameters


def validation_loss(setting: str, train: torch.Tensor, unseen: torch.Tensor) -> float:
    subject = changed(small(setting), LEARNING_RATE)
    for ids in draw_batches(train, NUM_STEPS, 1):
        subject.batch.copy_(ids)
        subject.step()
    subject.model.eval()
    losses = []
    with torch.no_grad():
        for ids in unseen:
            subject.batch.copy_(ids)
            losses.append(float(subject.loss()))
    return statistics.mean(losses)


def main() -> None:
    torch.set_num_threads(1)
    memory = {}
    for setting in SETTINGS:
        sizes = bytes_per_parameter(setting)
        memory[setting] = sizes | measure_memory(changed(large(setting)), workspace=False)
        memory[setting]["update_cpu_seconds_per_10M"] = update_seconds(setting)
        print(setting, sizes, memory[setting]["peak_bytes"], flush=True)
        gc.collect()
    seconds = measure_cpu_seconds([changed(large(setting)) for setting in SETTINGS], repeats=4)
    gc.collect()
    train, validation = source_text()
    unseen = draw_batches(validation, NUM_VALIDATION_BATCHES, 2)
    rows, losses = [], {}
    for setting, taken in zip(SETTINGS, seconds, strict=True):
        losses[setting] = validation_loss(setting, train, unseen)
        rows.append(
            {
                "benchmark": "low_precision",
                "model": "GPT of plain modules, 6 layers, width 256, batch 2 x 128, AdamW",
                "setting": setting,
                **memory[setting],
                "factor": memory["float32"]["peak_bytes"] / memory[setting]["peak_bytes"],
                **time_columns(taken, seconds[0]),
                "quality": "validation loss, nats per byte of unseen files of Python's standard library; 2 layers, "
                f"width 64, batch {BATCH} x {CONTEXT}, {NUM_STEPS} steps, learning rate {LEARNING_RATE}",
                "quality_value": losses[setting],
                "relative_difference": losses[setting] / losses["float32"] - 1,
                **environment(),
            }
        )
        save_rows("low_precision", rows)
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
