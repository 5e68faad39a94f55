"""Models whose layers can be trained in part, and some that cannot."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D


class Small(nn.Module):
    """Every kind of layer, each called in the order of its definition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, groups=4, padding="same")
        self.reflected = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.dilated = nn.Conv2d(8, 12, 3, padding="same", dilation=2, bias=False)
        self.line = nn.Conv1d(12, 6, 3, stride=2, padding="valid")
        self.linear, self.of_transformers = nn.Linear(6, 10), Conv1D(7, 10)
        self.head = nn.Linear(7, 4)

    def forward(self, x):
        x = torch.tanh(self.grouped(torch.relu(self.norm(self.conv(x)))))
        x = torch.tanh(self.dilated(torch.tanh(self.reflected(x))))
        x = torch.tanh(self.line(x.flatten(2))).mT.contiguous()  # [B, T, 6]; else torch folds frozen weights otherwise
        return self.head(torch.tanh(self.of_transformers(torch.tanh(self.linear(x)))))


def small() -> Small:
    torch.manual_seed(0)
    return Small()


def convolutions() -> nn.Sequential:
    """Six convolutions and a head, as for small images."""
    torch.manual_seed(0)
    widths, layers = [1, 8, 16, 16, 32, 32, 32], []
    for number, (before, after) in enumerate(pairwise(widths)):
        layers += [nn.Conv2d(before, after, 3, 2 if number in (2, 4) else 1, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))
