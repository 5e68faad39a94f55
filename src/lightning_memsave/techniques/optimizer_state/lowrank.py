"""Low-rank state: moments of the gradient in a subspace, which is found anew every 200 steps (GaLore).

A gradient G [N, M] with N <= M is multiplied by P^T [R, N], whose rows are its R leading left singular vectors; the
optimizer's own `step` is taken for a parameter [R, M] that is zero, and P times the result is added to the weights.
State: R * M for each moment and N * R for P, instead of N * M for each moment. With N > M from the other side.

Loss class: `changed`: what lies outside of the subspace is not learned until the subspace turns.

Source: Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", 2024
(https://arxiv.org/abs/2403.03507). Different: singular vectors by subspace iteration from a hashed start (Halko,
Martinsson, Tropp, 2011, https://arxiv.org/abs/0909.4061), any optimizer inside, weight decay outside of the subspace,
and no factor alpha: the learning rate is the optimizer's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_memsave.core.optimizers import stand_in, state_moved, step_one
from lightning_memsave.numerics.kbit import random_bits
from lightning_memsave.techniques.optimizer_state.codecs import Noise

PROJECTION = "projection"
_INTERVAL = 200  # steps between subspaces, as GaLore's
_MORE = 8  # columns beyond the rank while a subspace is looked for
_ITERATIONS = 2


class _Memory(Protocol):
    rank: int
    num_steps: int

    def noise_of(self, p: Tensor) -> Noise: ...


def _matrix(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)  # [N, M]


def is_worth_it(p: Tensor, rank: int) -> bool:
    """Whether a parameter has two dimensions that are larger than the rank."""
    return p.dim() >= 2 and min(_matrix(p).shape) > rank


def num_bytes(shape: torch.Size, rank: int, num_moments: int) -> int:
    """Bytes of the moments and the projection of a parameter that is worth it."""
    rows, columns = shape[0], shape.numel() // shape[0]
    return 4 * rank * (num_moments * max(rows, columns) + min(rows, columns))


def subspace(gradient: Tensor, rank: int, seed: int) -> Tensor:
    """Orthonormal columns [min(N, M), rank] that span the leading singular vectors of the shorter side of [N, M]."""
    wide = gradient.float() if gradient.shape[0] <= gradient.shape[1] else gradient.float().T  # [N, M], N <= M
    width = min(rank + _MORE, len(wide))
    bits = random_bits(seed, 0, -(-wide.shape[1] * width // 256), wide.device).view(-1)[: wide.shape[1] * width]
    start = bits.float().sub_(2.0**31).div_(2.0**31).view(-1, width)  # [M, width]
    basis: Tensor = torch.linalg.qr(wide @ start).Q  # [N, width]
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(wide @ torch.linalg.qr(wide.T @ basis).Q).Q
    inner: Tensor = torch.linalg.svd(basis.T @ wide, full_matrices=False).U  # [width, width]
    return basis @ inner[:, :rank]


def _project(projection: Tensor, values: Tensor) -> Tensor:
    """[N, M] -> [R, M], or [N, R] from the other side."""
    return projection.T @ values if values.shape[0] <= values.shape[1] else values @ projection


def _lift(projection: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return projection @ values if shape[0] <= shape[1] else values @ projection.T


def project_state(state: dict[str, Any], p: Tensor, rank: int) -> None:
    """Moments of whole gradients as those of a subspace, in place: the one that the first moment lies in."""
    if not is_worth_it(p, rank) or not state:
        return
    tensors = {n: _matrix(v).float() for n, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape}
    first = next(iter(tensors.values()))
    projection = subspace(first, rank, 0)
    for name, moment in tensors.items():
        # A square of a sum, with terms that are independent, is on average the sum of squares.
        state[name] = _project(projection if name in ("exp_avg", "momentum_buffer") else projection**2, moment)
    state[PROJECTION] = projection


def step_projected(
    step: Callable[[Any], Any], optimizer: Any, group: dict[str, Any], p: Tensor, memory: _Memory
) -> None:
    """Take `step` for `p` in its subspace."""
    assert p.grad is not None
    gradient, weights = _matrix(p.grad).float(), _matrix(p.detach())
    lr, decay = float(group["lr"]), float(group.get("weight_decay", 0.0))
    sign = -1.0 if group.get("maximize") else 1.0
    if decay and not _is_decoupled(optimizer, group):
        gradient = gradient + sign * decay * weights.float()
    state = optimizer.state[p]
    projection = state.pop(PROJECTION, None)  # an optimizer makes its state when there is none
    if projection is None or memory.num_steps % _INTERVAL == 0:
        projection = subspace(gradient, memory.rank, sum(memory.noise_of(p)) & 0xFFFFFFFF)
    projected = _project(projection, gradient)
    small = stand_in(p, torch.zeros_like(projected))
    small.grad = projected
    with state_moved(optimizer, p, small):
        step_one(step, optimizer, {**group, "weight_decay": 0.0}, small)
    optimizer.state[p][PROJECTION] = projection
    if decay and _is_decoupled(optimizer, group):
        p.mul_(1 - lr * decay)
    p.add_(_lift(projection, small.detach(), gradient.shape).view(p.shape))


def _is_decoupled(optimizer: Any, group: dict[str, Any]) -> bool:
    default = any(cls.__name__ in ("AdamW", "Lion") for cls in type(optimizer).__mro__)
    return bool(group.get("decoupled_weight_decay", default))
