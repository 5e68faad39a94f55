"""Stochastic rounding to bfloat16: neighbours, unbiased, and the C kernel equal to the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memsave.numerics import kernels, rounding
from lightning_memsave.numerics.kernels import native


def neighbours(x):
    """The bfloat16 values next to x, towards zero and away from it."""
    down = torch.from_numpy((x.numpy().view("uint32") & 0xFFFF0000).view("float32").copy())
    up = torch.from_numpy(((x.numpy().view("uint32") & 0xFFFF0000) + 0x10000).view("float32").copy())
    return down, up


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=300), st.integers(0, 9)
)
def test_a_value_becomes_one_of_its_neighbours_and_stays_finite(values, seed):
    x = torch.tensor(values)
    rounded = rounding.round_to_bfloat16(x, seed).float()
    down, up = neighbours(x)
    assert ((rounded == down) | (rounded == up)).all()
    assert rounded.isfinite().all()


def test_what_bfloat16_holds_is_unchanged():
    x = torch.randn(5000).bfloat16().float()
    assert torch.equal(rounding.round_to_bfloat16(x, 3).float(), x)


def test_it_is_unbiased():
    x = torch.randn(2000)
    mean = torch.stack([rounding.round_to_bfloat16(x, seed).double() for seed in range(400)]).mean(0)
    down, up = neighbours(x)
    error = (mean - x) / (up - down)  # in units of the last place, each draw's standard deviation being 1/2 at most
    assert abs(float(error.mean())) < 4 * 0.5 / (400 * 2000) ** 0.5
    assert float(error.abs().max()) < 6 * 0.5 / 400**0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(bad):
    x = torch.randn(700)
    x[650] = bad
    assert rounding.round_to_bfloat16(x, 0) is None
    assert kernels.round_to_bfloat16(x, 0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("size", [1, 255, 257, 300_000])
@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_the_kernel_equals_the_reference(dtype, size):
    x = (torch.randn(size) * 3).to(dtype)
    expected = rounding.round_to_bfloat16(x, 7)
    assert torch.equal(native.round_to_bfloat16(x, 7).view(torch.int16), expected.view(torch.int16))
    largest = torch.full((300,), torch.finfo(torch.float32).max)
    assert torch.equal(native.round_to_bfloat16(largest, 1), rounding.round_to_bfloat16(largest, 1))
