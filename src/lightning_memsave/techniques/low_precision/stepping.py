"""Optimizers that step bfloat16 parameters in float32: each on a copy, through the optimizer's own `step`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.optimizers import (
    OneParameter,
    bare_step,
    change_class,
    check_steps_parameters_alone,
    step_one,
)
from lightning_memsave.techniques.low_precision.weights import Weights

_MEMORY = "_memsave_low_precision"
SIDE_KEY = "memsave_low_precision"


@dataclass(kw_only=True)
class _Memory:
    plain_class: type[torch.optim.Optimizer]
    weights: Weights
    num_steps: int = 0


def step_in_float32(optimizer: torch.optim.Optimizer, weights: Weights) -> None:
    """Let `optimizer` step the parameters of `weights` in float32; it stays the same object.

    Raises:
        ValueError: it needs all parameters at once.
    """
    check_steps_parameters_alone(optimizer, "precision")
    plain_class = type(optimizer)
    change_class(optimizer, _in_float32(plain_class))
    vars(optimizer)[_MEMORY] = _Memory(plain_class=plain_class, weights=weights)


def step_plainly(optimizer: torch.optim.Optimizer) -> None:
    """Undo `step_in_float32`."""
    memory: _Memory = vars(optimizer).pop(_MEMORY)
    change_class(optimizer, memory.plain_class)


@functools.cache
def _in_float32(plain: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    class InFloat32(plain):  # type: ignore[misc, valid-type]  # a base known at run time
        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            memory: _Memory = vars(self)[_MEMORY]
            step = bare_step(memory.plain_class)
            groups = self.param_groups
            for group in groups:
                for p in group["params"]:
                    if p.grad is not None:
                        with _as_float32(p, memory):
                            step_one(step, self, group, p)
            memory.num_steps += not isinstance(groups, OneParameter)
            return loss

        def state_dict(self) -> dict[str, Any]:
            return with_counter(self, super().state_dict())

        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            memory: _Memory = vars(self)[_MEMORY]
            with _seemingly_float32(memory.weights):
                super().load_state_dict(state_dict)
            load_counter(self, state_dict)

        def __getstate__(self) -> dict[str, Any]:
            return {**super().__getstate__(), _MEMORY: vars(self)[_MEMORY]}

    InFloat32.__name__ = InFloat32.__qualname__ = f"{plain.__name__}InFloat32"
    return InFloat32


@contextlib.contextmanager
def _as_float32(p: Tensor, memory: _Memory) -> Iterator[None]:
    """Inside, `p` and its gradient are float32; then `p` is rounded back into its own memory.

    The object stays, so that the optimizer finds its state and settings.
    """
    if p not in memory.weights:
        yield
        return
    stored, gradient = p.data, p.grad
    whole = memory.weights.whole(p)
    p.grad = None
    p.data = whole
    assert gradient is not None
    p.grad = gradient.float()
    try:
        yield
    finally:
        p.grad = None
        whole, p.data = p.data, stored
        p.grad = gradient
    memory.weights.write(p, whole, memory.num_steps)


@contextlib.contextmanager
def _seemingly_float32(weights: Weights) -> Iterator[None]:
    """torch casts the state that it loads to the dtype of its parameter."""
    stored = {p: p.data for p in weights}
    try:
        for p, data in stored.items():
            p.data = data.new_zeros((), dtype=torch.float32).expand(data.shape)
        yield
    finally:
        for p, data in stored.items():
            p.data = data


def with_counter(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict of `optimizer` with the number of its steps, from which the noise is made; torch ignores the key."""
    memory: _Memory | None = vars(optimizer).get(_MEMORY)
    return state_dict if memory is None else {**state_dict, SIDE_KEY: {"version": 1, "num_steps": memory.num_steps}}


def load_counter(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Go on with the noise where the run that wrote `state_dict` stopped."""
    memory: _Memory | None = vars(optimizer).get(_MEMORY)
    if memory is not None and SIDE_KEY in state_dict:
        memory.num_steps = state_dict[SIDE_KEY]["num_steps"]
