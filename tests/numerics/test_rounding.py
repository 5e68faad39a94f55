"""Stochastic rounding to 16 bits: neighbours, unbiased, and the C kernels equal to the reference."""

from __future__ import annotations

import numpy as np
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


# ------------------------------------------------------------------------------- float16
def float16_neighbours(x):
    """The float16 values next to x (float64), below and above it, by numpy; equal where x is one of them."""
    near = x.numpy().astype("float16")
    down = np.where(near.astype("float64") > x.numpy(), np.nextafter(near, np.float16(-np.inf)), near)
    up = np.where(near.astype("float64") < x.numpy(), np.nextafter(near, np.float16(np.inf)), near)
    return torch.from_numpy(down.astype("float64")), torch.from_numpy(up.astype("float64"))


@pytest.mark.filterwarnings("ignore:overflow encountered in nextafter")  # of numpy, beside the largest
@given(st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=300), st.integers(0, 9))
def test_a_value_becomes_one_of_its_float16_neighbours(values, seed):
    x = torch.tensor(values)
    rounded = rounding.round_to_float16(x, seed).double()
    down, up = float16_neighbours(x.double())
    assert ((rounded == down) | (rounded == up)).all()
    assert rounded.isfinite().all()


def test_what_float16_holds_is_unchanged():
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    every = every[every.isfinite()].float()
    assert every.numel() > 63_000
    assert torch.equal(rounding.round_to_float16(every, 3).float(), every)


def test_what_is_beyond_float16_becomes_its_largest():
    x = torch.tensor([65504.5, 65536.0, -1e30, 65519.0])
    assert rounding.round_to_float16(x, 0).tolist() == [65504, 65504, -65504, 65504]


@pytest.mark.parametrize("size", [1.0, 2.0**-15, 2.0**-24])  # normal, below the smallest normal, below the spacing
def test_float16_is_unbiased(size):
    x = torch.rand(2000) * size
    mean = torch.stack([rounding.round_to_float16(x, seed).double() for seed in range(400)]).mean(0)
    down, up = float16_neighbours(x.double())
    error = (mean - x) / (up - down).clamp_min(2.0**-24)
    assert abs(float(error.mean())) < 4 * 0.5 / (400 * 2000) ** 0.5
    assert float(error.abs().max()) < 6 * 0.5 / 400**0.5


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_in_float16(bad):
    x = torch.randn(700)
    x[650] = bad
    assert rounding.round_to_float16(x, 0) is None
    assert kernels.round_to_float16(x, 0) is None


@pytest.mark.parametrize("scale", [3.0, 2.0**-15, 1e-12, 1e6])
@pytest.mark.parametrize("size", [1, 257, 300_000])
@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_the_float16_kernel_equals_the_reference(size, scale):
    x = torch.randn(size) * scale
    expected = rounding.round_to_float16(x, 7)
    assert torch.equal(native.round_to_float16(x, 7).view(torch.int16), expected.view(torch.int16))
