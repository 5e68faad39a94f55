"""What low-rank layers reach on text, three seeds each, beside dense, and sparse ones with as many numbers.

About two minutes on 1 core.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.harness.measurement import Subject, environment, measure_memory, save_rows
from benchmarks.memory_time.bench_sparsity import held_bytes
from benchmarks.models.subjects import next_token_loss, plain_gpt
from benchmarks.quality.quality_sparsity import (
    SEEDS,
    TEXT_BATCH,
    TEXT_CONTEXT,
    TEXT_STEPS,
    TEXT_VALIDATION,
    text_parts,
    windows,
)
from lightning_memsave import LowRank, MaskUpdates, Sparsity, UpdateSchedule, apply_low_rank, apply_sparsity

BLOCKS = "blocks.*"
"""Blocks only: embeddings and head of bytes are small."""
RANKS = (4, 8, 16, 32)
SCHEDULE = UpdateSchedule(every=10)


def fractions() -> dict[int, float]:
    """The fraction of the weights of the blocks that factors of each rank have."""
    found = {}
    for rank in RANKS:
        model = plain_gpt("", TEXT_BATCH, TEXT_CONTEXT, num_layers=2, width=96, num_heads=4, dropout=0.0).model
        before = sum(p.numel() for name, p in model.blocks.named_parameters() if p.dim() > 1)
        apply_low_rank(model, LowRank(rank=rank, modules=BLOCKS))
        found[rank] = sum(p.numel() for name, p in model.blocks.named_parameters() if p.dim() > 1) / before
    return found


def settings() -> dict[str, LowRank | Sparsity | None]:
    made: dict[str, LowRank | Sparsity | None] = {"dense": None}
    for rank, fraction in fractions().items():
        made[f"rank {rank}"] = LowRank(rank=rank, modules=BLOCKS)
        sparse = {"sparsity": round(1 - fraction, 4), "modules": BLOCKS, "distribution": "erk"}
        made[f"static, as rank {rank}"] = Sparsity(**sparse)
        made[f"rigl, as rank {rank}"] = Sparsity(**sparse, method="rigl", schedule=SCHEDULE)
    return made


def train(seed: int, config: LowRank | Sparsity | None) -> dict[str, Any]:
    """A small GPT on bytes of Python's standard library; the loss is of files that were not seen."""
    subject = plain_gpt("", TEXT_BATCH, TEXT_CONTEXT, num_layers=2, width=96, num_heads=4, dropout=0.0, seed=seed)
    model = subject.model
    if isinstance(config, LowRank):
        apply_low_rank(model, config)
    elif config is not None:
        apply_sparsity(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    updates = MaskUpdates(model, optimizer, config, TEXT_STEPS) if isinstance(config, Sparsity) else None
    text, validation = text_parts()
    parts = windows(text, TEXT_STEPS, 1 + seed)

    def step(ids: torch.Tensor = parts[-1]) -> None:
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()

    start = time.process_time()
    for ids in parts:
        step(ids)
        if updates is not None:
            updates.step()
    seconds = time.process_time() - start
    with torch.no_grad():
        losses = [float(next_token_loss(model(ids), ids)) for ids in windows(validation, TEXT_VALIDATION, 2)]
    subject = Subject("", model, optimizer, None, step)
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "held_bytes": held_bytes(subject)["held_bytes"],
        "peak_bytes": measure_memory(subject, workspace=False)["peak_bytes"],
        "cpu_seconds_run": seconds,
        "quality_value": statistics.mean(losses),
    }


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for setting, config in settings().items():
        for seed in SEEDS:
            run = train(seed, config)
            dense = rows[0] if rows else run
            rows.append(
                {
                    "benchmark": "low_rank_text",
                    "model": f"GPT of plain modules, 2 layers, width 96, batch {TEXT_BATCH} x {TEXT_CONTEXT}, AdamW, "
                    f"{TEXT_STEPS} steps",
                    "setting": setting,
                    "seed": seed,
                    **run,
                    "factor": dense["peak_bytes"] / run["peak_bytes"],
                    "cpu_time_ratio": run["cpu_seconds_run"] / dense["cpu_seconds_run"],
                    "quality": "validation loss, nats per byte of unseen files of Python's standard library",
                    **environment(),
                }
            )
            save_rows("low_rank_text", rows)
            print(setting, seed, run, flush=True)


if __name__ == "__main__":
    main()
