"""One step as a list of allocations and frees, and what the same step would be with another number of samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from lightning_memsave.core.report import CATEGORIES, Timeline
from lightning_memsave.measuring.timeline import timeline

_ROUNDING_BYTES = 64  # of bits and blocks that are rounded up


class Peak(NamedTuple):
    """The highest total of live bytes, and what it is made of."""

    peak_bytes: int
    by_category: dict[str, int]
    by_module: dict[str, int]
    by_place: dict[str, dict[str, int]]
    """Bytes by module, and there by category."""


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
        """Return whether both do the same in the same order, sizes aside."""
        numbers = [[number for _, number in step.changes] for step in (self, other)]
        return len(self.held) == len(other.held) and numbers[0] == numbers[1] and self.labels == other.labels

    def peak(self) -> Peak:
        """Return the highest total and what it is made of.

        >>> step = Allocations((4,), ((8, 1), (-8, 1)), (("weights", "head"), ("activations", "body")))
        >>> step.peak().peak_bytes, step.peak().by_module
        (12, {'body': 8, 'head': 4})
        """
        by_category, by_module = Counter(dict.fromkeys(CATEGORIES, 0)), Counter[str]()
        by_place: dict[str, Counter[str]] = {}
        for number, size in self.alive_at_peak().items():
            category, module = self.labels[number]
            by_category[category] += size
            by_module[module] += size
            by_place.setdefault(module, Counter())[category] += size
        largest_first = {name: size for name, size in by_module.most_common() if size}
        places = {name: dict(by_place[name]) for name in largest_first}
        return Peak(by_category.total(), dict(by_category), largest_first, places)

    def alive_at_peak(self) -> dict[int, int]:
        """Return the bytes of each storage when the total is highest, by its number.

        >>> Allocations((4,), ((8, 1), (-8, 1), (2, 2))).alive_at_peak()
        {0: 4, 1: 8}
        """
        total = highest = sum(self.held)
        event = 0
        for number, (change, _) in enumerate(self.changes, 1):
            total += change
            if total > highest:
                highest, event = total, number
        alive = Counter(dict(enumerate(self.held)))
        for change, number in self.changes[:event]:
            alive[number] += change
        return {number: size for number, size in alive.items() if size}

    def _made_at_peak(self) -> Counter[tuple[str, str]]:
        """Return the bytes of what the step has made and is alive at its peak, by label."""
        made = Counter[tuple[str, str]]()
        for number, size in self.alive_at_peak().items():
            if number >= len(self.held):
                made[self.labels[number]] += size
        return made

    def timeline(self) -> Timeline:
        """Return the step as a line."""
        return timeline(
            ((size, self.labels[number][0]) for number, size in enumerate(self.held)),
            [(change, self.labels[number][0]) for change, number in self.changes],
        )


def with_more_parts(step: Allocations, longer: Sequence[tuple[Allocations, int]]) -> Allocations | None:
    """Return a step of many microbatches, from those of few: each adds what is held before the step and at the peak.

    Args:
        step: of few microbatches.
        longer: the same step with one microbatch more, and how many more of this kind there are; once for each kind.

    Returns:
        `None` where the steps do not begin with the same storages, or less is held with one more.

    >>> labels = ("data", ""), ("activations", ""), *[("gradients", "")] * 4
    >>> three, four = (Allocations((n,), ((9, 1), *((2, n + 2) for n in range(n))), labels) for n in (3, 4))
    >>> with_more_parts(three, [(four, 7)]).peak().by_category
    {'weights': 0, 'gradients': 20, 'optimizer_state': 0, 'activations': 9, 'temporary': 0, 'data': 10}
    """
    num_held, labels = len(step.held), step.labels
    held, left, made = [*step.held], Counter[tuple[str, str]](), step._made_at_peak()
    for other, times in longer:
        if len(other.held) != num_held or other.labels[:num_held] != labels[:num_held]:
            return None
        held = [size + times * (more - now) for size, now, more in zip(held, step.held, other.held, strict=True)]
        for label, size in other._made_at_peak().items():
            left[label] += times * size
        for label, size in made.items():
            left[label] -= times * size
    if min([*held, *left.values()]) < 0:
        return None
    left = Counter({label: size for label, size in left.items() if size})
    changes = [
        (change, number + len(left))
        if number >= num_held
        else (-held[number] if change == -step.held[number] else change, number)
        for change, number in step.changes
    ]
    return Allocations((*held, *left.values()), tuple(changes), (*labels[:num_held], *left, *labels[num_held:]))


def extended(steps: Sequence[Allocations], wanted: Fraction) -> Allocations | None:
    """Return a step of `wanted` times as many samples: every size on the line, or the parabola, through three steps.

    Args:
        steps: of some samples, and of twice and three times as many.
        wanted: how many times as many as the first has.

    Returns:
        `None` where the steps do not do the same in the same order, or a size does not grow like that: as what the
        data select, or faster.

    >>> steps = [Allocations((8 * n,), ((99 * n * n, 1), (-99 * n * n, 1)), (("data", ""),) * 2) for n in (1, 2, 3)]
    >>> extended(steps, Fraction(10)).peak().peak_bytes
    9980
    """
    first, *others = steps
    if not all(map(first.is_like, others)):
        return None
    sizes = [*zip(*(each.held for each in steps), strict=True)]
    sizes += zip(*([size for size, _ in each.changes] for each in steps), strict=True)
    found = [_extended(each, wanted) for each in sizes]
    if None in found:
        return None
    at = [size for size in found if size is not None]
    held = len(first.held)
    numbers = [number for _, number in first.changes]
    return Allocations(tuple(at[:held]), tuple(zip(at[held:], numbers, strict=True)), first.labels)


def _extended(sizes: tuple[int, ...], wanted: Fraction) -> int | None:
    """Return a size, of those at once, twice and three times as many samples."""
    one, two, three = sizes
    bend = abs(three) - 2 * abs(two) + abs(one)
    if abs(bend) <= _ROUNDING_BYTES + abs(three) // 1000:
        return round(one + (three - one) * (wanted - 1) / 2)
    if bend < 0 or abs(three) > 9 * abs(one):
        return None
    return round(one + (two - one) * (wanted - 1) + (three - 2 * two + one) * (wanted - 1) * (wanted - 2) / 2)
