"""The state of plain objects: what pickling looks at, with tensors, modules and functions by reference.

A region that is given an object (a dataclass, a cache of keys and values, an iterator) is repeated with one in the
state that it had; whether a module has changed an object that it holds is told by comparing states.
"""

from __future__ import annotations

import io
import logging
import pickle
import sys
import threading
import types
import weakref
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.saved_tensors.randomness import is_generator, is_of_a_library
from lightning_memsave.torch_internals.autograd_graph import version_of

_MOST_BYTES = 2**24
_MOST_COMPARED = 2**12
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range)
_BY_REFERENCE = (
    Tensor,
    nn.Module,
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    torch.jit.ScriptFunction,
    torch.optim.Optimizer,
    type(threading.Lock()),
)


def is_immutable(value: Any) -> bool:
    """Return whether nothing that a value holds can be replaced: numbers, texts, and tuples of them."""
    return isinstance(value, _SCALARS) or (type(value) is tuple and all(map(is_immutable, value)))


def is_object(leaf: Any) -> bool:
    """Return whether an argument has a state that a call may change.

    Those that are kept by reference have none here.
    """
    return not isinstance(leaf, (*_SCALARS, *_BY_REFERENCE)) and not is_generator(leaf)


class ObjectState:
    """An object as it is now.

    Args:
        value: not changed.

    Raises:
        TypeError: it has no state that could be written down (an open file, a generator that has begun).

    Example:
        >>> history = {"losses": [0.5]}
        >>> before = ObjectState(history)
        >>> history["losses"].append(0.4)
        >>> before.equals(ObjectState(history)), before.copy(before.references)
        (False, {'losses': [0.5]})
    """

    def __init__(self, value: Any) -> None:
        self.references: list[Any] = []
        """What is held as it is: tensors, modules, functions, classes, generators."""
        written = _Written()
        try:
            _Pickler(written, self.references).dump(value)
        except Exception as error:  # whatever the methods of a class raise
            raise TypeError(f"{type(value).__name__} has no state that can be written down: {error}") from error
        self._written = written.getvalue()
        self.versions = [version_of(each) if isinstance(each, Tensor) else 0 for each in self.references]

    def equals(self, other: ObjectState) -> bool:
        """Return whether nothing has changed between the two, tensors in place included."""
        return (
            self._written == other._written
            and self.versions == other.versions
            and len(self.references) == len(other.references)
            and all(map(_is_same, self.references, other.references))
        )

    def reads_as(self, other: ObjectState) -> bool:
        """Return whether whoever reads both finds the same: small tensors may be others, with the same values."""
        if self._written != other._written or len(self.references) != len(other.references):
            return False
        pairs = zip(self.references, self.versions, other.references, strict=True)
        return all(
            (_is_same(before, now) or have_same_values(before, now))
            and not (isinstance(before, Tensor) and version_of(before) != version)
            for before, version, now in pairs
        )

    def copy(self, references: list[Any]) -> Any:
        """Return an object of this state, which holds `references`."""
        return _Unpickler(io.BytesIO(self._written), references).load()


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two references are to one object; bound methods are made anew each time."""
    return first is second or (isinstance(first, _METHODS) and first == second)


def have_same_values(first: Any, second: Any) -> bool:
    """Return whether two values are small tensors with the same values, and no graph behind them.

    Not of tensors that are sparse, nested or without values, which cannot be compared.
    """
    if not (_has_values(first) and _has_values(second)):
        return False
    kinds = [(t.shape, t.dtype, t.device, t.grad_fn) for t in (first, second)]
    if kinds[0] != kinds[1] or first.numel() > _MOST_COMPARED:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())  # NaN as well


def _has_values(value: Any) -> bool:
    is_strided = type(value) in (Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_nested
    return is_strided and not value.is_meta


_METHODS = (types.MethodType, types.BuiltinFunctionType)


class _Written(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        return super().write(data)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, references: list[Any]) -> None:
        super().__init__(file, protocol=4)
        self._references, self._places = references, dict[int, int]()

    def persistent_id(self, value: Any) -> int | None:
        if not is_held(value):
            if _is_array(value) and value.nbytes > _MOST_BYTES // 2:
                raise ValueError(f"an array of {value.nbytes} bytes")
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self._references)
            self._references.append(value)
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, references: list[Any]) -> None:
        super().__init__(file)
        self._references = references

    def persistent_load(self, place: int) -> Any:
        return self._references[place]


def is_held(value: Any) -> bool:
    """Return whether a value is held by reference, and has no state here: modules, functions, generators, trainers."""
    return isinstance(value, (*_BY_REFERENCE, Enum, logging.Logger)) or is_generator(value) or _is_of_lightning(value)


def _is_of_lightning(value: Any) -> bool:
    """Return whether it is Lightning's, derived from that, or ours: trainers, data modules, strategies, regions."""
    library = type(value).__module__.partition(".")[0]
    if library == "lightning_memsave" or (is_of_a_library(value) and library not in ("torch", "numpy")):
        return True
    return any(cls.__module__.partition(".")[0] in ("lightning", "pytorch_lightning") for cls in type(value).__mro__)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def state_of(value: Any) -> ObjectState | None:
    """Return the state of an object; `None` for what cannot be written down, or is kept by reference."""
    try:
        return ObjectState(value) if is_object(value) else None
    except TypeError:
        return None


class Stub:
    """A tensor of which a call reads no values, as those of other layers in a cache: as long as somebody holds it.

    Args:
        tensor: not kept alive.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._shape, self._dtype, self._device = tensor.shape, tensor.dtype, tensor.device

    def stands_for(self, tensor: Any) -> bool:
        """Return whether it is the tensor."""
        return tensor is not None and self._tensor() is tensor

    def get(self) -> Tensor:
        """Return the tensor; when it is gone, one of its shape that takes no memory."""
        tensor = self._tensor()
        return (
            tensor
            if tensor is not None
            else torch.zeros((), dtype=self._dtype, device=self._device).expand(self._shape)
        )
