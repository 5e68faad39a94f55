"""Layers, models and masked dense twins, for the tests of sparsity."""

from __future__ import annotations

from torch import nn

from lightning_memsave import Sparsity


def tiny(sparsity: float | str = 0.5, **options) -> Sparsity:
    return Sparsity(sparsity=sparsity, min_size=1, **options)


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10))
