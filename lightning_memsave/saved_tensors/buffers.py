"""Buffers that a call may change: put back when the call is made again, or when a batch is."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_memsave.core.errors import RegionError
from lightning_memsave.torch_internals.autograd_graph import version_of
from lightning_memsave.torch_internals.compact_layers import CompactLayer
from lightning_memsave.torch_internals.fake_tensors import is_fake

_Buffer = tuple[nn.Module, str, Tensor]
_Norm = nn.modules.batchnorm._NormBase
_MOST_SPARED_BYTES = 2**14
"""Counters, ranges of observers, averages of a few numbers: what is switched on late in training is mostly small."""


class Spares:
    """Clones of small buffers that a module's calls have left alone so far: each serves until somebody edits it."""

    def __init__(self) -> None:
        self._clones: dict[str, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self.rewritten: set[str] = set()
        """Large buffers that calls fill with the values that they have: these need no clone."""

    def __getstate__(self) -> dict[str, Any]:
        """Return nothing to copy: a copy of the module has other buffers."""
        return {"_clones": {}, "rewritten": self.rewritten}

    def of(self, name: str, value: Tensor, version: int) -> Tensor | None:
        """Return what a buffer holds at this version; `None` for a large one."""
        if _size(value) > _MOST_SPARED_BYTES or value.requires_grad:
            return None
        known = self._clones.get(name)
        if known is None or known[0]() is not value or known[1] != version:
            known = self._clones[name] = weakref.ref(value), version, value.clone()
        return known[2]


def _version(owner: nn.Module, value: Tensor) -> int:
    """Return the edits of a buffer: those that torch counts, and BatchNorm's own, which its count of batches tells."""
    batches = owner._buffers.get("num_batches_tracked") if isinstance(owner, _Norm) else None
    return version_of(value) + (0 if batches is None else version_of(batches))


@dataclass
class _Other:
    """A buffer that is not expected to change."""

    name: str
    owner: nn.Module
    key: str
    value: Tensor
    version: int
    clone: Tensor | None
    is_lost: bool = False
    """Whether the call itself has edited it, and nobody has a clone."""

    @property
    def has_moved(self) -> bool:
        """Whether it was edited in place since."""
        return _version(self.owner, self.value) != self.version

    def before(self) -> Iterator[_Buffer]:
        """Yield what it was, if it is no longer that."""
        current = self.owner._buffers.get(self.key)
        if current is None or (current is self.value and not self.has_moved):
            return
        if self.is_lost:
            raise RegionError(
                f"A checkpointed module has edited its buffer `{self.name.removeprefix('.')}` in place for the first "
                f"time after its first call. It is too large ({_size(self.value)} bytes) to be cloned at each call, so "
                "the call cannot be made again with what it read. Leave this module out of checkpointing."
            )
        if not self.has_moved or self.clone is not None:
            yield self.owner, self.key, self.value if self.clone is None else self.clone


class Buffers:
    """Clones of the buffers of a module that a call may change; while they are entered, the module has these.

    A second run of a call then reads the buffers that the first one read, and changes none twice: BatchNorm's running
    statistics are updated once (https://github.com/pytorch/pytorch/issues/96136), spectral norm iterates once.

    Args:
        owners: whose buffers: modules by name, as `named_modules` tells them.
        changing: names of those that change, which the first call finds out; normalisation layers' always do.
        small_bytes: up to this size buffers are cloned while it is not known which of them change.
        spares: has clones of small buffers that are not expected to change; without it, their edits are only counted.
    """

    def __init__(
        self,
        owners: Iterable[tuple[str, nn.Module]],
        changing: set[str] | None,
        small_bytes: float = math.inf,
        spares: Spares | None = None,
    ) -> None:
        self._before: dict[str, _Buffer] = {}
        self._marks: dict[str, tuple[bool, int, int]] = {}  # always changed, or if this is no longer so
        self._others: list[_Other] = []
        self._spares = spares
        for prefix, owner in owners:
            if not owner._buffers:
                continue
            always = isinstance(owner, _Norm) and owner.training
            steady = owner.steady_buffers if isinstance(owner, CompactLayer) else ()
            for key, value in owner._buffers.items():
                name = f"{prefix}.{key}"
                if value is None or is_lazy(value) or key in steady:
                    continue
                if always or (name in changing if changing is not None else _size(value) <= small_bytes):
                    self._before[name] = owner, key, value.detach().clone()
                    self._marks[name] = always, id(value), version_of(value)
                else:
                    self._watch(name, owner, key, value)

    def _watch(self, name: str, owner: nn.Module, key: str, value: Tensor) -> None:
        if not value.is_inference():
            version = _version(owner, value)
            clone = None if self._spares is None else self._spares.of(name, value, version)
            self._others.append(_Other(name, owner, key, value, version, clone))

    def changed(self) -> set[str]:
        """Return the names of those that have changed since; the others are watched from now on."""
        found = {name for name in self._before if not self._is_equal(name)}
        for name in self._before.keys() - found:
            owner, key, _ = self._before.pop(name)
            value = owner._buffers[key]
            assert value is not None, "it equals what it was"
            if self._spares is not None and version_of(value) != self._marks[name][2]:
                self._spares.rewritten.add(name)
            self._watch(name, owner, key, value)
        return found

    def end_call(self) -> None:
        """End the call: what has been edited up to here was edited by it."""
        rewritten = set() if self._spares is None else self._spares.rewritten
        for other in self._others:
            other.is_lost = other.clone is None and other.has_moved and other.name not in rewritten

    def _is_equal(self, name: str) -> bool:
        owner, key, before = self._before[name]
        current = owner._buffers[key]
        if current is not None and is_fake(current):  # no values: told by the number of its edits
            always, identity, version = self._marks[name]
            return not always and (id(current), version_of(current)) == (identity, version)
        return _equal(current, before)

    def moved(self) -> set[str]:
        """Return the names of those that were edited in place since, although nobody expected that.

        There is no clone.
        """
        return {other.name for other in self._others if other.has_moved}

    def put_back(self) -> None:
        """Give the module's buffers, in place, the values that they had; others are not touched, which would count."""
        with torch.no_grad():
            for owner, key, value in [self._before[name] for name in self._before if not self._is_equal(name)]:
                current = owner._buffers[key]
                if current is not None and current.shape == value.shape:
                    current.copy_(value)
                else:
                    owner._buffers[key] = value.clone()

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Give the module (clones of) these buffers; a double backward comes here twice.

        Raises:
            RegionError: the call has edited one that nobody expected to change, and there is no clone.
        """
        values = [*self._before.values(), *(before for other in self._others for before in other.before())]
        after = [(owner, key, owner._buffers[key]) for owner, key, _ in values]
        for owner, key, value in values:
            owner._buffers[key] = value.clone()
        try:
            yield
        finally:
            for owner, key, latest in after:
                owner._buffers[key] = latest


def _size(tensor: Tensor) -> int:
    """Return bytes; of a sparse tensor, what it would take dense."""
    return tensor.numel() * tensor.element_size()


def _equal(current: Tensor | None, before: Tensor) -> bool:
    if current is None or current.layout is not torch.strided:
        return False
    return torch.equal(current, before)
