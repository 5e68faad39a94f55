"""Transformer blocks in which every sample, and in MLPs every position, is independent of the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

D = 16


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.down(self.dropout(F.gelu(self.up(x)))))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, dropout, batch_first=True)
        self.norm1, self.norm2, self.mlp = nn.LayerNorm(D), nn.LayerNorm(D), MLP(dropout)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(dropout), Block(dropout))
        self.head = nn.Linear(D, D)

    def forward(self, x):
        return self.head(self.blocks(x))


def net(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Net(dropout).to(dtype)


def step(model, x, *, autocast=False):
    """The output, all gradients, and the next number of the generator."""
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(x)
    output.double().square().mean().backward()
    named = {name: p.grad for name, p in model.named_parameters()}
    return {"output": output.detach(), "input": x.grad, **named, "next number": torch.rand(())}


def assert_alike(found, expected, rtol=1e-12, atol=1e-15):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(found[name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def batch(dtype=torch.float64, num_samples=9):
    return torch.randn(num_samples, 20, D, generator=torch.Generator().manual_seed(2)).to(dtype)
