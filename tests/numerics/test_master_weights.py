"""Float32 weights in two parts: how much is kept, and that what is written to disk is found again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_memsave.numerics.master_weights import join, split

BOUNDS = {torch.int8: 2.0**-15, torch.bfloat16: 2.0**-17}
every_dtype = pytest.mark.parametrize("dtype", BOUNDS)
floats = st.lists(st.floats(width=32), min_size=1, max_size=50)


@every_dtype
def test_the_error_is_below_the_written_bound(dtype):
    x = torch.randn(300_000) * torch.exp(5 * torch.randn(300_000))
    ties = torch.arange(1, 2, 2**-8) + 2**-8  # in the middle between two bfloat16 values
    x = torch.cat([x, ties, ties + 2**-23, ties - 2**-23])
    error = ((join(*split(x, dtype)) - x).abs() / x.abs()).double()
    assert float(error.max()) <= BOUNDS[dtype]
    assert float(error.max()) > BOUNDS[dtype] / 2.1
    assert float(((x.bfloat16().float() - x).abs() / x.abs()).max()) > 100 * BOUNDS[dtype]


@every_dtype
@given(floats)
@example([298 * 2.0**-149])  # its bfloat16 part is 0
def test_what_was_joined_splits_into_the_same_parts(dtype, values):
    rounded, correction = split(torch.tensor(values, dtype=torch.float32), dtype)
    again = split(join(rounded, correction), dtype)
    is_number = ~rounded.isnan()
    assert torch.equal(again[0][is_number], rounded[is_number])
    assert torch.equal(again[1][is_number], correction[is_number])
    assert again[0][~is_number].isnan().all()


@every_dtype
def test_the_network_computes_with_the_nearest(dtype):
    x = torch.randn(10_000)
    rounded, _ = split(x, dtype)
    assert torch.equal(rounded, join(*split(x, dtype)).bfloat16())
    assert ((rounded.float() - x).abs() <= (x.bfloat16().float() - x).abs() * 1.02).all()


@every_dtype
def test_what_is_not_finite_stays_so(dtype):
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, torch.finfo(torch.float32).max])
    found = join(*split(x, dtype))
    assert found[0] == x[0]
    assert found[1] == x[1]
    assert found[2].isnan()
    assert found[3] == 0
    assert found[4] > 3e38


def test_without_a_correction():
    x = torch.randn(10).bfloat16()
    assert torch.equal(join(x, None), x.float())


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_a_weight_that_is_set_to_zero_by_hand_is_zero(dtype):
    rounded, correction = split(torch.randn(100), dtype)
    rounded[:50] = 0
    joined = join(rounded, correction)
    assert joined[:50].eq(0).all()
    assert joined.isfinite().all()
