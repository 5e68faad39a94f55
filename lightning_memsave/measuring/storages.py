"""The storages behind a tensor, and the tensors in a nest of containers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lightning_memsave.torch_internals.autograd_graph import is_wrapped


def storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield every storage behind a tensor.

    One for a plain tensor, several for sparse ones and for wrapper subclasses; none for what a transform of torch.func
    has wrapped, as what is inside may be several in one.
    """
    any_tensor: Any = tensor
    if is_wrapped(tensor):
        return
    if is_traceable_wrapper_subclass(any_tensor):
        for inner in (getattr(any_tensor, name) for name in any_tensor.__tensor_flatten__()[0]):
            if isinstance(inner, Tensor):  # DTensor lists its mesh as well
                yield from storages(inner)
    elif tensor.layout is torch.strided:
        yield tensor.untyped_storage()
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices().untyped_storage()
        yield tensor._values().untyped_storage()
    elif (indices := _COMPRESSED.get(tensor.layout)) is not None:
        for part in (*(index_of(tensor) for index_of in indices), tensor.values()):
            yield part.untyped_storage()


_BY_ROWS, _BY_COLUMNS = (Tensor.crow_indices, Tensor.col_indices), (Tensor.ccol_indices, Tensor.row_indices)
_COMPRESSED = {
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _BY_ROWS),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _BY_COLUMNS),
}

_NOT_SEARCHED = (nn.Module, type, TorchDispatchMode)  # a fake tensor has its mode as an attribute, with large caches


def tensors_in(tree: object, _seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield every tensor in a nest of containers, dataclasses and objects with a `__dict__` (a batch of any shape)."""
    seen = set() if _seen is None else _seen
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, _NOT_SEARCHED) and id(leaf) not in seen:
            seen.add(id(leaf))
            yield from tensors_in(vars(leaf), seen)
