"""One step as a list of allocations and frees, and what the same step would be with another number of samples."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from lightning_memsave.core.report import CATEGORIES, Timeline
from lightning_memsave.memory.timeline import timeline


class Peak(NamedTuple):
    """The highest total of live bytes, and what it is made of."""

    peak_bytes: int
    by_category: dict[str, int]
    by_module: dict[str, int]


@dataclass(frozen=True)
class Allocations:
    """One step as an allocator sees it. Storages are numbered, those that are alive before it first."""

    held: tuple[int, ...]
    """Sizes of what is alive before."""
    changes: tuple[tuple[int, int], ...]
    """(change in bytes, number): above 0 for new memory, below for memory given back."""
    labels: tuple[tuple[str, str], ...] = ()
    """Category and module of each number."""

    def is_like(self, other: Allocations) -> bool:
        """Whether both do the same in the same order, sizes aside."""
        numbers = [[number for _, number in step.changes] for step in (self, other)]
        return len(self.held) == len(other.held) and numbers[0] == numbers[1] and self.labels == other.labels

    def peak(self) -> Peak:
        """Where the total is highest.

        >>> step = Allocations((4,), ((8, 1), (-8, 1)), (("weights", "head"), ("activations", "body")))
        >>> step.peak().peak_bytes, step.peak().by_module
        (12, {'body': 8, 'head': 4})
        """
        total = highest = sum(self.held)
        event = 0
        for number, (change, _) in enumerate(self.changes, 1):
            total += change
            if total > highest:
                highest, event = total, number
        by_category, by_module = Counter(dict.fromkeys(CATEGORIES, 0)), Counter[str]()
        for change, number in (*((size, number) for number, size in enumerate(self.held)), *self.changes[:event]):
            category, module = self.labels[number]
            by_category[category] += change
            by_module[module] += change
        return Peak(highest, dict(by_category), {name: size for name, size in by_module.most_common() if size})

    def timeline(self) -> Timeline:
        """The step as a line."""
        return timeline(
            ((size, self.labels[number][0]) for number, size in enumerate(self.held)),
            [(change, self.labels[number][0]) for change, number in self.changes],
        )


def extended(steps: Mapping[int, Allocations], wanted: int) -> Allocations | None:
    """The step with `wanted` samples: every size on the line through two steps, or on the parabola through three.

    Args:
        steps: by their numbers of samples, the fewest first.
        wanted: samples.

    Returns:
        `None` where the steps do not do the same in the same order, or a size grows faster than such a curve.

    >>> one, two, three = (Allocations((8 * n,), ((n * n, 1), (-n * n, 1)), (("data", ""),) * 2) for n in (1, 2, 3))
    >>> extended({1: one, 2: two}, 10) is None
    True
    >>> extended({1: one, 2: two, 3: three}, 10).peak().peak_bytes
    180
    """
    first, *others = steps.values()
    if not all(map(first.is_like, others)):
        return None
    nums = list(steps)
    fastest = Fraction(nums[-1], nums[0]) ** len(others)
    weights = [math.prod(Fraction(wanted - b, a - b) for b in nums if b != a) for a in nums]  # Lagrange's
    held = [*zip(*(each.held for each in steps.values()), strict=True)]
    changes = [*zip(*([size for size, _ in each.changes] for each in steps.values()), strict=True)]
    if any(abs(sizes[-1]) > fastest * abs(sizes[0]) for sizes in (*held, *changes)):
        return None
    at = [round(sum(map(operator.mul, weights, sizes))) for sizes in (*held, *changes)]
    numbers = [number for _, number in first.changes]
    return Allocations(tuple(at[: len(held)]), tuple(zip(at[len(held) :], numbers, strict=True)), first.labels)
