"""Optimizer state of factors in a checkpoint whose layout is the dense model's.

The moments of two factors say nothing of a dense weight's. So on disk the weight's own are as before a first step,
zeros, and those of the factors stand beside, under a key that torch ignores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.torch_internals.state_layout import before_a_step, has_layout_of_torch, numbered

FACTORED = "low_rank_state"
Shapes = Mapping[Tensor, torch.Size]
"""Shapes of the dense weights, by the parameter of factors."""


def to_dense_layout(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Return the state dict of `optimizer` as that of a dense model's."""
    if not has_layout_of_torch(state_dict):
        return state_dict
    state, factored = dict(state_dict["state"]), {}
    for number, p in numbered(optimizer, state_dict):
        if p in shapes and number in state:
            own = state.pop(number)
            factored[number] = {"shape": list(p.shape), "state": own}
            if (first := before_a_step(own, p.shape, shapes[p])) is not None:
                state[number] = first
    return {**state_dict, "state": dict(sorted(state.items())), FACTORED: factored}


def from_dense_layout(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    """A dense model's state dict as that of `optimizer`; factors that it knows nothing of start without state."""
    if not has_layout_of_torch(state_dict):
        return state_dict
    state = dict(state_dict["state"])
    factored = state_dict.get(FACTORED, {})
    for number, p in numbered(optimizer, state_dict):
        if p in shapes:
            state.pop(number, None)
            if number in factored and factored[number]["shape"] == list(p.shape):
                state[number] = factored[number]["state"]
    return {**{key: value for key, value in state_dict.items() if key != FACTORED}, "state": state}
