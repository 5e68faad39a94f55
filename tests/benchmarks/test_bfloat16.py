from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.harness import bfloat16
from lightning_memsave import Ledger


@pytest.fixture(autouse=True)
def without_bfloat16_instructions(monkeypatch):
    monkeypatch.setattr(bfloat16, "has_bfloat16_instructions", lambda: False)


def train_a_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 4)).bfloat16()
    x = torch.randn(5, 3, 8, 8).bfloat16()
    with Ledger().watching(model, batch=x) as ledger:
        model(x).square().mean().backward()
    return [p.grad for p in model.parameters()], ledger.measurement.peak_bytes


def test_products_are_those_of_torch_and_so_are_tracked_bytes():
    expected, peak_bytes = train_a_step()
    with bfloat16.faster_bfloat16():
        found, peak_bytes_inside = train_a_step()
    assert peak_bytes_inside == peak_bytes
    for a, b in zip(found, expected, strict=True):
        assert a.dtype is torch.bfloat16
        assert (a - b).float().norm() <= 2**-6 * b.float().norm()  # two roundings


def test_float32_is_left_alone_and_torch_comes_back():
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    plain = nn.functional.conv2d(x, weight), x[0, 0] @ x[0, 1], nn.functional.conv2d(x.bfloat16(), weight.bfloat16())
    with bfloat16.faster_bfloat16():
        inside = nn.functional.conv2d(x, weight), x[0, 0] @ x[0, 1]
    after = nn.functional.conv2d(x.bfloat16(), weight.bfloat16())
    assert torch.equal(plain[0], inside[0])
    assert torch.equal(plain[1], inside[1])
    assert torch.equal(plain[2], after)
