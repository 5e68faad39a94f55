"""Objects that a step changes: counters, schedules, buffers of experience, at every depth of an attribute.

What they hold is kept by reference and filled in again in place, so that whoever shares one (a data set, an agent)
still does. An object that cannot be written down in all its parts (an iterator, an open file) is left alone, as it
could be put back in part only. Tensors that objects hold are not copied: edits of them are told.
"""

from __future__ import annotations

import copyreg
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_memsave.saved_tensors.object_state import ObjectState, is_held, is_object, state_of
from lightning_memsave.torch_internals.autograd_graph import version_of
from lightning_memsave.torch_internals.containers import CONTAINERS

_MOST_ENTRIES = 2**12
"""Entries of a container that is copied; a larger one that has another length afterwards is told."""


class Objects:
    """What attributes of modules hold, as it is now.

    Args:
        attributes: modules, with the names of their attributes and the values of these.
        are_known: whether they are known to hold what can be put back; else that is found out, and `changed` can tell.
    """

    def __init__(self, attributes: Iterable[tuple[nn.Module, str, Any]], *, are_known: bool = False) -> None:
        named = ((m, name, value, None if are_known else _state_of(value)) for m, name, value in attributes)
        self._states = [each for each in named if are_known or each[-1] is not None]
        self._parts: list[_Part] = []
        self._closed: list[tuple[Any, ObjectState]] = []  # whose parts nobody sees
        self._large: list[tuple[str, Any, int]] = []
        self._tensors: list[tuple[str, Tensor, int]] = []
        seen: set[int] = set()
        for _, name, value, _ in self._states:
            self._keep(name, value, seen)

    def _keep(self, name: str, value: Any, seen: set[int]) -> None:
        todo = [value]
        while todo:
            each = todo.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            if isinstance(each, Tensor):
                self._tensors.append((name, each, version_of(each)))
            elif is_object(each) and not is_held(each):
                parts = list(_parts_of(each))
                self._parts += [part for part in parts if not part.is_large]
                self._large += [(name, each, len(each)) for part in parts if part.is_large]
                todo += [inner for part in parts if not part.is_large for inner in part.values()]
                if not parts and isinstance(each, (tuple, frozenset)):
                    todo.extend(each)
                elif not parts and (state := state_of(each)) is not None:
                    self._closed.append((each, state))

    def changed(self) -> set[str]:
        """Return what names attributes that hold something else now: `id(module)` and their own name."""
        found = set()
        for module, name, value, state in self._states:
            if vars(module).get(name) is not value or (state is not None and _has_moved(value, state)):
                found.add(key_of(module, name))
        return found

    def not_kept(self) -> list[str]:
        """Return the names of attributes with tensors that were edited, or containers too large to copy that grew."""
        edited = [name for name, tensor, version in self._tensors if version_of(tensor) != version]
        return list(dict.fromkeys([*edited, *(name for name, each, length in self._large if len(each) != length)]))

    def restore(self) -> None:
        """Put everything back, in place where that can be done."""
        twins = {id(each): twin for each, state in self._closed if (twin := _restored(each, state)) is not each}
        for part in self._parts:
            part.restore(twins)
        for module, name, value, _ in self._states:
            if vars(module).get(name) is not (before := twins.get(id(value), value)):
                vars(module)[name] = before


def key_of(module: nn.Module, name: str) -> str:
    """Return what names an attribute in a run."""
    return f"{id(module)}.{name}"


def _state_of(value: Any) -> ObjectState | None:
    """Return the state of an object, or of a plain container with objects in it; `None` for anything else."""
    return state_of(value) if type(value) not in CONTAINERS or _holds_objects(value) else None


def _holds_objects(container: Any) -> bool:
    todo, num_left = [container], _MOST_ENTRIES
    while todo and num_left > 0:
        each = todo.pop()
        if type(each) in CONTAINERS:
            num_left -= len(each)
            todo.extend(each.values() if isinstance(each, dict) else each)
        elif is_object(each) and not is_held(each):
            return True
    return False


class _Part:
    """What one object holds in one of its ways, and a copy of that."""

    def __init__(self, held: Any, before: Any) -> None:
        self._held, self._before = held, before
        self.is_large = before is None

    def values(self) -> Iterable[Any]:
        return self._before.values() if isinstance(self._before, dict) else self._before

    def restore(self, twins: dict[int, Any]) -> None:
        before = self._before
        if isinstance(before, dict):
            now = self._now()
            wanted = {key: twins.get(id(value), value) for key, value in before.items()}
            if list(now) != list(wanted) or any(now[key] is not value for key, value in wanted.items()):
                self._fill(wanted)
            return
        held, entries = list(self._held), [twins.get(id(value), value) for value in before]
        if len(held) != len(entries) or any(a is not b for a, b in zip(held, entries, strict=True)):
            self._fill(entries)

    def _now(self) -> dict[Any, Any]:
        return dict(dict.items(self._held))

    def _fill(self, wanted: Any) -> None:
        held = self._held  # by the methods of the base, as a subclass may forbid changes
        if isinstance(held, dict):
            dict.clear(held)
            dict.update(held, wanted)
        elif isinstance(held, list):
            list.__setitem__(held, slice(None), wanted)
        else:
            kind: Any = deque if isinstance(held, deque) else set
            kind.clear(held)
            (kind.extend if kind is deque else kind.update)(held, wanted)


class _Slots(_Part):
    """Attributes of an object that has places for them instead of a dictionary."""

    def __init__(self, held: Any, names: list[str]) -> None:
        self._names = names
        super().__init__(held, None)
        self._before, self.is_large = self._now(), False

    def _now(self) -> dict[Any, Any]:
        return {name: getattr(self._held, name) for name in self._names if hasattr(self._held, name)}

    def _fill(self, wanted: Any) -> None:
        for name, value in wanted.items():
            object.__setattr__(self._held, name, value)


def _parts_of(value: Any) -> Iterator[_Part]:
    if isinstance(value, (list, dict, set, deque)):
        small = len(value) <= _MOST_ENTRIES
        yield _Part(value, (dict(dict.items(value)) if isinstance(value, dict) else list(value)) if small else None)
    if hasattr(value, "__dict__"):
        yield _Part(vars(value), dict(vars(value)))
    if names := copyreg._slotnames(type(value)):  # type: ignore[attr-defined]  # as pickling asks
        yield _Slots(value, names)


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
