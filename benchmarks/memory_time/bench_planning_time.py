"""How long a plan takes: CPU seconds of planning beside those of a plain step, on one thread.

Five models between a small step, where starting operations counts, and one of a second; budgets that an exact setting
meets, that need microbatches or approximate settings, and that nothing meets. The recipe is "balanced". Every plan is
made in a process of its own, after a first small one that loads what all need.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from transformers import GPT2Config, GPT2LMHeadModel, ResNetConfig, ResNetForImageClassification

from benchmarks.harness.measurement import environment, put_row
from benchmarks.memory_time.bench_planner import Step, classify, language
from benchmarks.memory_time.bench_prediction import UNet, segment
from benchmarks.models.wrn import WideResNet
from lightning_memsave import MemSave, plan_training

NAME, KEY = "planning_time", ("model", "setting")


class PackedLSTM(nn.Module):
    """Two layers over sequences of different lengths; returns scores of all positions that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(500, 128), nn.LSTM(128, 256, 2, batch_first=True)
        self.head = nn.Linear(256, 500)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        ids, lengths = batch
        packed = pack_padded_sequence(self.table(ids), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[0].data)


def packed_language(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    targets = pack_padded_sequence(*batch, batch_first=True, enforce_sorted=False).data
    return nn.functional.cross_entropy(model(batch), targets)


def gpt2() -> tuple[Step, Any]:
    config = GPT2Config(vocab_size=1000, n_positions=128, n_embd=256, n_layer=4, n_head=4)
    return Step(GPT2LMHeadModel(config), language), torch.randint(0, 1000, (16, 128))


def resnet18() -> tuple[Step, Any]:
    config = ResNetConfig(
        depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic", num_labels=10, embedding_size=64
    )
    return Step(ResNetForImageClassification(config), classify), (torch.randn(16, 3, 64, 64), torch.arange(16) % 10)


def unet() -> tuple[Step, Any]:
    return Step(UNet(), segment), (torch.randn(8, 3, 64, 64), torch.rand(8, 64, 64).round())


def packed_lstm() -> tuple[Step, Any]:
    return Step(PackedLSTM(), packed_language), (torch.randint(0, 500, (32, 64)), torch.randint(20, 65, (32,)))


def wrn() -> tuple[Step, Any]:
    batch = torch.randn(100, 3, 32, 32), torch.arange(100) % 10
    return Step(WideResNet(depth=28, width=2), classify, momentum=True), batch


SUBJECTS: dict[str, tuple[Callable[[], tuple[Step, Any]], tuple[str, ...]]] = {
    "GPT-2 (3.4M), batch 16 x 128, AdamW": (gpt2, ("0.7x", "0.4x", "0.25x")),
    "LSTM, packed sequences, batch 32 x 64, AdamW": (packed_lstm, ("0.9x", "0.4x")),
    "U-Net, batch 8 x 64 x 64, AdamW": (unet, ("0.7x", "0.4x", "0.25x")),
    "ResNet-18, batch 16 x 64 x 64, AdamW": (resnet18, ("0.7x", "0.4x")),
    "WRN-28-2, batch 100, SGD momentum": (wrn, ("0.7x", "0.4x", "0.25x")),
}


def plain_seconds(step: Step, batch: Any) -> float:
    optimizer, taken = step.configure_optimizers(), []
    for _ in range(4):
        start = time.process_time()
        optimizer.zero_grad()
        step.training_step(batch, 0).backward()
        optimizer.step()
        taken.append(time.process_time() - start)
    return min(taken)


def measure(pipe: Connection, make: Callable[[], tuple[Step, Any]], budget: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plan_training(Step(nn.Linear(4, 4), lambda model, x: model(x).sum()), torch.ones(2, 4), MemSave(budget="1GiB"))
    step, batch = make()
    row: dict[str, Any] = {"plain_cpu_seconds": plain_seconds(step, batch)}
    start = time.process_time()
    try:
        plan = plan_training(step, batch, MemSave("balanced", budget=budget))
    except ValueError as error:
        if "must be at least" not in str(error):
            raise
        row |= {"feasible": False}
    else:
        row |= {"feasible": True, "num_predictions": plan.num_predictions, "source": plan.source}
        row |= {"plan": ", ".join(each.setting for each in plan.steps), "budget_bytes": plan.budget_bytes}
        row |= {"predicted_bytes": plan.needed_bytes}
    pipe.send(row | {"plan_cpu_seconds": time.process_time() - start})


def main() -> None:
    for name, (make, budgets) in SUBJECTS.items():
        for budget in budgets:
            ours, theirs = get_context("spawn").Pipe()
            process = get_context("spawn").Process(target=measure, args=(theirs, make, budget))
            process.start()
            row = {"benchmark": NAME, "model": name, "setting": budget, **ours.recv(), **environment()}
            process.join()
            print(row, flush=True)
            put_row(NAME, row, KEY)


if __name__ == "__main__":
    main()
