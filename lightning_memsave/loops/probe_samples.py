"""Samples of a batch that a LightningModule is asked about: which, and in which parts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from lightning_memsave.lightning_compat import Batch
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.microbatching.reduction import ReductionRule, rules_for
from lightning_memsave.techniques.microbatching.split import pick, take

FEWEST_SAMPLES = 5
"""Number of samples whose losses are compared: a part of two and one of three."""
_MOST_COUNTED = 128  # samples whose labels are counted one by one
_MOST_GROUPS = 32  # of samples that are looked at at once


class Subject(NamedTuple):
    """Samples of a batch, whole and in parts with their numbers of samples."""

    whole: Any
    parts: list[tuple[Any, float]]

    @classmethod
    def of(cls, batch: Batch, num_samples: int, config: Microbatching, fewest: int) -> Subject:
        """Return a batch in the parts of `split_fn`, or a microbatch's number of samples, or the fewest, in two."""
        if config.split_fn is not None:
            return cls(batch, config.parts(batch))
        assert config.size != "auto", "who cuts knows the size"
        num_used = min(num_samples, max(fewest, config.size))
        rules = rules_for(batch) if config.weight_fn is None else []
        rows = _spread(_telling(batch, num_samples, rules)[: num_used // 2], num_used, num_samples)
        whole = pick(batch, rows, num_samples)
        cut = max(2 if num_used >= FEWEST_SAMPLES else 1, num_used // 3)
        spans = ((0, cut), (cut, num_used))
        return cls(whole, [(take(whole, first, last, num_used), last - first) for first, last in spans])

    @classmethod
    def all_of(cls, batch: Batch, num_samples: int, config: Microbatching) -> Iterator[Subject]:
        """Yield all samples of a batch in their order, as many at a time as `of` takes, each time in two parts."""
        assert config.size != "auto", "who cuts knows the size"
        num_used = max(FEWEST_SAMPLES, config.size)
        starts = range(0, num_samples - 1, num_used)
        for number in _spread([], min(len(starts), _MOST_GROUPS), len(starts)):
            start, stop = starts[number], min(num_samples, starts[number] + num_used)
            middle = start + max(1, (stop - start) // 3)
            spans = (start, middle), (middle, stop)
            parts: list[tuple[Any, float]] = [(take(batch, a, b, num_samples), b - a) for a, b in spans]
            yield cls(take(batch, start, stop, num_samples), parts)

    def weights(self, rule: ReductionRule) -> list[float]:
        """Return the weights of the parts, which need not add up to 1."""
        return [n if rule.weight_fn is None else float(rule.weight_fn(part)) for part, n in self.parts]


def _telling(batch: Batch, num_samples: int, rules: list[ReductionRule]) -> list[int]:
    """Return samples to which two rules give the most different shares, for each of the rules that count labels."""
    few = range(min(num_samples, _MOST_COUNTED))
    counts = {
        rule: [float(rule.weight_fn(take(batch, i, i + 1, num_samples))) for i in few]
        for rule in rules
        if rule.weight_fn is not None
    }
    shares = [[count / (sum(each) or 1.0) for count in each] for each in ([1.0] * len(few), *counts.values())]
    found = [
        max(few, key=lambda i, one=one, other=other: abs(one[i] - other[i]))  # type: ignore[misc]
        for one, other in itertools.combinations(shares, 2)
        if one != other
    ]
    return list(dict.fromkeys(found))


def _spread(first: list[int], num_used: int, num_samples: int) -> list[int]:
    """Return rows of a batch: these, and others from its whole length."""
    spread = (round(i * (num_samples - 1) / max(1, num_used - 1)) for i in range(num_used))
    return list(itertools.islice(dict.fromkeys((*first, *spread, *range(num_samples))), num_used))
