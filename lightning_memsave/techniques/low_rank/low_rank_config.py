"""The settings of low-rank training."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.selection import Selector


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """Settings of low-rank layers.

    Raises:
        ValueError: a rank out of its range; at the start of training, a selection that matches no layer, or that asks
            for tied weights.
    """

    rank: int | float = 16
    """Columns of each factor (an integer), or the fraction of each layer's weights that both factors have together (a
    float below 1), from which each layer's rank follows."""
    modules: Selector | None = None
    """Layers: a class, a pattern (`*`, `?`) for class names or qualified names, a function of (name, module), or
    `None` for every Linear, Conv1d to Conv3d and transformers' Conv1D that takes fewer bytes so."""

    def __post_init__(self) -> None:
        is_rank = type(self.rank) is int and self.rank > 0
        if not is_rank and not (type(self.rank) is float and 0 < self.rank < 1):
            raise setting_error(
                "low_rank",
                "must be a positive rank, or a fraction of the weights between 0 and 1",
                self.rank,
                "`low_rank=16`, or `low_rank=0.2` for a fifth of each layer's weights.",
            )

    @classmethod
    def from_shorthand(cls, value: object) -> LowRank:
        """`low_rank=16` is `LowRank(rank=16)`; `0.2` likewise."""
        return cls(rank=value)  # type: ignore[arg-type]  # checked in __post_init__

    def rank_of(self, shape: torch.Size) -> int:
        """Return the rank of a layer whose weight has this shape; 0 where the fraction leaves none.

        >>> LowRank(rank=0.5).rank_of(torch.Size([64, 64])), LowRank(rank=0.5).rank_of(torch.Size([32, 16, 3, 3]))
        (16, 13)
        """
        if isinstance(self.rank, int):
            return self.rank
        return int(self.rank * shape.numel() / sum(sides_of(shape)))


def sides_of(shape: torch.Size) -> tuple[int, int]:
    """Return rows and columns of a weight as a matrix: its first dimension, and all others together."""
    return shape[0], shape.numel() // max(1, shape[0])
