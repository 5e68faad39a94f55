"""What a budget's own choice of codecs does to training, beside int4 for every tensor at the same bytes.

The byte-level GPT of `quality_activation_compression`, 300 steps of AdamW over three seeds, by Lightning. "int4's
bytes" is the budget that int4 everywhere needs, met by codecs alone, chosen module by module; "0.2x" may use all that
"balanced" may, and stands beside int4 with microbatches and 8-bit state. `gradient_noise` is that of codes, over the
norm of the gradient. About 50 minutes on one core; rows that are there are kept.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.measurement import environment, put_row, read_rows
from benchmarks.memory_time.bench_planner import Step, language
from benchmarks.models.subjects import next_token_loss
from benchmarks.quality.quality_activation_compression import (
    NUM_VALIDATION_BATCHES,
    SEEDS,
    byte_gpt,
    draw_batches,
    source_text,
)
from lightning_memsave import MemSave

NAME, KEY = "budget_quality", ("setting", "seed")
NUM_STEPS = 300
PLAIN, INT4 = "plain", "int4"
CODECS_ALONE = {"microbatch": False, "checkpointing": False, "optimizer_state": False, "precision": False}
SETTINGS: dict[str, dict[str, Any]] = {
    PLAIN: {"recipe": "measure"},
    INT4: {"activations": "int4", "microbatch": False},
    "int4's bytes": {"recipe": "balanced", **CODECS_ALONE},  # its budget is known when int4 has run
    "0.2x": {"recipe": "balanced", "budget": "0.2x"},
    "int4, microbatch 4, 8bit": {"activations": "int4", "microbatch": 4, "optimizer_state": "8bit"},
}


class Copies(Dataset[Tensor]):
    """Batches one by one: a part of the storage that holds all would count as all of it."""

    def __init__(self, batches: Tensor) -> None:
        self.batches = batches

    def __getitem__(self, number: int) -> Tensor:
        return self.batches[number].clone()

    def __len__(self) -> int:
        return len(self.batches)


def train(setting: str, seed: int, budget: int | None = None) -> dict[str, Any]:
    """Figures of one run: bytes, time, noise, what was planned, and the loss on files that were not seen."""
    train_text, unseen_text = source_text()
    batches = draw_batches(train_text, NUM_STEPS, 10 * seed + 1)
    module = Step(byte_gpt(seed)(setting).model, language)
    memsave = MemSave(**SETTINGS[setting], **({} if budget is None else {"budget": budget}))
    trainer = L.Trainer(
        max_steps=NUM_STEPS,
        accelerator="cpu",
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = time.thread_time()
    trainer.fit(module, DataLoader(Copies(batches), batch_size=None))
    seconds = time.thread_time() - start
    module.eval()
    unseen = draw_batches(unseen_text, NUM_VALIDATION_BATCHES, 2)
    with torch.no_grad():
        loss = statistics.mean(float(next_token_loss(module.model(ids), ids)) for ids in unseen)
    report, plan = memsave.report, memsave.plan
    return {
        "plan": "" if plan is None else "; ".join(str(step.setting) for step in plan.steps),
        "peak_bytes": report.peak_bytes,
        "cpu_seconds_run": seconds,
        "loss_class": report.loss_class,
        "gradient_noise": "" if report.gradient_noise is None else report.gradient_noise,
        "quality": "validation loss, nats per byte of unseen files of Python's standard library",
        "quality_value": loss,
    }


def main() -> None:
    torch.set_num_threads(1)
    for seed in SEEDS:
        for setting in SETTINGS:
            there = {row["setting"]: row for row in read_rows(NAME) if row["seed"] == str(seed)}
            if setting in there:
                continue
            budget = int(float(there[INT4]["peak_bytes"])) if setting == "int4's bytes" else None
            found = train(setting, seed, budget)
            plain = there.get(PLAIN, found)
            row = {
                "benchmark": NAME,
                "model": f"GPT of plain modules, 4 layers, width 128, batch 16 x 128, AdamW, {NUM_STEPS} steps",
                "setting": setting,
                "seed": seed,
                "budget_bytes": budget or "",
                **found,
                "factor": int(float(plain["peak_bytes"])) / found["peak_bytes"],
                "cpu_time_ratio": found["cpu_seconds_run"] / float(plain["cpu_seconds_run"]),
                "relative_difference": found["quality_value"] / float(plain["quality_value"]) - 1,
            }
            put_row(NAME, row | environment(), KEY)
            print(row, flush=True)


if __name__ == "__main__":
    main()
