"""Stacks of blocks, for the tests of checkpointing."""

from __future__ import annotations

import torch
from torch import nn

from lightning_memsave import Checkpointing

BLOCKS = Checkpointing()


class Block(nn.Module):
    def __init__(self, width: int = 8, p: float = 0.0, inplace: bool = False, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(width, momentum=momentum), nn.Linear(width, width)
        self.act, self.drop = nn.ReLU(inplace=inplace), nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.linear(self.act(self.norm(x))))


def stack(**options) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Sequential(*(Block(**options) for _ in range(3))), nn.Linear(8, 4))


def scripted(block):
    return torch.jit.script(block)
