"""What a step may leave outside of its module: caches of functions, attributes of classes, globals of their files.

A step that is run for its shapes alone would leave fake tensors there, and later steps would take them for values; one
of a trial would leave what the run has not done.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_memsave.torch_internals.fake_tensors import is_fake

_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_memsave", "builtins", "abc")
_MANY = 100_000  # objects
_CACHE = functools._lru_cache_wrapper


@contextlib.contextmanager
def outside_kept(module: nn.Module) -> Iterator[None]:
    """Restore names as `names_kept` does, and empty caches of functions that hold fake tensors.

    What is kept elsewhere is not known; of what `gc.freeze` has put aside, only caches in the module's own files are.
    """
    own = {value for space in _spaces(module) for value in vars(space).values() if type(value) is _CACHE}
    _known.update((cache, cache.cache_info()) for cache in own)
    with names_kept(module):
        try:
            yield
        finally:
            _empty_caches_of_fakes(own)


@contextlib.contextmanager
def names_kept(module: nn.Module) -> Iterator[None]:
    """Restore `module`'s classes and the files that define them, with their dictionaries and lists, in the end."""
    spaces = [(space, _items(vars(space))) for space in _spaces(module)]
    try:
        yield
    finally:
        for space, items in spaces:
            _put_back(space, items)


_known = weakref.WeakKeyDictionary[Any, Any]()
"""Hits, misses and size of each cache when it was last looked at: it is looked at again when they have changed."""


def _empty_caches_of_fakes(own: set[Any]) -> None:
    """Empty caches; of the module's `own` files also large ones that have changed and cannot be looked through."""
    for cache in own.union(each for each in gc.get_objects() if type(each) is _CACHE):
        has_changed = cache.cache_info().currsize and cache.cache_info() != _known.get(cache)
        if has_changed and not _is_of_library(getattr(cache, "__module__", None)):
            if _holds_fakes(cache, otherwise=cache in own):
                cache.cache_clear()
            _known[cache] = cache.cache_info()


def _holds_fakes(cache: Any, otherwise: bool) -> bool:
    """Return whether a fake tensor can be reached from what the function returned; `otherwise` where that is much."""
    todo = [each for each in gc.get_referents(cache) if each is not cache.__wrapped__]
    seen = {id(each) for each in todo}
    while todo and len(seen) < _MANY:
        each = todo.pop()
        if isinstance(each, Tensor) and is_fake(each):
            return True
        found = [other for other in _reachable(each) if id(other) not in seen]
        seen.update(map(id, found))
        todo += found
    return bool(todo) and otherwise


def _reachable(each: Any) -> list[Any]:
    """Return what `each` refers to; of a function what belongs to it alone, and nothing of classes and files."""
    if isinstance(each, types.FunctionType):
        return [each.__closure__, each.__defaults__, each.__kwdefaults__, vars(each)]
    return [] if isinstance(each, (type, types.ModuleType)) else gc.get_referents(each)


def _is_of_library(name: str | None) -> bool:
    return name is None or name.partition(".")[0] in _LIBRARIES


def _spaces(module: nn.Module) -> list[Any]:
    classes = {cls for each in module.modules() for cls in type(each).__mro__ if not _is_of_library(cls.__module__)}
    files = {cls.__module__ for cls in classes}
    return [*classes, *(sys.modules[name] for name in files if name in sys.modules)]


def _items(names: Any) -> dict[str, tuple[Any, Any]]:
    """Return values by name, with a copy of the items of containers."""
    return {
        name: (value, type(value)(value) if type(value) in (dict, list) and name != "__builtins__" else None)
        for name, value in names.items()
    }


def _put_back(space: Any, items: dict[str, tuple[Any, Any]]) -> None:
    for name in set(vars(space)) - set(items):
        is_imported = isinstance(vars(space)[name], types.ModuleType)  # for good
        # What Dynamo compiles stays compiled, and reads names with underscores in the file.
        if not is_imported and not name.startswith("__"):
            delattr(space, name)
    for name, (value, copied) in items.items():
        if vars(space).get(name) is not value:
            setattr(space, name, value)
        if isinstance(copied, dict) and not _are_same([*value.items()], [*copied.items()]):
            value.clear()
            value.update(copied)
        elif isinstance(copied, list) and not _are_same(value, copied):
            value[:] = copied


def _are_same(one: list[Any], other: list[Any]) -> bool:
    """Return whether two lists hold the same objects; values are not compared, as tensors would be."""
    return len(one) == len(other) and all(
        a is b or (type(a) is tuple is type(b) and len(a) == 2 and a[0] is b[0] and a[1] is b[1])
        for a, b in zip(one, other, strict=True)
    )
