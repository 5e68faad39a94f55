"""One step as a list of allocations and frees, and what the same step would be with another number of samples."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
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

    def extended(self, more: Allocations, sizes: tuple[int, int], wanted: int) -> Allocations | None:
        """The step with `wanted` samples, every size on the line through two steps of the same allocations.

        Args:
            more: the step with `sizes[1]` samples.
            sizes: the numbers of samples of the two.
            wanted: samples.

        Returns:
            `None` where the two do not do the same in the same order.
        """
        same = len(self.held) == len(more.held) and [n for _, n in self.changes] == [n for _, n in more.changes]
        if not same or self.labels != more.labels:
            return None

        def at(one: int, two: int) -> int:
            return round(one + (two - one) * (wanted - sizes[0]) / (sizes[1] - sizes[0]))

        held = tuple(map(at, self.held, more.held))
        pairs = zip(self.changes, more.changes, strict=True)
        return Allocations(held, tuple((at(a, b), number) for (a, number), (b, _) in pairs), self.labels)

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
