"""How a loss depends on its batch: a mean over samples, a sum, or neither.

A mean must be weighted by the share of samples when a batch is cut, a sum must not. A loss that relates samples to each
other (in-batch negatives) or averages over something else than samples (unpadded tokens) is neither, and cutting it
would change what is optimised. Evaluating some samples whole and in uneven parts tells which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

Reduction = Literal["mean", "sum"]
Finding = Literal["mean", "sum", "either", "neither"]


def infer_reduction(
    loss_of: Callable[[Any], float], whole: Any, parts: Sequence[tuple[Any, float]], relative_tolerance: float
) -> Finding:
    """Compare the loss of a batch with the losses of its parts.

    Args:
        loss_of: the loss of a batch; must not depend on chance or on earlier calls.
        whole: a batch.
        parts: the same samples in two or more parts of uneven sizes, each with its size.
        relative_tolerance: how far two ways to the same loss may differ.

    Returns:
        `"either"` when both rules hold, as for a loss of zero.

    >>> samples = [1.0, 2.0, 6.0]
    >>> infer_reduction(lambda xs: sum(xs) / len(xs), samples, [(samples[:1], 1), (samples[1:], 2)], 1e-9)
    'mean'
    """
    expected = loss_of(whole)
    losses = [loss_of(part) for part, _ in parts]
    sizes = [n for _, n in parts]
    tolerance = relative_tolerance * max(abs(expected), *map(abs, losses), 1e-30)
    mean = sum(loss * n for loss, n in zip(losses, sizes, strict=True)) / sum(sizes)
    is_mean, is_sum = abs(expected - mean) <= tolerance, abs(expected - sum(losses)) <= tolerance
    if is_mean and is_sum:
        return "either"
    if is_mean:
        return "mean"
    return "sum" if is_sum else "neither"
