"""Subclasses of Tensor that cannot be made while somebody watches operations.

`Tensor.__new__(cls, tensor)` makes an instance by an operation of torch's. Under a dispatch mode its result is a Python
object already, of class Tensor, and torch refuses to make it one of another class (seen in 2.10 to 2.15). Other ways
(`tensor.as_subclass(cls)`, `Tensor._make_subclass`) work. Such classes are found by making one.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.torch_internals.dispatch_mode import DispatchMode

_REFUSED = "already associated to a python object"
_known: weakref.WeakKeyDictionary[type[Tensor], bool] = weakref.WeakKeyDictionary()


def made_only_unwatched() -> list[type[Tensor]]:
    """Return the subclasses of Tensor, of all that exist now, that cannot be made under a dispatch mode."""
    return [cls for cls in _subclasses(Tensor) if "__new__" in vars(cls) and _is_refused(cls)]


def _subclasses(cls: type[Tensor]) -> Iterator[type[Tensor]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def _is_refused(cls: type[Tensor]) -> bool:
    if cls not in _known:
        is_own = not cls.__module__.startswith("torch.") and "__torch_dispatch__" not in vars(cls)
        _known[cls] = is_own and _fails(cls)
    return _known[cls]


def _fails(cls: type[Tensor]) -> bool:
    """Return whether torch refuses to make one of a tensor; what else its `__new__` needs is `None`."""
    make: Any = cls.__new__
    try:
        others = [p for p in inspect.signature(make).parameters.values() if p.default is p.empty][2:]
        with torch.random.fork_rng([]), _Watching():
            make(cls, torch.zeros(2, device="cpu")[:1], *(None for p in others if p.kind is p.POSITIONAL_OR_KEYWORD))
    except Exception as error:  # of the user's class
        return _REFUSED in str(error)
    return False


class _Watching(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))
