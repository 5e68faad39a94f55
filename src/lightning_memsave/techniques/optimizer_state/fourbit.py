"""4-bit optimizer state: any optimizer that keeps Adam-like moments, whose moments are codes between its steps.

A moment is 0.5 bytes per element and 4 per block of 256: 0.516. Before its parameter steps it is decoded to float32,
and afterwards it is coded again, so that the transient is of one parameter.

| moment | map, times the largest magnitude of the block | error of an element below |
|---|---|---:|
| first (signed): `exp_avg`, `momentum_buffer` | +-(i / 7)**2, i = 0 to 7 | 0.266 of that magnitude |
| second (not negative): `exp_avg_sq`, `square_avg`, `sum` | (i / 16)**2, i = 1 to 16 | 0.122 of it |

Rounding is stochastic. An average that decays by a tenth or a thousandth per step never leaves a code whose neighbours
are further away when it is rounded to the nearest: a weight without gradient would drift for ever. The second moment
has no zero, because what is divided by it would explode; so elements below 1/256 of the block's largest count as that,
which makes their steps smaller.

Source of the idea and of leaving out zero: Li, Chen, Zhu, "Memory Efficient Optimizers with 4-bit States", 2023
(https://arxiv.org/abs/2309.01507). Different: rounding, both maps, the block size, and no rank-1 normalisation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.optimizers import (
    OneParameter,
    bare_step,
    change_class,
    check_steps_parameters_alone,
    original,
    step_one,
)
from lightning_memsave.numerics.bits import pack, unpack
from lightning_memsave.numerics.blockwise import (
    dequantize_blockwise,
    quantize_blockwise,
    quantize_stochastically,
)
from lightning_memsave.numerics.kbit import mix

_MEMORY = "_memsave_4bit"
SIDE_KEY = "memsave_4bit"
_SIGNED = torch.arange(-7, 8).mul(torch.arange(-7, 8).abs()) / 49
_POSITIVE = (torch.arange(1, 17) / 16) ** 2
_MAPS = {
    "exp_avg": _SIGNED,
    "momentum_buffer": _SIGNED,
    "exp_avg_sq": _POSITIVE,
    "square_avg": _POSITIVE,
    "sum": _POSITIVE,
}
MOMENTS: Mapping[str, tuple[str, ...]] = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "NAdam": ("exp_avg", "exp_avg_sq"),
    "RAdam": ("exp_avg", "exp_avg_sq"),
    "SGD": ("momentum_buffer",),
    "Lion": ("exp_avg",),
    "RMSprop": ("square_avg",),
    "Adagrad": ("sum",),
}
"""The optimizers that are known, by the name of their class, and their moments."""
_MUST_BE_OFF = ("amsgrad", "centered", "capturable", "differentiable")


class Coded(NamedTuple):
    """A moment between steps."""

    codes: Tensor
    absmax: Tensor


@dataclass(kw_only=True)
class _Memory:
    plain_class: type[torch.optim.Optimizer]
    kept: set[Tensor]
    numbers: dict[Tensor, int]
    num_steps: int = 0


def check_4bit(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what cannot have 4-bit state.

    Raises:
        ValueError: an optimizer that is not known, or a setting that compares a moment with itself.
    """
    name = type(optimizer).__name__
    check_steps_parameters_alone(optimizer, "optimizer_state")
    if name not in MOMENTS:
        raise setting_error(
            "optimizer_state",
            f"in 4 bit needs an optimizer whose moments are known ({', '.join(MOMENTS)})",
            name,
            "Use one of these, or `optimizer_state=False`.",
        )
    for group in optimizer.param_groups:
        for key in _MUST_BE_OFF:
            if group.get(key):
                raise setting_error(
                    "optimizer_state", f"in 4 bit cannot keep {name}'s `{key}`", True, f"Use `{key}=False`."
                )
        if name == "SGD" and not group["momentum"]:
            raise setting_error(
                "optimizer_state",
                "needs SGD with momentum; without, there is no state",
                0,
                "Use `optimizer_state=False`.",
            )


