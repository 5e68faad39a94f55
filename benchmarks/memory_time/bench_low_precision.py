"""Bytes per parameter of weights, gradients and optimizer state, and the time of an update; a GPT of plain modules.

It is small, because a CPU without bfloat16 instructions emulates them: there the time of the update is what says
something. One thread, about 8 minutes. `nothing kept` means that embeddings, norms and small tensors have low-bit state
too. What becomes of the training: `quality_low_precision.py`.
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

from benchmarks.harness.measurement import (
    Subject,
    environment,
    measure_cpu_seconds,
    measure_memory,
    time_columns,
    write_rows,
)
from benchmarks.models.subjects import next_token_loss, plain_gpt
from lightning_memsave import LowPrecision, OptimizerState, apply_low_precision, apply_optimizer_state

ALL = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}
RELEASE = {"gradients": "release"}
SETTINGS: dict[str, tuple[str | None, dict[str, Any] | None]] = {
    "float32": (None, None),
    "plain bf16": (None, None),
    "bf16-sr": ("bf16-sr", None),
    "bf16+8": ("bf16+8", None),
    "bf16-kahan": ("bf16-kahan", None),
    "int8-sr": ("int8-sr", None),
    "bf16-sr + 8bit + release": ("bf16-sr", RELEASE),
    "bf16-sr + 8bit + release, nothing kept": ("bf16-sr", ALL | RELEASE),
    "bf16+8 + 8bit + release, nothing kept": ("bf16+8", ALL | RELEASE),
    "bf16-sr + 4bit + release": ("bf16-sr", {"first_moment": "4bit"} | RELEASE),
    "bf16-sr + 4bit + release, nothing kept": ("bf16-sr", {"first_moment": "4bit"} | ALL | RELEASE),
    "int8-sr + 8bit + release, nothing kept": ("int8-sr", ALL | RELEASE),
    "int8-sr + 4bit + release, nothing kept": ("int8-sr", {"first_moment": "4bit"} | ALL | RELEASE),
    "SGD: float32": (None, None),
    "SGD: bf16-sr + 8bit + into-state, nothing kept": ("bf16-sr", {"gradients": "into-state"} | ALL),
}
"""With AdamW, or with SGD with momentum."""


def large(setting: str) -> Subject:
    subject = plain_gpt(setting, batch_size=2, context=128, num_layers=12)
    if setting.startswith("SGD"):
        subject.optimizer = torch.optim.SGD(subject.model.parameters(), 1e-3, momentum=0.9)
    return subject


def changed(subject: Subject, in_backward: bool = True) -> Subject:
    """`subject` under its setting; whatever has bfloat16 weights runs under autocast."""
    precision, state = SETTINGS[subject.setting]
    model, optimizer = subject.model, subject.optimizer
    if subject.setting == "plain bf16":
        model.bfloat16()
    if state is not None:
        config = OptimizerState(**state)
        config = config if in_backward else dataclasses.replace(config, gradients="keep")
        apply_optimizer_state(optimizer, config, model)
    if precision is not None:
        apply_low_precision(model, optimizer, LowPrecision(format=precision))

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not subject.setting.endswith("float32")):
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
    subject = changed(large(setting), in_backward=False)
    num_parameters = sum(p.numel() for p in subject.model.parameters())
    taken = []
    for _ in range(repeats):
        for p in subject.model.parameters():
            p.grad = torch.randn(p.shape, dtype=p.grad_dtype)
        start = time.process_time()
        subject.optimizer.step()
        taken.append(time.process_time() - start)
    return statistics.median(taken[1:]) * 1e7 / num_parameters


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
    rows = []
    for setting, taken in zip(SETTINGS, seconds, strict=True):
        plain = "SGD: float32" if setting.startswith("SGD") else "float32"
        row = {
            "benchmark": "low_precision",
            "model": "GPT of plain modules, 12 layers, width 256, batch 2 x 128, AdamW or SGD with momentum",
            "setting": setting,
            **memory[setting],
            "factor": memory[plain]["peak_bytes"] / memory[setting]["peak_bytes"],
            **time_columns(taken, seconds[list(SETTINGS).index(plain)]),
            "quality": "see low_precision_quality.csv",
            **environment(),
        }
        rows.append(row)
    write_rows("low_precision", rows)


if __name__ == "__main__":
    main()
