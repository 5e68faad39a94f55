"""Objects that a step changes: counters, schedules, buffers of experience, at every depth of an attribute.

What they hold is kept by reference and filled in again in place, so that whoever shares one (a data set, an agent)
still does. An object that cannot be written down in all its parts (an iterator, an open file) is left alone: it could
be put back in part only.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from typing import Any

from lightning_memsave.saved_tensors.object_state import ObjectState, is_object, state_of
from lightning_memsave.torch_internals.containers import refill

_CONTAINERS = (list, dict, set, deque)


class Objects:
    """What objects hold, as it is now.

    Args:
        named: them, by name. Tensors, modules, functions and optimizers are held as they are.
    """

    def __init__(self, named: Iterable[tuple[str, Any]]) -> None:
        self._states = [(name, value, state) for name, value in named if (state := state_of(value)) is not None]
        self._held: list[tuple[Any, Any]] = []  # with a copy of what it holds
        self._closed: list[tuple[Any, ObjectState]] = []  # whose parts nobody sees
        seen: set[int] = set()
        for _, value, _ in self._states:
            self._keep(value, seen)

    def _keep(self, value: Any, seen: set[int]) -> None:
        todo = [value]
        while todo:
            each = todo.pop()
            if id(each) in seen or not is_object(each):
                continue
            seen.add(id(each))
            if isinstance(each, (tuple, frozenset)):
                todo.extend(each)
                continue
            is_open = False
            if isinstance(each, _CONTAINERS):
                is_open = True
                before: Any = list(each) if isinstance(each, (list, deque)) else _plain(each)
                self._held.append((each, before))
                todo.extend(before.values() if isinstance(before, dict) else before)
            if hasattr(each, "__dict__"):
                is_open = True
                self._held.append((vars(each), dict(vars(each))))
                todo.extend(vars(each).values())
            if not is_open and (state := state_of(each)) is not None:
                self._closed.append((each, state))

    def changed(self) -> set[str]:
        """Return the names of those that hold something else now."""
        return {name for name, value, state in self._states if _has_moved(value, state)}

    def restore(self) -> dict[int, Any]:
        """Put everything back, in place where that can be done.

        Returns:
            What stands for those that cannot be changed in place, by their `id`.
        """
        twins = {id(each): twin for each, state in self._closed if (twin := _restored(each, state)) is not each}
        for container, before in self._held:
            refill(container, _with(before, twins) if twins else before)
        return twins


def _plain(container: Any) -> Any:
    return dict(container) if isinstance(container, dict) else set(container)


def _has_moved(value: Any, state: ObjectState) -> bool:
    now = state_of(value)
    return now is None or not state.equals(now)


def _restored(value: Any, state: ObjectState) -> Any:
    """Return `value` if it has this state, or an array that can be filled; else another one that has it."""
    if not _has_moved(value, state):
        return value
    twin, numpy = state.copy(state.references), sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.shape == twin.shape and value.flags.writeable:
        value[...] = twin
        return value
    return twin


def _with(before: Any, twins: dict[int, Any]) -> Any:
    if isinstance(before, dict):
        return {key: twins.get(id(value), value) for key, value in before.items()}
    return type(before)(twins.get(id(value), value) for value in before)
