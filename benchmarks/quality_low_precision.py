"""What low precision does to the loss: a GPT on the source of Python's standard library, three seeds, unseen files.

Each setting sees the same weights and batches as float32 with that seed. About 5 minutes on one core, most of it the
emulation of 16-bit arithmetic. Names of settings as arguments run only these, beside the rows that are there.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from typing import Any

import torch

from bench_low_precision import ALL, draw_batches
from harness import RESULTS, Subject, environment, save_rows
from lightning_memsave import LowPrecision, OptimizerState, apply_low_precision, apply_optimizer_state
from models import next_token_loss, plain_gpt
from quality_activation_compression import source_text

NAME = "low_precision_quality"
SEEDS = (0, 1, 2)
CONTEXT, BATCH, NUM_STEPS, NUM_VALIDATION_BATCHES, LEARNING_RATE = 64, 4, 200, 32, 3e-4
SETTINGS: dict[str, tuple[str | None, dict[str, Any] | None]] = {
    "float32": (None, None),
    "plain bf16": (None, None),
    "bf16-sr": ("bf16-sr", None),
    "bf16+8": ("bf16+8", None),
    "bf16-kahan": ("bf16-kahan", None),
    "fp16-scaled": ("fp16-scaled", None),
    "bf16-gradients": ("bf16-gradients", None),
    "bf16-sr + 8bit": ("bf16-sr", ALL),
}


def made(setting: str, seed: int) -> Subject:
    subject = plain_gpt(setting, BATCH, CONTEXT, num_layers=2, width=64, num_heads=4, dropout=0.0, seed=seed)
    precision, state = SETTINGS[setting]
    for group in subject.optimizer.param_groups:
        group["lr"] = LEARNING_RATE
    if setting == "plain bf16":
        subject.model.bfloat16()
    if state is not None:
        apply_optimizer_state(subject.optimizer, OptimizerState(**state), subject.model)
    if precision is not None:
        apply_low_precision(subject.model, subject.optimizer, LowPrecision(format=precision, seed=seed))
    return subject


def loss_of(subject: Subject, ids: torch.Tensor) -> torch.Tensor:
    dtype = torch.float16 if subject.setting.startswith("fp16") else torch.bfloat16
    with torch.autocast("cpu", dtype, enabled=subject.setting not in ("float32", "bf16-gradients")):
        return next_token_loss(subject.model(ids).float(), ids)


def train(setting: str, seed: int, text: torch.Tensor, unseen: torch.Tensor) -> dict[str, float]:
    subject = made(setting, seed)
    optimizer: Any = subject.optimizer
    start = time.process_time()
    for ids in draw_batches(text, NUM_STEPS, 1 + seed)[:, :BATCH]:
        optimizer.zero_grad()
        loss = loss_of(subject, ids)
        (optimizer.scale_loss(loss) if SETTINGS[setting][0] is not None else loss).backward()
        optimizer.step()
    seconds = time.process_time() - start
    subject.model.eval()
    with torch.no_grad():
        losses = [float(loss_of(subject, ids)) for ids in unseen]
    return {"quality_value": statistics.mean(losses), "cpu_seconds_run": seconds}


def main(settings: list[str]) -> None:
    torch.set_num_threads(1)
    train_text, validation = source_text()
    unseen = draw_batches(validation, NUM_VALIDATION_BATCHES, 2)[:, :BATCH]
    path = RESULTS / f"{NAME}.csv"
    rows: list[dict[str, Any]] = list(csv.DictReader(path.open())) if path.exists() else []
    rows = [row for row in rows if row["setting"] not in settings]
    for setting in settings:
        for seed in SEEDS:
            found = train(setting, seed, train_text, unseen)
            base = next((r for r in rows if r["setting"] == "float32" and int(r["seed"]) == seed), found)
            row = {
                "benchmark": NAME,
                "model": f"GPT of plain modules, 2 layers, width 64, batch {BATCH} x {CONTEXT}, AdamW, "
                f"{NUM_STEPS} steps, learning rate {LEARNING_RATE}",
                "setting": setting,
                "seed": seed,
                **found,
                "quality": "validation loss, nats per byte of unseen files of Python's standard library",
                "relative_difference": found["quality_value"] / float(base["quality_value"]) - 1,
                **environment(),
            }
            rows.append(row)
            print(setting, seed, found, row["relative_difference"], flush=True)
        order = list(SETTINGS)
        rows.sort(key=lambda row: (order.index(row["setting"]), int(row["seed"])))
        save_rows(NAME, rows)


if __name__ == "__main__":
    main(sys.argv[1:] or list(SETTINGS))
