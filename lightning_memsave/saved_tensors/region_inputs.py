"""The inputs of regions: kept as autograd keeps tensors, but without the graph behind them.

A region of several calls may be given what was computed, outside of it, from its own earlier calls. If it held the
graph behind that, it would hold itself, through C++ where no garbage collector looks: a forward pass that no backward
follows would never be freed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.saved_tensors.store import SavedTensorStore
from lightning_memsave.torch_internals.autograd_graph import check_version, innermost_hooks, version_of


class Keeper:
    """An owner of the pack hook that takes what is kept inside of a region, or in its repetition."""

    store: SavedTensorStore | None
    """What keeps it in the repetition."""


class RegionInput:
    """A tensor that a region was given.

    Args:
        tensor: kept through the hooks that are active; a leaf that requires a gradient is held as it is.
    """

    __slots__ = ("_has_graph", "_kept", "_unpack", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._has_graph = tensor.grad_fn is not None
        self._version = version_of(tensor)
        self._unpack: Any = None
        pack, unpack = innermost_hooks()
        if pack is None or (tensor.is_leaf and tensor.requires_grad):
            self._kept: Any = tensor.detach() if self._has_graph else tensor
            return
        # Hooks of others may return the tensor itself, with its graph; ours read the graph, and do not hold it.
        is_ours = isinstance(getattr(pack, "__self__", None), (Keeper, SavedTensorStore))
        with torch.no_grad():
            self._kept, self._unpack = pack(tensor if is_ours else tensor.detach()), unpack

    def get(self) -> Tensor:
        """Return the tensor, under a node of its own where a node was behind it.

        Raises:
            RuntimeError: it was changed in place since, as autograd itself would.
        """
        if self._unpack is None:
            check_version(self._kept, self._version)
            tensor = self._kept
        else:
            with torch.no_grad():
                tensor = self._unpack(self._kept)
        if not self._has_graph:
            return tensor  # type: ignore[no-any-return]
        return _Entrance.apply(tensor.detach().requires_grad_())  # type: ignore[no-any-return,no-untyped-call]  # untyped in torch


class _Entrance(torch.autograd.Function):
    """A tensor under a node: the store looks for recomputations as far as this one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        """Return the same tensor."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the same gradient."""
        return gradient


def _owner_of_hooks() -> Any:
    return getattr(innermost_hooks()[0], "__self__", None)


def store_around() -> SavedTensorStore | None:
    """The store that keeps what is kept now, or that will keep what the region around keeps when it is repeated."""
    owner = _owner_of_hooks()
    return owner if isinstance(owner, SavedTensorStore) else getattr(owner, "store", None)


_INPUTS: ContextVar[SavedTensorStore | None] = ContextVar("store of inputs", default=None)


@contextlib.contextmanager
def keeping_inputs_in(store: SavedTensorStore) -> Iterator[None]:
    """Keep the inputs of regions that are entered inside in `store`, whatever keeps the rest."""
    if _INPUTS.get() is not None:
        yield
        return
    token = _INPUTS.set(store)
    try:
        with store.opened():
            yield
    finally:
        _INPUTS.reset(token)


@contextlib.contextmanager
def inputs_as_they_are() -> Iterator[None]:
    """Keep the inputs of regions as autograd does inside: a store may read their values."""
    token = _INPUTS.set(None)
    try:
        yield
    finally:
        _INPUTS.reset(token)


def keep(tensor: Tensor) -> RegionInput:
    """Keep an input. Inside another region, or in its repetition, that one does."""
    store = _INPUTS.get()
    if store is None or isinstance(_owner_of_hooks(), Keeper):
        return RegionInput(tensor)
    with store.hooks():
        return RegionInput(tensor)
