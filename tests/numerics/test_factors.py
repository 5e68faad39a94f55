"""Factors of a matrix against its singular values from LAPACK."""

from __future__ import annotations

import pytest
import torch

from lightning_memsave.numerics.factors import factors_of


@pytest.mark.parametrize(("rows", "columns", "rank"), [(5, 9, 3), (9, 5, 3), (16, 16, 16), (40, 30, 1), (1, 8, 1)])
def test_the_product_is_the_best_of_its_rank_with_the_norm_of_the_matrix(rows, columns, rank):
    matrix = torch.randn(rows, columns, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    best = (u[:, :rank] * s[:rank]) @ v[:rank]
    factors = factors_of(matrix, rank)
    assert factors.shape == (rows + columns, rank)
    first, second = factors.split([rows, columns])
    torch.testing.assert_close(first @ second.T, best * (matrix.norm() / best.norm()))
    torch.testing.assert_close(first.norm(dim=0), second.norm(dim=0))
    torch.testing.assert_close((first @ second.T).norm(), matrix.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_matrix_of_that_rank_is_found_again_and_is_not_scaled(dtype):
    first, second = torch.randn(12, 3, dtype=torch.float64), torch.randn(20, 3, dtype=torch.float64)
    matrix = (first @ second.T).to(dtype)
    a, b = factors_of(matrix, 3).split([12, 20])
    assert a.dtype == dtype
    error = {torch.float32: 1e-6, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype]
    assert (a.double() @ b.double().T - matrix.double()).norm() <= error * matrix.double().norm()


@pytest.mark.parametrize(("rows", "columns"), [(6, 10), (10, 6)])
def test_of_what_has_no_singular_value_one_side_is_zero_alone(rows, columns):
    """Else training could not use it: the gradient of each factor is a product with the other."""
    matrix = torch.randn(rows, 2) @ torch.randn(2, columns)
    factors = factors_of(matrix, 4)
    first, second = factors.split([rows, columns])
    torch.testing.assert_close(first @ second.T, matrix)
    norms = torch.stack([first.norm(dim=0), second.norm(dim=0)])
    assert ((norms == 0).sum(0) == torch.tensor([0, 0, 1, 1])).all()
    assert torch.linalg.matrix_rank(first if rows < columns else second) == 4
    zero = factors_of(torch.zeros(rows, columns), 3)
    assert zero.isfinite().all()
    assert (zero.norm(dim=0) > 0).all()
    assert not (zero[:rows] @ zero[rows:].T).any()
