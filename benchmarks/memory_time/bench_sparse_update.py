"""A sparse update beside full training: bytes and time of a step. What it reaches: `quality_sparse_update.py`."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.measurement import Subject, measured_rows, write_rows
from benchmarks.memory_time.bench_sparsity import held_bytes
from benchmarks.models.subjects import next_token_loss, plain_gpt, wide_resnet
from lightning_memsave import SparseUpdate, apply_sparse_update, export_dense, plan_sparse_update
from lightning_memsave.techniques.sparse_update import partial_layers

QUALITY = "largest difference of a trained gradient from that of full training, float64, relative"
SETTINGS = ("full", "budget 0.05", "budget 0.1", "budget 0.2", "budget 0.4")


def loss_of(model: torch.nn.Module, batch) -> Tensor:
    if isinstance(batch, Tensor):
        return next_token_loss(model(batch), batch)
    images, labels = batch
    return F.cross_entropy(model(images.to(next(model.parameters()).dtype)), labels)


def planned(subject: Subject, state_bytes: int) -> None:
    """Freeze the model of a subject as its setting says."""
    kind, _, value = subject.setting.partition(" ")
    if kind == "budget":
        config, losses = SparseUpdate(budget=float(value)), [lambda: loss_of(subject.model, subject.batch)]
        apply_sparse_update(subject.model, plan_sparse_update(subject.model, losses, config, state_bytes=state_bytes))


def resnet_subject(setting: str) -> Subject:
    subject = wide_resnet(setting, 20)
    planned(subject, 4)
    return with_steps(subject, torch.optim.SGD(subject.model.parameters(), lr=0.01, momentum=0.9))


def gpt_subject(setting: str) -> Subject:
    subject = plain_gpt(setting, batch_size=2, context=64, dropout=0.0)
    planned(subject, 8)
    return with_steps(subject, torch.optim.AdamW(subject.model.parameters(), lr=1e-3))


def with_steps(subject: Subject, optimizer: torch.optim.Optimizer) -> Subject:
    def loss() -> Tensor:
        return loss_of(subject.model, subject.batch)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return Subject(subject.setting, subject.model, optimizer, subject.batch, step, loss)


def largest_difference(subject: Subject) -> tuple[str, float]:
    """One backward pass against the same weights where all are trained."""
    if subject.setting == "full":
        return QUALITY, 0.0
    partly = copy.deepcopy(subject.model).double()
    full = export_dense(copy.deepcopy(partly)).requires_grad_(True)
    for model in (partly, full):
        model.zero_grad()
        loss_of(model, subject.batch).backward()
    layers, theirs = partial_layers(partly), dict(full.named_parameters())
    pairs = [(layer.values.grad, layer.layout.compact(theirs[f"{name}.weight"].grad)) for name, layer in layers.items()]
    pairs += [(p.grad, theirs[n].grad) for n, p in partly.named_parameters() if n in theirs and p.grad is not None]
    return QUALITY, max(float((ours - other).norm() / other.norm().clamp_min(1e-12)) for ours, other in pairs)


def main() -> None:
    rows = []
    for name, make in (
        ("WideResNet-28-2, batch 20, SGD momentum", resnet_subject),
        ("GPT of plain modules, 6 layers, width 256, batch 2 x 64, AdamW", gpt_subject),
    ):
        subjects = [make(setting) for setting in SETTINGS]
        rows += measured_rows("sparse_update", name, subjects, largest_difference, held_bytes, repeats=5)
    write_rows("sparse_update", rows)


if __name__ == "__main__":
    main()
