"""Plain containers in each other: which can change, and how each is filled again with what it held."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

CONTAINERS = (list, dict, set, tuple, deque, defaultdict, Counter, OrderedDict)
"""Exact types, as others may mind being emptied."""


def nested(value: Any, most_entries: float) -> tuple[list[Any], list[Any]]:
    """Return `value` and the containers in it that can change, each once: small ones, and others.

    Args:
        value: anything.
        most_entries: of a small one; others are larger, or lie behind too many others.

    >>> nested({"losses": [1], "shape": (2, 3)}, 4096)
    ([{'losses': [1], 'shape': (2, 3)}, [1]], [])
    """
    small: list[Any] = []
    large: list[Any] = []
    todo, seen, num_left = [value], set[int](), 16 * most_entries
    while todo:
        each = todo.pop()
        if type(each) not in CONTAINERS or id(each) in seen:
            continue
        seen.add(id(each))
        num_left -= len(each)
        is_small = len(each) <= most_entries and num_left >= 0
        if type(each) is not tuple:
            (small if is_small else large).append(each)
        if is_small:
            todo.extend(values(each))
    return small, large


def values(container: Any) -> Iterable[Any]:
    """Return what a container holds."""
    return container.values() if isinstance(container, dict) else container


def refill(container: Any, before: Any) -> None:
    """Let a container hold what a copy of it holds, in place."""
    if isinstance(container, list):
        container[:] = before
        return
    container.clear()
    (container.extend if isinstance(container, deque) else container.update)(before)
