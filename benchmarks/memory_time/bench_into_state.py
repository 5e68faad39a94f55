"""Adam's second moment without a gradient: what microbatches leave of it, along a run of plain Adam.

The small DynamicConv of `quality_dynamicconv.py`, eight sentences at a time. Each backward also goes into copies of the
parameters that do not move, whose optimizers get gradients in other ways. Compared is what a step divides by, the root
of the second moment over that of plain Adam, for each element of the matrices whose own is not 0; and the first moment,
by the length of its difference over its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.measurement import environment, save_rows
from benchmarks.models.translation import (
    INTO_5BIT_MEANS,
    INTO_MEANS,
    Subwords,
    dynamicconv,
    german_numbers,
    token_batches,
)
from benchmarks.quality.quality_dynamicconv import BATCH_TOKENS, NUM_TOKENS, NUM_TRAIN, SHAPE
from lightning_memsave import OptimizerState, apply_optimizer_state

STEPS = (1, 20, 100)
MICROBATCH = 8
SHARES = {"p05": 0.05, "p50": 0.5, "p95": 0.95}
EXACT: dict[str, Any] = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}
FORMATS = {
    "into-state, 32bit": OptimizerState(first_moment="32bit", gradients="into-state"),
    "into-state, 8bit": OptimizerState(first_moment="8bit", gradients="into-state", **EXACT),
    "into-state, factored": replace(INTO_MEANS, second_moment="factored"),
    "into-state, 5bit-factored": INTO_5BIT_MEANS,
    "into-state, 4bit-factored": INTO_MEANS,
    "whole gradients, 4bit-factored": replace(INTO_MEANS, gradients="keep"),
}


class Copy:
    """Parameters that stay where they are, and an optimizer whose moments follow gradients of others."""

    def __init__(self, parameters: list[Tensor], config: OptimizerState, betas: tuple[float, float]) -> None:
        self._weights = nn.ParameterList([p.detach().clone() for p in parameters])
        self._optimizer = torch.optim.Adam(self._weights, lr=0.0, betas=betas)
        apply_optimizer_state(self._optimizer, config, self._weights)

    def take(self, gradients: list[Tensor]) -> None:
        torch.autograd.backward(list(self._weights), gradients)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def moments(self) -> tuple[list[Tensor], list[Tensor]]:
        state: Mapping[int, dict[str, Tensor]] = self._optimizer.state_dict()["state"]
        first, second = ([state[i][name] for i in range(len(state))] for name in ("exp_avg", "exp_avg_sq"))
        return first, second


def quantiles(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    ratios = torch.cat([(a / b).sqrt()[b > 0] for a, b in zip(found, expected, strict=True) if b.dim() > 1])
    return {name: float(ratios.kthvalue(1 + int(share * (len(ratios) - 1)))[0]) for name, share in SHARES.items()}


def relative_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    one, other = (torch.cat([t.flatten() for t in each]) for each in (found, expected))
    return float((one - other).norm() / other.norm())


def main() -> None:
    torch.set_num_threads(1)
    pairs = german_numbers.generate(NUM_TRAIN, 0)
    german, english = (Subwords((pair[side] for pair in pairs), NUM_TOKENS) for side in (0, 1))
    torch.manual_seed(0)
    config = dynamicconv.DynamicConvConfig(
        num_source_tokens=len(german), num_target_tokens=len(english), dropout=0.0, lr=3e-3, warmup_steps=100, **SHAPE
    )
    module = dynamicconv.Translator(config)
    [optimizer], [schedule] = module.configure_optimizers()
    beta2 = optimizer.param_groups[0]["betas"][1]
    parameters = list(module.parameters())
    copies = {name: Copy(parameters, each, optimizer.param_groups[0]["betas"]) for name, each in FORMATS.items()}
    of_parts = [torch.zeros_like(p) for p in parameters]  # AdamA's
    rows = []
    for step, batch in enumerate(token_batches(pairs, german, english, BATCH_TOKENS, 0)[: max(STEPS)], start=1):
        num_parts = -(-len(batch["source"]) // MICROBATCH)
        sums, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
        for first in range(0, len(batch["source"]), MICROBATCH):
            part = {key: value[first : first + MICROBATCH] for key, value in batch.items()}
            weight = (part["labels"] >= 0).sum() / (batch["labels"] >= 0).sum()
            gradients = torch.autograd.grad(weight * module.training_step(part, 0), parameters)
            for copy in copies.values():
                copy.take(list(gradients))
            for total, square, gradient in zip(sums, squares, gradients, strict=True):
                total.add_(gradient)
                square.addcmul_(gradient, gradient)
        for p, total, average, square in zip(parameters, sums, of_parts, squares, strict=True):
            p.grad = total
            average.lerp_(square, 1 - beta2)
        optimizer.step()
        schedule["scheduler"].step()
        for copy in copies.values():
            copy.step()
        if step in STEPS:
            first, plain = ([optimizer.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq"))
            found = {"AdamA": (first, of_parts), **{name: copy.moments() for name, copy in copies.items()}}
            for name, (momentum, second) in found.items():
                row = {
                    "benchmark": "into_state",
                    "model": "DynamicConv, width 128, 3 + 3 layers, generated German-English",
                    "setting": name,
                    "n": step,
                    "microbatch": MICROBATCH,
                    "num_microbatches": num_parts,
                    **quantiles(second, plain),
                    "relative_difference": relative_difference(momentum, first),
                    **environment(),
                }
                rows.append(row)
                print(row, flush=True)
    save_rows("into_state", rows)


if __name__ == "__main__":
    main()