def moments_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The names of the moments that `optimizer` keeps."""
    name = type(optimizer).__name__
    has_momentum = name == "RMSprop" and any(group["momentum"] for group in optimizer.param_groups)
    return (*MOMENTS[name], "momentum_buffer") if has_momentum else MOMENTS[name]


def is_4bit(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `become_4bit` has changed this optimizer."""
    return _MEMORY in vars(optimizer)


def become_4bit(optimizer: torch.optim.Optimizer, kept: set[Tensor]) -> None:
    """Change the class of `optimizer`, so that every reference to it stays good; state that exists is coded."""
    plain_class: Any = type(optimizer)
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    numbers = {p: number for number, p in enumerate(parameters)}
    change_class(optimizer, _class_4bit(plain_class))
    vars(optimizer)[_MEMORY] = _Memory(plain_class=plain_class, kept=kept, numbers=numbers)
    _encode_all(optimizer)


def leave_4bit(optimizer: torch.optim.Optimizer) -> None:
    """Undo `become_4bit`; moments keep the rounding that they have suffered, and the dtype of their parameter."""
    for p, state in optimizer.state.items():
        decode(state, p, p.dtype)
    memory: _Memory = vars(optimizer).pop(_MEMORY)
    change_class(optimizer, memory.plain_class)


def decode(state: dict[str, Any], p: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Moments of `p` as tensors, in place."""
    for name, value in state.items():
        if isinstance(value, Coded):
            codes = unpack(value.codes, 4, p.numel()).view(p.shape)
            state[name] = dequantize_blockwise(codes, _MAPS[name].to(codes.device), value.absmax).to(dtype)


def _encode(state: dict[str, Any], p: Tensor, seed: int | None) -> None:
    for number, (name, code_map) in enumerate(_MAPS.items()):
        value = state.get(name)
        if isinstance(value, Tensor) and value.shape == p.shape:
            on_device = code_map.to(value.device)
            if seed is None:
                codes, absmax = quantize_blockwise(value, on_device)
            else:
                codes, absmax = quantize_stochastically(value, on_device, mix(seed ^ number))
            state[name] = Coded(pack(codes.reshape(-1), 4), absmax)


def _encode_all(optimizer: torch.optim.Optimizer) -> None:
    """To the nearest, which finds codes again exactly: the largest element of a block decodes to the block's scale."""
    memory: _Memory = vars(optimizer)[_MEMORY]
    for p, state in optimizer.state.items():
        if original(p) not in memory.kept:
            _encode(state, p, None)


def _step_decoded(step: Callable[[Any], Any], optimizer: Any, group: dict[str, Any], p: Tensor) -> None:
    memory: _Memory = vars(optimizer)[_MEMORY]
    decode(optimizer.state.get(p, {}), p, p.dtype)  # as the optimizer itself would hold them
    step_one(step, optimizer, group, p)
    known = original(p)
    if known not in memory.kept:
        number = memory.numbers.setdefault(known, len(memory.numbers))
        _encode(optimizer.state[p], p, mix(mix(memory.num_steps & 0xFFFFFFFF) ^ (8 * number)))


@functools.cache
def _class_4bit(plain: Any) -> Any:  # noqa: C901  # one class, counted as one function
    class In4Bit(plain):  # type: ignore[misc]  # a base known at run time
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
                        _step_decoded(step, self, group, p)
            memory.num_steps += not isinstance(groups, OneParameter)
            return loss

        def state_dict(self) -> dict[str, Any]:
            found: dict[str, Any] = super().state_dict()
            parameters = [p for group in self.param_groups for p in group["params"]]
            state = {number: dict(values) for number, values in found["state"].items()}
            for number, values in state.items():
                decode(values, parameters[number])
            side = {"version": 1, "num_steps": vars(self)[_MEMORY].num_steps}
            return {**found, "state": state, SIDE_KEY: side}

        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            super().load_state_dict(state_dict)
            _encode_all(self)
            if SIDE_KEY in state_dict:
                vars(self)[_MEMORY].num_steps = state_dict[SIDE_KEY]["num_steps"]

        def __getstate__(self) -> dict[str, Any]:
            return {**super().__getstate__(), _MEMORY: vars(self)[_MEMORY]}

    In4Bit.__name__ = In4Bit.__qualname__ = f"{plain.__name__}In4Bit"
    return In4Bit
