"""Two factors of a matrix: the best ones of a rank, from its singular values, scaled to the size of the matrix.

The factors [N, R] and [M, R] stand below each other, [N + M, R]; the matrix is the first times the second transposed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SMALLEST = 1e-6  # of the largest singular value; below, float32 has no digit of it


def factors_of(matrix: Tensor, rank: int) -> Tensor:
    """Return factors [N + M, R] of a matrix [N, M], for R up to its shorter side.

    Their product is the best approximation of that rank, times what gives it the Frobenius norm of the matrix. That is
    1 where the matrix has no higher rank. Both factors have columns of equal norm: the roots of the singular values.
    Where a singular value is zero, the column on the longer side is zero and the other one is not, so that training can
    use it; a product of two zeros would have no gradient.

    >>> matrix = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    >>> first, second = factors_of(matrix, 1).split([2, 2])
    >>> first @ second.T
    tensor([[0., 0.],
            [0., 5.]])
    """
    rows, columns = matrix.shape
    whole = matrix if rows <= columns else matrix.T  # [S, L]: the shorter side first
    whole = whole.double()
    values, basis = torch.linalg.eigh(whole @ whole.T)  # [S, S]: a tenth of the time of `svd` for a wide matrix
    values, basis = values.flip(0)[:rank].clamp_min(0).sqrt(), basis.flip(1)[:, :rank]  # [R], [S, R]
    is_seen = values > _SMALLEST * values[0]
    seen = values * is_seen
    scale = (whole.square().sum() / seen.square().sum()).nan_to_num(1.0).sqrt()
    root = (seen * scale).sqrt()  # [R]
    along = whole.T @ basis / seen.where(is_seen, 1.0) * root  # [L, R]; zero where nothing is seen
    unused = root.sum() / is_seen.sum().clamp_min(1)
    unused = unused.where(unused > 0, 1.0)
    across = basis * root.where(is_seen, unused)  # [S, R]
    both = (across, along) if rows <= columns else (along, across)
    return torch.cat(both).to(matrix.dtype)
