"""The live bytes of one step as a short line: what a picture of the step needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_memsave.core.report import CATEGORIES, Timeline

MAX_POINTS = 256


def timeline(start: Iterable[tuple[int, str]], changes: Sequence[tuple[int, str]]) -> Timeline:
    """Return live bytes by category after some of `changes`.

    The highest total of each stretch, so that no peak is lost.

    Args:
        start: bytes and category of what is alive at the start.
        changes: bytes that come (or go, below 0) and their category, in order.

    >>> line = timeline([(5, "weights")], [(3, "data"), (2, "data"), (-5, "data")])
    >>> line.events, line.total_bytes
    ((0, 1, 2, 3), (5, 8, 10, 5))
    """
    live = dict.fromkeys(CATEGORIES, 0)
    for num_bytes, category in start:
        live[category] += num_bytes
    total = sum(live.values())
    stretch = -(-(len(changes) + 1) // MAX_POINTS)
    points = [(total, 0, tuple(live.values()))]
    for event, (num_bytes, category) in enumerate(changes, 1):
        live[category] += num_bytes
        total += num_bytes
        if event % stretch == 0:
            points.append((total, event, tuple(live.values())))
        elif total > points[-1][0]:
            points[-1] = (total, event, tuple(live.values()))
    columns = zip(*(split for _, _, split in points), strict=True)
    return Timeline(
        events=tuple(event for _, event, _ in points), by_category=dict(zip(CATEGORIES, columns, strict=True))
    )
