"""What low-rank layers reach on text, three seeds each, beside dense, and sparse ones with as many numbers.

Also with ranks that fall during training, which the package does not offer, as they reach less. About two minutes on
1 core.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

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
from lightning_memsave.techniques.low_rank import LowRankLayer, low_rank_layers
from lightning_memsave.torch_internals.compact_layers import replace_values

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


class FallingRanks:
    """Cuts ranks along a cubic curve, from what they are to as many numbers as one rank gives, with moments.

    `"evenly"`: the same rank everywhere, of each layer the terms of the largest norm. `"by energy"`: of all layers the
    terms with the largest square of the norm per number, at least a quarter of the rank in each. `"by gradient"`: those
    with the largest square of <factors, gradient> per number, likewise (Molchanov et al., 2019).
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, until: int, how: str) -> None:
        self.layers, self.optimizer, self.rank, self.until, self.how = (
            low_rank_layers(model),
            optimizer,
            rank,
            until,
            how,
        )
        self.begun = sum(layer.factors.numel() for layer in self.layers.values())
        self.goal = sum(rank * len(layer.factors) for layer in self.layers.values())
        self.sums = {name: torch.zeros(layer.rank) for name, layer in self.layers.items()}
        self.num_steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.num_steps += 1
        for name, layer in self.layers.items():
            self.sums[name] += (layer.factors * layer.factors.grad).sum(0) ** 2
        if self.num_steps <= self.until and (self.num_steps % 10 == 0 or self.num_steps == self.until):
            kept = self.kept(self.goal + (self.begun - self.goal) * (1 - self.num_steps / self.until) ** 3)
            for name, layer in self.layers.items():
                self.cut(name, layer, torch.tensor(sorted(kept[name])))

    def kept(self, most: float) -> dict[str, list[int]]:
        norms = {n: layer.pair[0].norm(dim=0) * layer.pair[1].norm(dim=0) for n, layer in self.layers.items()}
        if self.how == "evenly":
            rank = round(self.rank * most / self.goal)
            return {name: norm.topk(min(rank, len(norm))).indices.tolist() for name, norm in norms.items()}
        scores = self.sums if self.how == "by gradient" else {name: norm**2 for name, norm in norms.items()}
        sizes = {name: len(layer.factors) for name, layer in self.layers.items()}
        terms = [(float(s) / sizes[name], name, i) for name, score in scores.items() for i, s in enumerate(score)]
        kept: dict[str, list[int]] = {name: [] for name in scores}
        for is_least in (True, False):
            for _, name, i in sorted(terms, reverse=True):
                used = sum(sizes[n] * len(numbers) for n, numbers in kept.items())
                room = len(kept[name]) < self.rank // 4 if is_least else used + sizes[name] <= most
                if room and i not in kept[name]:
                    kept[name].append(i)
        return kept

    def cut(self, name: str, layer: LowRankLayer, kept: Tensor) -> None:
        factors, state = layer.factors, self.optimizer.state[layer.factors]
        for key, moment in state.items():
            if moment.shape == factors.shape:
                state[key] = moment.index_select(1, kept)
        factors.grad = None
        replace_values(factors, factors.detach().index_select(1, kept))
        self.sums[name] = torch.zeros(len(kept))


FALLING = ("evenly", "by energy", "by gradient")
FALLING_RANK, FALLING_START = 16, 32


def settings() -> dict[str, LowRank | Sparsity | None]:
    made: dict[str, LowRank | Sparsity | None] = {"dense": None}
    for rank, fraction in fractions().items():
        made[f"rank {rank}"] = LowRank(rank=rank, modules=BLOCKS)
        sparse = {"sparsity": round(1 - fraction, 4), "modules": BLOCKS, "distribution": "erk"}
        made[f"static, as rank {rank}"] = Sparsity(**sparse)
        made[f"rigl, as rank {rank}"] = Sparsity(**sparse, method="rigl", schedule=SCHEDULE)
    for how in FALLING:
        made[f"{how}, from rank {FALLING_START} to {FALLING_RANK}"] = LowRank(rank=FALLING_START, modules=BLOCKS)
    return made


def train(seed: int, config: LowRank | Sparsity | None, falling: str = "") -> dict[str, Any]:
    """A small GPT on bytes of Python's standard library; the loss is of files that were not seen."""
    subject = plain_gpt("", TEXT_BATCH, TEXT_CONTEXT, num_layers=2, width=96, num_heads=4, dropout=0.0, seed=seed)
    model = subject.model
    if isinstance(config, LowRank):
        apply_low_rank(model, config)
    elif config is not None:
        apply_sparsity(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    updates: MaskUpdates | FallingRanks | None = None
    if isinstance(config, Sparsity):
        updates = MaskUpdates(model, optimizer, config, TEXT_STEPS)
    elif falling:
        updates = FallingRanks(model, optimizer, FALLING_RANK, TEXT_STEPS // 2, falling)
    text, validation = text_parts()
    parts = windows(text, TEXT_STEPS, 1 + seed)

    def step(ids: torch.Tensor = parts[-1]) -> None:
        optimizer.zero_grad()
        next_token_loss(model(ids), ids).backward()
        optimizer.step()

    start, most_held = time.process_time(), 0
    for ids in parts:
        step(ids)
        most_held = max(most_held, held_bytes(Subject("", model, optimizer, None, step))["held_bytes"])
        if updates is not None:
            updates.step()
    seconds = time.process_time() - start
    with torch.no_grad():
        losses = [float(next_token_loss(model(ids), ids)) for ids in windows(validation, TEXT_VALIDATION, 2)]
    subject = Subject("", model, optimizer, None, step)
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "held_bytes": most_held,
        "peak_bytes": measure_memory(subject, workspace=False)["peak_bytes"],
        "cpu_seconds_run": seconds,
        "quality_value": statistics.mean(losses),
    }


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for setting, config in settings().items():
        for seed in SEEDS:
            run = train(seed, config, next((how for how in FALLING if setting.startswith(how)), ""))
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
