"""Subjects of the benchmarks, made from scratch with a fixed seed."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from harness import Subject
from lightning_memsave import microbatches
from lightning_memsave.demo.model import WideResNet


def wide_resnet(setting: str, batch_size: int = 100, microbatch: int | None = None) -> Subject:
    """WideResNet-28-2 on 32x32 images, SGD with momentum."""
    torch.manual_seed(0)
    model = WideResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))

    def step() -> None:
        optimizer.zero_grad()
        for (images, labels), weight in microbatches(batch, size=microbatch or batch_size):
            (F.cross_entropy(model(images), labels) * weight).backward()
        optimizer.step()

    return Subject(setting, model, optimizer, batch, step)


def gpt(setting: str, optimizer_class: Any = torch.optim.AdamW, **options: Any) -> Subject:
    """A small GPT-2 (4 layers, width 256, context 128, batch 8), AdamW."""
    torch.manual_seed(0)
    shape = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 1000}
    model = GPT2LMHeadModel(GPT2Config(**shape, use_cache=False, loss_type="ForCausalLMLoss")).train()
    optimizer = optimizer_class(model.parameters(), lr=1e-3, **options)
    ids = torch.randint(0, 1000, (8, 128))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return Subject(setting, model, optimizer, ids, step)


def gradients(subject: Subject) -> list[torch.Tensor]:
    """Gradients of one step from the present weights, which are put back; random numbers are the same each time."""
    torch.manual_seed(5)
    state = {name: value.clone() for name, value in subject.model.state_dict().items()}
    subject.step()
    found = [p.grad.clone() for p in subject.model.parameters() if p.grad is not None]
    subject.model.load_state_dict(state)
    return found


def relative_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Norm of the difference over norm of the second, all tensors together."""
    difference = sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True))
    return (difference / sum(float(y.double().square().sum()) for y in b)) ** 0.5


def eval_batchnorm(model: nn.Module) -> None:
    """Freeze BatchNorm, where a comparison must be exact."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
