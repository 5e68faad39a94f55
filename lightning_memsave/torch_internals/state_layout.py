"""Optimizer state between parameters that are a part of a weight and the dense layout that checkpoints have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Layout(Protocol):
    """Places of a parameter's values in a dense weight."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the dense weight."""

    def dense(self, values: Tensor) -> Tensor:
        """Return values at their places among zeros."""

    def compact(self, dense: Tensor) -> Tensor:
        """Return those of a dense tensor."""


Layouts = Mapping[Any, Layout]
"""Layouts by the parameter of values."""
_ZERO_AT_FIRST = frozenset(
    (
        *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf"),
        *("momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum"),
    )
)


def to_dense_layout(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], layouts: Layouts) -> dict[str, Any]:
    """Return the state dict of `optimizer` as that of a dense model's: moments of other weights are zero."""

    def dense(layout: Layout, p: Tensor, moment: Tensor) -> Tensor:
        return layout.dense(moment) if moment.shape == p.shape else moment

    return _converted(optimizer, state_dict, layouts, dense)


def from_dense_layout(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], layouts: Layouts) -> dict[str, Any]:
    """A dense model's state dict as that of `optimizer`, which keeps moments of these values alone."""

    def compact(layout: Layout, p: Tensor, moment: Tensor) -> Tensor:
        return layout.compact(moment) if moment.shape == layout.shape else moment

    return _converted(optimizer, state_dict, layouts, compact)


def _converted(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    layouts: Layouts,
    convert: Callable[[Layout, Tensor, Tensor], Tensor],
) -> dict[str, Any]:
    if not has_layout_of_torch(state_dict):
        return state_dict
    state = dict(state_dict["state"])
    for number, p in numbered(optimizer, state_dict):
        if p in layouts and number in state:
            state[number] = {
                name: convert(layouts[p], p, moment) if isinstance(moment, Tensor) else moment
                for name, moment in state[number].items()
            }
    return {**state_dict, "state": dict(sorted(state.items()))}


def has_layout_of_torch(state_dict: Mapping[str, Any]) -> bool:
    """Return whether it is laid out as torch's: Lightning's stand-in for no optimizer is not."""
    return "state" in state_dict and "param_groups" in state_dict


def numbered(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Any, Tensor]]:
    """Yield the number of each parameter in a state dict, and the parameter."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return zip(numbers, parameters, strict=False)  # torch says what is wrong with other numbers of them


def before_a_step(state: Mapping[str, Any], shape: torch.Size, dense_shape: torch.Size) -> dict[str, Any] | None:
    """Return a parameter's state as an optimizer has it at first; `None` where it is not zeros: none is written then.

    Args:
        state: of a parameter that was stepped.
        shape: of that parameter.
        dense_shape: of the one whose state is wanted.
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
