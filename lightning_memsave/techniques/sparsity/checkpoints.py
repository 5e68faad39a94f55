"""Optimizer state between the vectors of live weights and the dense layout that checkpoints have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.techniques.sparsity.layers import Layout, sparse_layers

Layouts = Mapping[Tensor, Layout]
"""Layouts by the parameter of live values."""


def layouts_of(model: nn.Module) -> dict[Tensor, Layout]:
    """Return where the values of a model's sparse layers are now."""
    return {layer.values: layer.layout for layer in sparse_layers(model).values()}


def to_dense_layout(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], layouts: Layouts) -> dict[str, Any]:
    """Return the state dict of `optimizer` as that of a dense model's: moments of weights that do not live are zero."""

    def dense(layout: Layout, p: Tensor, moment: Tensor) -> Tensor:
        return layout.dense(moment) if moment.shape == p.shape else moment

    return _converted(optimizer, state_dict, layouts, dense)


def from_dense_layout(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], layouts: Layouts) -> dict[str, Any]:
    """A dense model's state dict as that of `optimizer`, whose sparse layers keep moments of live weights alone."""

    def compact(layout: Layout, p: Tensor, moment: Tensor) -> Tensor:
        return layout.compact(moment) if moment.shape == layout.shape else moment

    return _converted(optimizer, state_dict, layouts, compact)


def _converted(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    layouts: Layouts,
    convert: Callable[[Layout, Tensor, Tensor], Tensor],
) -> dict[str, Any]:
    if "state" not in state_dict or "param_groups" not in state_dict:
        return state_dict  # not torch's layout: Lightning's stand-in for no optimizer has none
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    state = dict(state_dict["state"])
    for number, p in zip(numbers, parameters, strict=False):
        if p in layouts and number in state:
            state[number] = {
                name: convert(layouts[p], p, moment) if isinstance(moment, Tensor) else moment
                for name, moment in state[number].items()
            }
    return {**state_dict, "state": state}
