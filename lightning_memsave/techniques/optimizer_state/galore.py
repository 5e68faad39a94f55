"""GaLore, `OptimizerState(projection="galore")`: moments of the gradient in the subspace that holds most of it.

A gradient G [N, M] with N <= M is multiplied by P^T [R, N], whose rows are its R leading left singular vectors; the
optimizer's own `step` is taken for a parameter [R, M] that is zero, and P times the result is added to the weights.
With N > M from the other side. P is found anew every 200 steps (`projection.py`).

State: R * M for each moment and N * R for P, instead of N * M for each moment.

Loss class: `changed`: what lies outside of the subspace is not learned until the subspace turns.

Source: Zhao et al., "GaLore: Memory-Efficient LLM Training by Gradient Low-Rank Projection", 2024
(https://arxiv.org/abs/2403.03507). Different: singular vectors by subspace iteration from a hashed start (Halko,
Martinsson, Tropp, 2011, https://arxiv.org/abs/0909.4061), any optimizer inside, weight decay outside of the subspace,
and no factor alpha: the learning rate is the optimizer's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memsave.numerics.kbit import random_bits

_MORE = 8  # columns beyond the rank while a subspace is looked for
_ITERATIONS = 2
_LARGE = 1e15  # elements


def num_bytes(rows: int, rank: int) -> int:
    """Return bytes of P for gradients whose shorter side has so many rows."""
    return 4 * rows * rank


def begin(gradient: Tensor, rank: int, seed: int) -> Tensor:
    """Return orthonormal P [min(N, M), rank], the span of the leading singular vectors of [N, M]'s shorter side."""
    wide = gradient.float() if gradient.shape[0] <= gradient.shape[1] else gradient.float().T  # [N, M], N <= M
    largest = wide.abs().amax()
    wide = wide * torch.where(largest > _LARGE, 1 / largest, 1.0)  # its squares would overflow
    width = min(rank + _MORE, len(wide))
    bits = random_bits(seed, 0, -(-wide.shape[1] * width // 256), wide.device).view(-1)[: wide.shape[1] * width]
    start = bits.float().sub_(2.0**31).div_(2.0**31).view(-1, width)  # [M, width]
    basis: Tensor = torch.linalg.qr(wide @ start).Q  # [N, width]
    for _ in range(_ITERATIONS):
        basis = torch.linalg.qr(wide @ torch.linalg.qr(wide.T @ basis).Q).Q
    inner: Tensor = torch.linalg.svd(basis.T @ wide, full_matrices=False).U  # [width, width]
    return basis @ inner[:, :rank]


def matrix(kept: Tensor, gradient: Tensor, rank: int) -> Tensor:
    """Return P, which is kept as it is."""
    return kept


def update(projection: Tensor, step: Tensor, gradient: Tensor) -> Tensor:
    """Return the step in the subspace as one of the weights, [N, M]."""
    return projection @ step if gradient.shape[0] <= gradient.shape[1] else step @ projection.T
