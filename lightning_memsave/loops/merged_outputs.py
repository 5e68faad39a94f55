"""What `training_step` returned for each microbatch, as it would have returned it for the batch."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten


def detached(value: object) -> Any:
    """Return `value` without graphs, so that a microbatch's activations can be freed."""
    return tree_map_only(Tensor, Tensor.detach, value)


def merge_outputs(outputs: list[dict[str, Any]], sizes: list[float]) -> dict[str, Any]:
    """Join per-sample tensors, arrays and lists, average floating-point scalars over samples, keep equal values.

    What cannot be merged becomes the list of what each microbatch returned.

    >>> import torch
    >>> parts = [{"y": torch.tensor([1, 2]), "n": torch.tensor(1.0)}, {"y": torch.tensor([3]), "n": torch.tensor(4.0)}]
    >>> merge_outputs(parts, [2, 1])
    {'y': tensor([1, 2, 3]), 'n': tensor(2.)}
    """
    keys = dict.fromkeys(key for output in outputs for key in output)
    return {
        key: _merge([o[key] for o in outputs if key in o], [n for o, n in zip(outputs, sizes, strict=True) if key in o])
        for key in keys
    }


def _merge(values: list[Any], sizes: list[float]) -> Any:
    if len(values) == 1:
        return values[0]
    if all(type(v) is list and len(v) == n for v, n in zip(values, sizes, strict=True)):
        return [child for v in values for child in v]
    if all(type(v) is dict and v.keys() == values[0].keys() for v in values):
        return {key: _merge([v[key] for v in values], sizes) for key in values[0]}
    if all(_has_parts(v) and type(v) is type(values[0]) and len(v) == len(values[0]) for v in values):
        children = [_merge(list(each), sizes) for each in zip(*values, strict=True)]
        kind: Any = type(values[0])
        return kind(*children) if hasattr(kind, "_fields") else kind(children)
    flat = [tree_flatten(v) for v in values]
    if any(spec != flat[0][1] for _, spec in flat):
        return values
    leaves = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_merge_leaf(list(leaf), sizes) for leaf in leaves], flat[0][1])


def _has_parts(value: object) -> bool:
    """Return whether it is a tuple or a named one; a `torch.Size`, for example, is a value of its own."""
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _merge_leaf(values: list[Any], sizes: list[float]) -> Any:
    first = values[0]
    if any(type(v) is not type(first) for v in values):
        return values
    if not isinstance(first, Tensor) and hasattr(first, "__array__"):
        return _merge_arrays(values, sizes)
    if isinstance(first, Tensor):
        if _have_rows(values, sizes):
            return torch.cat(values)
        if first.ndim == 0 and first.is_floating_point():
            return sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)
        return first if all(torch.equal(v, first) for v in values) else values
    return first if all(v is first or v == first for v in values) else values


def _merge_arrays(values: list[Any], sizes: list[float]) -> Any:
    """Join arrays as tensors; texts and objects, which no tensor holds, only where each sample has an entry."""
    first = values[0]
    if first.dtype.kind in "biufc":
        joined = _merge_leaf([torch.as_tensor(v) for v in values], sizes)
        return joined.numpy() if isinstance(joined, Tensor) else values
    return sys.modules["numpy"].concatenate(values) if _have_rows(values, sizes) else values


def _have_rows(values: list[Any], sizes: list[float]) -> bool:
    """Return whether tensors, or arrays, have a row for each sample, and all rows one shape."""
    rows = values[0].shape[1:]
    return all(v.ndim and len(v) == n and v.shape[1:] == rows for v, n in zip(values, sizes, strict=True))
