"""What `training_step` returned for each microbatch, as it would have returned it for the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def detached(value: Any) -> Any:
    """`value` without graphs, so that a microbatch's activations can be freed."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: detached(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(detached(child) for child in value)
    return value


def merge_outputs(outputs: list[dict[str, Any]], sizes: list[int]) -> dict[str, Any]:
    """Per-sample tensors and lists are joined, scalars averaged over samples, equal values kept.

    >>> import torch
    >>> parts = [{"y": torch.tensor([1, 2]), "n": torch.tensor(1.0)}, {"y": torch.tensor([3]), "n": torch.tensor(4.0)}]
    >>> merge_outputs(parts, [2, 1])
    {'y': tensor([1, 2, 3]), 'n': tensor(2.)}
    """
    return {key: _merge([output[key] for output in outputs], sizes) for key in outputs[0]}


def _merge(values: list[Any], sizes: list[int]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        if first.ndim == 0:
            return sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)
        if all(v.size(0) == n for v, n in zip(values, sizes, strict=True)):
            return torch.cat(values)
        return values
    if isinstance(first, Mapping):
        return {key: _merge([v[key] for v in values], sizes) for key in first}
    if isinstance(first, (list, tuple)) and all(len(v) == n for v, n in zip(values, sizes, strict=True)):
        return type(first)(child for v in values for child in v)
    return first if all(v == first for v in values) else values
