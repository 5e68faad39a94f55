"""Optimizers that step 16-bit parameters in float32: each on a copy, through the optimizer's own `step`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.errors import setting_error
from lightning_memsave.techniques.low_precision.scaling import all_finite
from lightning_memsave.techniques.low_precision.weights import Weights
from lightning_memsave.torch_internals.coupling import check_steps_parameters_alone
from lightning_memsave.torch_internals.optimizer_class import (
    ELEMENTWISE,
    IN_BACKWARD,
    PENDING,
    Counts,
    MadeClass,
    StepsFused,
    bare_step,
    bounded,
    change_class,
    check_latest,
    is_elementwise,
    name_of,
    num_steps_in,
    original,
    stand_in,
    state_moved,
    step_each,
    step_one,
    step_together,
)
from lightning_memsave.torch_internals.sharded_parameters import as_local, as_sharded

_MEMORY = "_memsave_low_precision"
_ELEMENTWISE = ", ".join(ELEMENTWISE)
SIDE_KEY = "memsave_low_precision"
_LARGEST = torch.finfo(torch.float16).max


@dataclass(kw_only=True)
class _LowPrecisionState(Counts):
    plain_class: type[torch.optim.Optimizer]
    weights: Weights

    def unit(self, p: Tensor) -> int:
        """Return the elements of a row, where `p` is written by rows."""
        return self.weights.unit(p)


def step_in_float32(optimizer: torch.optim.Optimizer, weights: Weights) -> None:
    """Let `optimizer` step the parameters of `weights` in float32; it stays the same object.

    Raises:
        ValueError: it needs all parameters at once.
    """
    if _MEMORY in vars(optimizer):  # made before an earlier fit, which has left it as it was
        vars(optimizer)[_MEMORY].weights = weights
        return
    check_steps_parameters_alone(optimizer, "precision")
    if weights.are_sharded and not is_elementwise(optimizer):
        raise setting_error(
            "precision",
            f"needs an optimizer that steps each element by itself where parameters are sharded ({_ELEMENTWISE})",
            name_of(type(optimizer)),
            "Use one of these, or DDP.",
        )
    if weights.scaling is not None and vars(optimizer).get(IN_BACKWARD):
        raise setting_error(
            "precision",
            'that scales the loss needs `OptimizerState(gradients="keep")`: an overflow is looked for in all gradients',
            "gradients that end in backward",
            'Use `precision="bf16-sr"`, which needs no scaling.',
        )
    if weights.format.has_codes and PENDING in vars(optimizer):
        raise setting_error(
            "precision",
            "needs gradients outside of the optimizer's state where weights are codes",
            'gradients="into-state"',
            'Use `OptimizerState(gradients="keep")`, or `precision="bf16-sr"`.',
        )
    plain_class: Any = type(optimizer)
    change_class(optimizer, _in_float32(plain_class))
    vars(optimizer)[_MEMORY] = _LowPrecisionState(plain_class=plain_class, weights=weights)
    for p in weights:
        state = optimizer.state.get(p, {})  # Adagrad's is made with the optimizer, in the dtype of its parameter
        state.update({k: v.float() for k, v in state.items() if isinstance(v, Tensor) and v.dtype == torch.bfloat16})


def step_plainly(optimizer: torch.optim.Optimizer) -> None:
    """Undo `step_in_float32`.

    Raises:
        RuntimeError: the optimizer was changed again since.
    """
    check_latest(optimizer, _MEMORY)
    memory: _LowPrecisionState = vars(optimizer).pop(_MEMORY)
    for state in optimizer.state.values():
        _lengthen(state)
    change_class(optimizer, memory.plain_class)


@functools.cache
def _in_float32(plain: Any) -> Any:
    class InFloat32(plain, metaclass=MadeClass):  # type: ignore[misc]  # a base known at run time
        made_by, made_from, memory_name = _in_float32, plain, _MEMORY

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            memory: _LowPrecisionState = vars(self)[_MEMORY]
            known = bare_step(memory.plain_class), self, memory
            one, several = functools.partial(_step_in_float32, *known), functools.partial(_step_several, *known)
            return step_each(self, closure, one, lambda: _unscale(memory.weights, self.param_groups), several)

        def scale_loss(self, loss: Tensor) -> Tensor:
            """Return what to call `backward` on: a multiple of `loss` where float16 gradients need one."""
            scaling = vars(self)[_MEMORY].weights.scaling_now
            return loss if scaling is None else scaling.scale(loss)

        def state_dict(self) -> dict[str, Any]:
            return with_counter(self, super().state_dict())

        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            memory: _LowPrecisionState = vars(self)[_MEMORY]
            with _seemingly_float32(self, memory.weights):
                super().load_state_dict(state_dict)
            for p, state in self.state.items():
                if p in memory.weights:
                    _shorten(state, memory, p)
            load_counter(self, state_dict)

        def __getstate__(self) -> dict[str, Any]:
            memory = vars(self)  # none any more where it steps plainly again, by the name of its class alone
            return {**super().__getstate__(), **({_MEMORY: memory[_MEMORY]} if _MEMORY in memory else {})}

    InFloat32.__name__, InFloat32.__qualname__ = plain.__name__, f"{name_of(plain)}InFloat32"
    return InFloat32


def _step_in_float32(
    step: Callable[[Any], Any], optimizer: Any, memory: _LowPrecisionState, group: dict[str, Any], p: Tensor
) -> None:
    if original(p) not in memory.weights:
        if p.dtype != torch.float16:
            _lengthen(optimizer.state.get(p, {}))  # of an earlier fit, in which the weights were shorter
        step_one(step, optimizer, group, p)
        return
    if not _step_fused(optimizer, memory, group, [p]):
        return
    scaling = memory.weights.scaling
    whole = stand_in(p, memory.weights.whole(p))
    if p.grad is not None:  # else it is in the state already
        whole.grad = p.grad.float() if scaling is None else scaling.unscaled(p)
    _lengthen(optimizer.state.get(p, {}))
    with state_moved(optimizer, p, whole):
        step_one(step, optimizer, group, whole)
    _shorten(optimizer.state.get(p, {}), memory, p)
    memory.weights.write(p, whole.detach(), memory.num_steps)


def _step_several(
    step: Callable[[Any], Any],
    optimizer: Any,
    memory: _LowPrecisionState,
    group: dict[str, Any],
    parameters: list[Tensor],
) -> list[Tensor]:
    whole = [p for p in parameters if p not in memory.weights and p.dtype == torch.float32]
    for p in whole:
        _lengthen(optimizer.state.get(p, {}))
    for together in bounded(whole):
        step_together(step, optimizer, group, together)
    left = _step_fused(optimizer, memory, group, [p for p in parameters if p in memory.weights])
    return [*left, *(p for p in parameters if p not in memory.weights and p not in set(whole))]


def _step_fused(
    optimizer: Any, memory: _LowPrecisionState, group: dict[str, Any], parameters: list[Tensor]
) -> list[Tensor]:
    """Step those of `parameters`, whose weights are short, that a kernel for coded moments knows; return the others."""
    if not isinstance(optimizer, StepsFused) or not memory.weights.may_step_fused:
        return parameters
    short = {p: memory.weights.short(p, memory.num_steps) for p in parameters}
    return optimizer.step_fused(group, parameters, short)


def _unscale(weights: Weights, groups: list[dict[str, Any]]) -> bool:
    """Take the factor of the loss off float32 gradients; False, with nothing changed, for a step that is skipped."""
    if (scaling := weights.scaling_now) is None:
        return True
    gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    overflown = not all_finite(gradients)
    if gradients:
        scaling.update(overflown)
    if overflown:
        return False
    for group in groups:
        for p in group["params"]:
            if p.grad is not None and p not in weights:
                p.grad.div_(scaling.of_gradients)
                scaling.fold(p)
    return True


# SGD's momentum is of the size of gradients, and as short as they are. Squares of them would leave float16's range.
# Rounded stochastically: to the nearest, a small one would never decay. What float16 has already stays as it is.
def _shorten(state: dict[str, Any], memory: _LowPrecisionState, p: Tensor) -> None:
    momentum = state.get("momentum_buffer")
    if memory.weights.scaling is not None and memory.plain_class is torch.optim.SGD and momentum is not None:
        within = momentum.clamp(-_LARGEST, _LARGEST)
        state["momentum_buffer"] = memory.weights.rounded(p, within, memory.num_steps, draw=1)


def _lengthen(state: dict[str, Any]) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dtype == torch.float16:
            state[name] = value.float()


@contextlib.contextmanager
def _seemingly_float32(optimizer: torch.optim.Optimizer, weights: Weights) -> Iterator[None]:
    """Let loading cast state to float32 while entered: torch gives it the dtype of its parameter."""
    before = [(group, group["params"]) for group in optimizer.param_groups]
    for group, parameters in before:
        group["params"] = [stand_in(p, _without_memory(p)) if p in weights else p for p in parameters]
    try:
        yield
    finally:
        for group in optimizer.param_groups:
            group["params"] = [original(p) for p in group["params"]]
        for group, parameters in before:  # others now; an optimizer that holds this one may share these
            group["params"] = parameters
        state = {original(p): value for p, value in optimizer.state.items()}
        optimizer.state.clear()
        optimizer.state.update(state)


def _without_memory(p: Tensor) -> Tensor:
    """Return float32 zeros in the shape of `p`, sharded as it is, that take the memory of one."""
    local = as_local(p)
    return as_sharded(local.new_zeros((), dtype=torch.float32).expand(local.shape), p)  # type: ignore[no-any-return]


def with_counter(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict of `optimizer` with the number of its steps, from which the noise is made.

    Torch ignores the key.
    """
    memory: _LowPrecisionState | None = vars(optimizer).get(_MEMORY)
    if memory is None:
        return state_dict
    side: dict[str, Any] = {"version": 1, "num_steps": memory.num_steps}
    if memory.weights.scaling is not None:
        side["loss_scaling"] = memory.weights.scaling.state_dict()
    return {**state_dict, SIDE_KEY: side}


def load_counter(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Go on with the noise where the run that wrote `state_dict` stopped."""
    memory: _LowPrecisionState | None = vars(optimizer).get(_MEMORY)
    if memory is None:
        return
    if SIDE_KEY not in state_dict:  # distributed checkpoints leave it out
        memory.num_steps = num_steps_in(optimizer)
    else:
        memory.num_steps = state_dict[SIDE_KEY]["num_steps"]
        if memory.weights.scaling is not None:
            memory.weights.scaling.load_state_dict(state_dict[SIDE_KEY].get("loss_scaling", {}))
