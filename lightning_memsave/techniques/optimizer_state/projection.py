"""Moments of projected gradients: what `galore.py` and `apollo.py` have in common.

A parameter [N, M] whose sides are both longer than the rank R steps in a subspace of its shorter side: the optimizer's
own `step` is taken for a parameter [R, M] (or [N, R]) that is zero and has the projected gradient, and the method makes
weights' steps of it. Others keep whole moments in float32. Decoupled weight decay stays outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_memsave.techniques.optimizer_state import apollo, galore
from lightning_memsave.techniques.optimizer_state.moment_codecs import RoundingNoise
from lightning_memsave.torch_internals.optimizer_class import stand_in, state_moved, step_one

PROJECTION = "projection"
_INTERVAL = 200  # steps between subspaces, as GaLore's and APOLLO's


class _Method(Protocol):
    """A module that projects gradients."""

    def num_bytes(self, rows: int, rank: int) -> int: ...

    def begin(self, gradient: Tensor, rank: int, seed: int) -> Any: ...

    def matrix(self, kept: Any, gradient: Tensor, rank: int) -> Tensor: ...

    def update(self, projection: Tensor, step: Tensor, gradient: Tensor) -> Tensor: ...


METHODS: Mapping[str, _Method] = {"lowrank": galore, "apollo": apollo}
"""Methods by format of state."""


class _ProjectionState(Protocol):
    state_format: str
    rank: int
    num_steps: int

    def noise_of(self, p: Tensor) -> RoundingNoise: ...


def _matrix(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)  # [N, M]


def is_worth_it(p: Tensor, rank: int) -> bool:
    """Return whether a parameter has two dimensions that are larger than the rank."""
    return p.dim() >= 2 and min(_matrix(p).shape) > rank


def num_bytes(state_format: str, shape: torch.Size, rank: int, num_moments: int) -> int:
    """Return bytes of the moments and the projection of a parameter that is worth it."""
    sides = shape[0], shape.numel() // shape[0]
    return 4 * rank * num_moments * max(sides) + METHODS[state_format].num_bytes(min(sides), rank)


def _project(projection: Tensor, values: Tensor) -> Tensor:
    """Project [N, M] to [R, M], or to [N, R] from the other side."""
    return projection.T @ values if values.shape[0] <= values.shape[1] else values @ projection


def format_of(state: Mapping[str, Any]) -> str:
    """Return the format of saved moments that are projected."""
    return "lowrank" if isinstance(state[PROJECTION], Tensor) else "apollo"


def rank_of(state: Mapping[str, Any]) -> int:
    """Return the rank of saved moments that are projected."""
    moments = (value for name, value in state.items() if name != PROJECTION and isinstance(value, Tensor))
    return next(min(moment.shape) for moment in moments if moment.dim() == 2)


def shape_of(p: Tensor, state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the shape of the moments of `p` in its subspace, [R, M] or [N, R]."""
    (rows, columns), rank = _matrix(p).shape, rank_of(state)
    return (rank, columns) if rows <= columns else (rows, rank)


def shape_of_projection(p: Tensor, state: Mapping[str, Any]) -> tuple[int, int]:
    """Return the shape of a projection that is kept, [min(N, M), R]."""
    return min(_matrix(p).shape), rank_of(state)


def project_state(state: dict[str, Any], p: Tensor, state_format: str, rank: int) -> None:
    """Turn moments of whole gradients into those of a subspace, in place; the first moment determines the subspace."""
    if not is_worth_it(p, rank) or not state:
        return
    method = METHODS[state_format]
    tensors = {n: _matrix(v).float() for n, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape}
    first = next(iter(tensors.values()))
    if not first.any():  # as Adafactor's: the first gradient finds the subspace
        state.clear()
        return
    kept = method.begin(first, rank, 0)
    projection = method.matrix(kept, first, rank)
    for name, moment in tensors.items():
        # A square of a sum, with terms that are independent, is on average the sum of squares.
        state[name] = _project(projection if name in ("exp_avg", "momentum_buffer") else projection**2, moment)
    state[PROJECTION] = kept


def step_projected(
    step: Callable[[Any], Any], optimizer: Any, group: dict[str, Any], p: Tensor, memory: _ProjectionState
) -> None:
    """Take `step` for `p` in its subspace."""
    assert p.grad is not None
    method = METHODS[memory.state_format]
    gradient, weights = _matrix(p.grad).float(), _matrix(p.detach())
    lr, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
    if group.get("maximize"):
        gradient = -gradient
    if decay and not _is_decoupled(optimizer, group):
        gradient = gradient + decay * weights.float()
    state = optimizer.state[p]
    kept = state.pop(PROJECTION, None)  # an optimizer makes its state when there is none
    decays = decay and _is_decoupled(optimizer, group)
    if (kept is None or memory.num_steps % _INTERVAL == 0) and gradient.any():
        kept = method.begin(gradient, memory.rank, sum(memory.noise_of(p)) & 0xFFFFFFFF)
    if kept is None:  # zeros alone, as behind a head that starts at zero, name no subspace
        if decays:
            p.mul_(1 - lr * decay)
        return
    projection = method.matrix(kept, gradient, memory.rank)
    projected = _project(projection, gradient)
    small = stand_in(p, torch.zeros_like(projected))
    small.grad = projected
    with state_moved(optimizer, p, small):
        step_one(step, optimizer, {**group, "weight_decay": 0.0, "maximize": False}, small)
    optimizer.state[p][PROJECTION] = kept
    if decays:
        p.mul_(1 - lr * decay)
    p.add_(method.update(projection, small.detach(), gradient).view(p.shape))


def _is_decoupled(optimizer: Any, group: dict[str, Any]) -> bool:
    default = any(cls.__name__ in ("AdamW", "Lion") for cls in type(optimizer).__mro__)
    return bool(group.get("decoupled_weight_decay", default))
