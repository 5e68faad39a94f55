"""How a loss depends on its batch: a mean over samples, a sum, a mean over labels, or none of these.

A mean must be weighted by the share of samples when a batch is cut, a sum must not, and a mean over unpadded tokens is
weighted by their number. A loss that relates samples to each other (in-batch negatives) is none of these, and cutting
it would change what is optimised. Evaluating some samples whole and in uneven parts tells which rule holds.

Losses that are nearly equal tell nothing: any weights average them to the same. A finding counts only where the losses
of the parts lie further apart than rounding reaches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Reduction = Literal["mean", "sum"]

_CLEARLY = 10.0
"""Factor by which losses of parts must differ more than rounding, so that weights that are 10 % off are seen."""
_COARSE_SHARE = 0.03
"""Fraction of the difference between the parts' losses that 16 bits are allowed to be off."""
_COARSE_SPREAD = 1e-3
_COARSE = 2e-3
"""Fraction of the loss itself: the same."""


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
    """Place of the labels in the batch: a key of a mapping, an attribute, or a position in a tuple."""
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


@dataclass(frozen=True)
class ReductionRule:
    """How the losses of microbatches add up to the loss of their batch.

    Args:
        reduction: whether they average to it or add up.
        weight_fn: the weight of a microbatch in a mean; `None`: its number of samples.

    >>> str(ReductionRule("mean")), str(ReductionRule("mean", LabelCount(shifted=True)))
    ('mean over samples', 'mean over `LabelCount(shifted=True)`')
    """

    reduction: Reduction
    weight_fn: Callable[[Any], float] | None = None

    def weights(self, parts: Sequence[tuple[Any, float]]) -> list[float]:
        """Return what each microbatch's loss is multiplied by; one without weight has no loss that means anything.

        Args:
            parts: microbatches, each with its number of samples.
        """
        if len(parts) == 1 or self.reduction == "sum":
            return [1.0] * len(parts)
        shares = [float(n) if self.weight_fn is None else float(self.weight_fn(part)) for part, n in parts]
        total = sum(shares)
        return [share / total for share in shares] if total else [1 / len(parts)] * len(parts)

    def __str__(self) -> str:
        if self.reduction == "sum":
            return "sum"
        if not isinstance(self.weight_fn, LabelCount):
            return "mean over samples" if self.weight_fn is None else "mean with `weight_fn`"
        fields = dataclasses.fields(self.weight_fn)
        given = [f"{f.name}={v!r}" for f in fields if (v := getattr(self.weight_fn, f.name)) != f.default]
        return f"mean over `LabelCount({', '.join(given)})`"


_OF_LABELS = (torch.int64, torch.int32, torch.bool)


def rules_for(batch: Any, ignored: Iterable[int] = ()) -> list[ReductionRule]:
    """Return the rules that a batch allows: means over samples, labels or unmasked tokens, and a sum.

    Args:
        batch: its own tensors, not those of containers inside, may be labels or masks.
        ignored: values of labels that do not count, besides -100.

    >>> batch = {"x": torch.zeros(2, 3), "labels": torch.tensor([[1, -100, 3], [4, 5, 6]])}
    >>> [str(rule) for rule in rules_for(batch)][2:]
    ['mean over `LabelCount()`', 'mean over `LabelCount(shifted=True)`']
    """
    counts: list[LabelCount] = []
    for key, value in _entries(batch):
        if not isinstance(value, Tensor) or value.dim() == 0 or value.dtype not in _OF_LABELS:
            continue
        is_mask = value.dtype is torch.bool or (isinstance(key, str) and "mask" in key)
        values = [0] if is_mask else [v for v in {-100, *ignored} if value.dim() > 1 or bool((value == v).any())]
        if isinstance(key, str) and "ids" in key and not is_mask:  # what a model reads, unless it marks what to ignore
            values = [v for v in values if v == -100 and bool((value == v).any())]
        shifts = (False, True) if value.dim() > 1 else (False,)
        counts += [LabelCount(key=key, ignore_index=v, shifted=shifted) for v in values for shifted in shifts]
    counts.sort(key=lambda count: count.ignore_index == 0)  # labels before masks
    return [ReductionRule("mean"), ReductionRule("sum"), *(ReductionRule("mean", count) for count in counts)]


def _entries(batch: Any) -> Iterable[tuple[str | int, Any]]:
    if isinstance(batch, Mapping):
        return [(key, value) for key, value in batch.items() if isinstance(key, (str, int))]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [(f.name, getattr(batch, f.name)) for f in dataclasses.fields(batch)]
    return enumerate(batch) if isinstance(batch, (list, tuple)) else ()


@dataclass(frozen=True)
class Losses:
    """The loss of a batch and those of its parts.

    Args:
        whole: of the batch.
        parts: of each part that has one.
        tolerance: how far two ways to the same loss may differ, relative; `None` for losses of 16 bits.
    """

    whole: float
    parts: tuple[float, ...]
    tolerance: float | None

    @property
    def size(self) -> float:
        """The largest magnitude among them."""
        return max(abs(self.whole), *map(abs, self.parts), 1e-30)

    @property
    def _spread(self) -> float:
        return max(self.parts) - min(self.parts)

    @property
    def _rounding(self) -> float:
        if self.tolerance is not None:
            return self.tolerance * self.size
        return min(_COARSE_SHARE * self._spread, _COARSE * self.size)

    @property
    def are_finite(self) -> bool:
        """Whether they mean anything."""
        return math.isfinite(self.whole) and bool(self.parts) and all(map(math.isfinite, self.parts))

    @property
    def lie_apart(self) -> bool:
        """Whether the parts differ clearly, so that wrong weights are seen."""
        limit = _CLEARLY * self._rounding if self.tolerance is not None else _COARSE_SPREAD * self.size
        return self._spread > limit

    def off_mean(self, shares: Sequence[float]) -> float:
        """Return how far the whole is from the average of the parts, weighted by `shares`."""
        total = sum(shares)
        mean = sum(loss * share for loss, share in zip(self.parts, shares, strict=True)) / total if total else math.nan
        return abs(self.whole - mean)

    def fit_mean(self, shares: Sequence[float]) -> bool:
        """Return whether the parts average to the whole."""
        return self.off_mean(shares) <= self._rounding

    def fit_sum(self) -> bool:
        """Return whether the parts add up to the whole."""
        rounding = _COARSE * self.size if self.tolerance is None else self._rounding
        return abs(self.whole - sum(self.parts)) <= rounding

    def fit(self, rule: ReductionRule, shares: Sequence[float]) -> bool:
        """Return whether a rule holds; nothing speaks against one that weighs nothing here."""
        return self.fit_sum() if rule.reduction == "sum" else not sum(shares) or self.fit_mean(shares)

    def best(
        self, rules: Sequence[ReductionRule], shares: Callable[[ReductionRule], Sequence[float]]
    ) -> list[ReductionRule]:
        """Return the means that fit.

        Of 16-bit losses those that fit best: others may be as far off as rounding is allowed.
        """
        off = {rule: self.off_mean(shares(rule)) for rule in rules if rule.reduction == "mean"}
        fitting = {rule: distance for rule, distance in off.items() if distance <= self._rounding}
        limit = max(_CLEARLY * min(fitting.values(), default=0.0), 1e-6 * self.size)
        return [rule for rule, distance in fitting.items() if self.tolerance is not None or distance <= limit]
