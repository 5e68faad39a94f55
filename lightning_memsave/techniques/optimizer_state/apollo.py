"""APOLLO, `OptimizerState(projection="apollo")`: a learning rate for each column, from moments in a random subspace.

What AdamW's moments do to a gradient G [N, M], N <= M, is nearly one factor per column. That needs no exact moments: G
is multiplied by P^T [R, N], random signs over sqrt(R), the optimizer's own `step` is taken for a parameter [R, M] that
is zero, and column j of -G gets sqrt(N / R) times the length of the step's column j. With N > M these are rows. With
rank 1 the whole matrix has one factor (APOLLO-Mini).

P comes from a hash of a number that is kept for 200 steps (`projection.py`), so that nothing but the moments takes
memory: R * M for each.

Loss class: `changed`: weights move along each step's gradient, of which only the length is the optimizer's.

Source: Zhu et al., "APOLLO: SGD-like Memory, AdamW-level Performance", 2024 (https://arxiv.org/abs/2412.05270).
Different: signs for normal numbers (Achlioptas, "Database-friendly random projections", 2003); the factor sqrt(N / R)
at every rank, which makes steps as long as the optimizer's own, so that its learning rate goes on to be right (the
paper: 1 at R = N / 4, sqrt(128) at R = 1); lengths of G itself, which is at hand, where the paper divides by those of
P^T G; and no limit on how fast norms grow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_memsave.numerics.kbit import random_bits

_BITS = 32  # that are random in each number of `random_bits`


def num_bytes(rows: int, rank: int) -> int:
    """Return bytes on the device of what P is made from."""
    return 0


def begin(gradient: Tensor, rank: int, seed: int) -> int:
    """Return what P is made from."""
    return seed


def matrix(kept: int, gradient: Tensor, rank: int) -> Tensor:
    """Return P: random signs over sqrt(rank), [min(N, M), rank]."""
    rows = min(gradient.shape)
    bits = random_bits(kept, 0, -(-rows * rank // (256 * _BITS)), gradient.device).view(-1)
    signs = torch.empty(_BITS, len(bits), device=gradient.device)
    for place, each in enumerate(signs):
        each.copy_(bits >> place & 1)
    return signs.view(-1)[: rows * rank].view(rows, rank).mul_(2).sub_(1).div_(math.sqrt(rank))


def update(projection: Tensor, step: Tensor, gradient: Tensor) -> Tensor:
    """Return -`gradient` [N, M] with columns as long as those of the step in the subspace, for as many elements."""
    rows, rank = projection.shape
    dim = None if rank == 1 else int(gradient.shape[0] > gradient.shape[1])
    length = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True)
    factor = torch.linalg.vector_norm(step, dim=dim, keepdim=True) / length
    return gradient * torch.where(length > 0, factor, 0.0).mul_(-math.sqrt(rows / rank))
