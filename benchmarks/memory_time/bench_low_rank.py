"""Low-rank layers beside dense and sparse ones: bytes and time of a step. What they reach: `quality_low_rank.py`."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.measurement import Subject, measured_rows, write_rows
from benchmarks.memory_time.bench_sparsity import held_bytes
from benchmarks.models.subjects import next_token_loss, plain_gpt, wide_resnet
from lightning_memsave import LowRank, Sparsity, apply_low_rank, apply_sparsity, export_dense

QUALITY = "largest difference of a gradient from that of dense layers with the products as weights, float64, relative"


def changed(subject: Subject, setting: str) -> None:
    """Change the layers of a subject as its setting says."""
    kind, _, value = setting.partition(" ")
    if kind == "rank":
        apply_low_rank(subject.model, LowRank(rank=float(value) if "." in value else int(value)))
    elif kind == "sparse":
        apply_sparsity(subject.model, Sparsity(sparsity=float(value), min_size=1))


def resnet_subject(setting: str) -> Subject:
    subject = wide_resnet(setting, 20)
    changed(subject, setting)
    model, (images, labels) = subject.model, subject.batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return with_steps(subject, optimizer, lambda: F.cross_entropy(model(images), labels))


def gpt_subject(setting: str) -> Subject:
    subject = plain_gpt(setting, batch_size=2, context=64, dropout=0.0)
    changed(subject, setting)
    model, ids = subject.model, subject.batch
    return with_steps(subject, torch.optim.AdamW(model.parameters(), lr=1e-3), lambda: next_token_loss(model(ids), ids))


def with_steps(subject: Subject, optimizer: torch.optim.Optimizer, loss) -> Subject:
    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return Subject(subject.setting, subject.model, optimizer, subject.batch, step, loss)


def largest_difference(subject: Subject) -> tuple[str, float]:
    """One backward pass against the same weights in dense layers, by the gradients of what did not change."""
    if not subject.setting.startswith("rank"):
        return QUALITY, 0.0
    factored = copy.deepcopy(subject.model).double()
    dense = export_dense(copy.deepcopy(factored))

    def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
        model.zero_grad()
        if isinstance(ids := subject.batch, Tensor):
            next_token_loss(model(ids), ids).backward()
        else:
            F.cross_entropy(model(subject.batch[0].double()), subject.batch[1]).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    ours, theirs = gradients(factored), gradients(dense)
    shared = [name for name in ours if name in theirs]
    return QUALITY, max(float((ours[n] - theirs[n]).norm() / theirs[n].norm().clamp_min(1e-12)) for n in shared)


def main() -> None:
    rows = []
    for name, make, settings in (
        ("WideResNet-28-2, batch 20, SGD momentum", resnet_subject, ("dense", "rank 16", "rank 0.1", "sparse 0.9")),
        (
            "GPT of plain modules, 6 layers, width 256, batch 2 x 64, AdamW",
            gpt_subject,
            ("dense", "rank 16", "rank 0.2", "sparse 0.8"),
        ),
    ):
        subjects = [make(setting) for setting in settings]
        rows += measured_rows("low_rank", name, subjects, largest_difference, held_bytes, repeats=5)
    write_rows("low_rank", rows)


if __name__ == "__main__":
    main()
