"""Gradients freed before the forward pass instead of after it: a small GPT-2, and WideResNet-28-2."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.harness.measurement import Subject, compare
from benchmarks.models.subjects import gpt, relative_difference, wide_resnet


def in_lightnings_order(subject: Subject, early: bool) -> Subject:
    """training_step, zero_grad, backward, step; or zero_grad first."""
    model, optimizer, batch = subject.model, subject.optimizer, subject.batch

    def loss() -> torch.Tensor:
        if isinstance(batch, tuple):
            return F.cross_entropy(model(batch[0]), batch[1])
        return model(input_ids=batch, labels=batch).loss

    def step() -> None:
        if early:
            optimizer.zero_grad()
        value = loss()
        if not early:
            optimizer.zero_grad()
        value.backward()
        optimizer.step()

    subject.step = step
    return subject


def quality_against(make):
    def quality(subject):
        ends = []
        for early in (subject.setting == "early", False):
            torch.manual_seed(3)
            twin = in_lightnings_order(make("twin"), early)
            torch.manual_seed(4)
            for _ in range(3):
                twin.step()
            ends.append([p.detach() for p in twin.model.parameters()])
        return "relative parameter difference after 3 steps", relative_difference(*ends)

    return quality


if __name__ == "__main__":
    for name, make, model in (
        ("early_zero_grad", gpt, "GPT-2, 4 layers, width 256, batch 8 x 128, AdamW"),
        ("early_zero_grad_wrn", wide_resnet, "WideResNet-28-2, batch 100, SGD momentum"),
    ):
        subjects = [in_lightnings_order(make("Lightning's order"), False), in_lightnings_order(make("early"), True)]
        compare(name, model, subjects, quality_against(make))
