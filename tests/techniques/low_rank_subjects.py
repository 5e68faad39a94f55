"""A model whose layers can be of low rank, and some that cannot."""

from __future__ import annotations

import torch
from torch import nn


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.grouped = nn.Conv2d(32, 32, 3, groups=4, padding=1)
        self.reflected = nn.Conv2d(32, 32, 3, padding=1, padding_mode="reflect")
        self.pointwise = nn.Conv2d(32, 64, 1, bias=False)
        self.linear, self.last = nn.Linear(64, 32), nn.Linear(32, 10)
        self.narrow = nn.Linear(10, 4)

    def forward(self, x):
        x = self.pointwise(torch.tanh(self.reflected(self.grouped(torch.tanh(self.conv(x))))))
        return self.narrow(torch.tanh(self.last(torch.tanh(self.linear(torch.tanh(x.mean((2, 3))))))))


def small() -> Small:
    return Small()
