"""How a loss depends on its batch: a mean over samples, a sum, or neither.

A mean must be weighted by the share of samples when a batch is cut, a sum must not. A loss that relates samples to each
other (in-batch negatives) or averages over something else than samples (unpadded tokens) is neither, and cutting it
would change what is optimised. Evaluating some samples whole and in uneven parts tells which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

Reduction = Literal["mean", "sum"]
Finding = Literal["mean", "sum", "either", "neither"]


@dataclass(frozen=True, kw_only=True)
class LabelCount:
    """The number of labels that count in a batch: the weight of a microbatch when the loss is a mean over tokens.

    For `Microbatching(weight_fn=LabelCount())`. Weighting by samples instead gives tokens in short samples too much
    (https://github.com/huggingface/transformers/issues/24725).

    Example:
        >>> import torch
        >>> labels = torch.tensor([[5, 2, -100], [-100, 7, 7]])
        >>> LabelCount()({"labels": labels}), LabelCount(shifted=True)({"labels": labels})
        (4.0, 3.0)
    """

    key: str | int = "labels"
    """Where the labels are in the batch: a key of a mapping, an attribute, or a position in a tuple."""
    ignore_index: int = -100
    """Labels with this value do not count (torch's and transformers' convention)."""
    shifted: bool = False
    """Whether the model drops each sample's first label (next-token prediction), as transformers' causal models."""

    def __call__(self, batch: Any) -> float:
        """Count."""
        is_attribute = isinstance(self.key, str) and not hasattr(batch, "__getitem__")
        labels: Tensor = getattr(batch, str(self.key)) if is_attribute else batch[self.key]
        if self.shifted:
            labels = labels[..., 1:]  # [B, T - 1]
        return float((labels != self.ignore_index).sum())


def infer_reduction(
    loss_of: Callable[[Any], float], whole: Any, parts: Sequence[tuple[Any, float]], relative_tolerance: float
) -> Finding:
    """Compare the loss of a batch with the losses of its parts.

    Args:
        loss_of: the loss of a batch; must not depend on chance or on earlier calls.
        whole: a batch.
        parts: the same samples in two or more parts of uneven sizes, each with its size; one of size 0 has no loss.
        relative_tolerance: how far two ways to the same loss may differ.

    Returns:
        `"either"` when both rules hold, as for a loss of zero, or one that is not finite.

    >>> samples = [1.0, 2.0, 6.0]
    >>> infer_reduction(lambda xs: sum(xs) / len(xs), samples, [(samples[:1], 1), (samples[1:], 2)], 1e-9)
    'mean'
    """
    expected = loss_of(whole)
    losses, sizes = [loss_of(part) for part, n in parts if n], [n for _, n in parts if n]
    if not math.isfinite(expected) or not sizes:
        return "either"
    tolerance = relative_tolerance * max(abs(expected), *map(abs, losses), 1e-30)
    mean = sum(loss * n for loss, n in zip(losses, sizes, strict=True)) / sum(sizes)
    is_mean, is_sum = abs(expected - mean) <= tolerance, abs(expected - sum(losses)) <= tolerance
    if is_mean and is_sum:
        return "either"
    if is_mean:
        return "mean"
    return "sum" if is_sum else "neither"
