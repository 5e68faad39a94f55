"""Optimizer state of factors in a checkpoint whose layout is the dense model's.

The moments of two factors say nothing of a dense weight's. So on disk the weight's own are as before a first step,
zeros, and those of the factors stand beside, under a key that torch ignores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

FACTORED = "low_rank_state"
Shapes = Mapping[Tensor, torch.Size]
"""Shapes of the dense weights, by the parameter of factors."""
_ZERO_AT_FIRST = frozenset(
    (
        *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf"),
        *("momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum"),
    )
)


def to_dense_layout(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    """Return the state dict of `optimizer` as that of a dense model's."""
    if "state" not in state_dict or "param_groups" not in state_dict:
        return state_dict  # not torch's layout: Lightning's stand-in for no optimizer has none
    state, factored = dict(state_dict["state"]), {}
    for number, p in _numbered(optimizer, state_dict):
        if p in shapes and number in state:
            own = state.pop(number)
            factored[number] = {"shape": list(p.shape), "state": own}
            if (first := _before_a_step(own, p.shape, shapes[p])) is not None:
                state[number] = first
    return {**state_dict, "state": dict(sorted(state.items())), FACTORED: factored}


def from_dense_layout(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    """A dense model's state dict as that of `optimizer`; factors that it knows nothing of start without state."""
    if "state" not in state_dict or "param_groups" not in state_dict:
        return state_dict
    state = dict(state_dict["state"])
    factored = state_dict.get(FACTORED, {})
    for number, p in _numbered(optimizer, state_dict):
        if p in shapes:
            state.pop(number, None)
            if number in factored and factored[number]["shape"] == list(p.shape):
                state[number] = factored[number]["state"]
    return {**{key: value for key, value in state_dict.items() if key != FACTORED}, "state": state}


def _numbered(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return zip(numbers, parameters, strict=False)  # torch says what is wrong with other numbers of them


def _before_a_step(state: Mapping[str, Any], shape: torch.Size, dense_shape: torch.Size) -> dict[str, Any] | None:
    """Return a parameter's state as an optimizer has it at first; `None` where it is not zeros: none is written then.

    Args:
        state: of the factors.
        shape: of the factors.
        dense_shape: of the weight.
    """
    found: dict[str, Any] = {}
    for name, value in state.items():
        if name not in _ZERO_AT_FIRST or not (value is None or isinstance(value, (Tensor, int, float))):
            return None
        if isinstance(value, Tensor):
            found[name] = value.new_zeros(dense_shape if value.shape == shape else value.shape)
        else:
            found[name] = None if value is None else type(value)(0)
    return found
