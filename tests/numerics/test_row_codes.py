"""Rows as int8 codes with a power of two: exact where it can be, right on average elsewhere."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memsave.numerics.row_codes import decode_rows, encode_rows


def rows_of(seed, num_rows=9, width=70, spread=8.0):
    """Rows of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.empty(num_rows, 1).uniform_(-spread, spread, generator=generator))
    return torch.randn(num_rows, width, generator=generator) * sizes


def scale_by_search(row):
    """The smallest power of two that the definition allows; a slow reference in float64."""
    largest = float(row.abs().max())
    return min(2.0**k for k in range(-120, 121) if largest <= 127 * 2.0**k)


@given(st.integers(0, 1000))
def test_scales_are_the_smallest_powers_of_two_that_hold_the_row(seed):
    rows = rows_of(seed)
    codes, scales = encode_rows(rows, seed)
    assert scales.tolist() == [scale_by_search(row) for row in rows]
    assert codes.dtype == torch.int8
    assert codes.abs().max() <= 127


@pytest.mark.parametrize("largest", [127.0, 127.0000076, 126.99999, 128.0, 63.5, 63.500004, 1.0, 2.0**-140, 1e38])
def test_the_edges_of_a_scale(largest):
    row = torch.tensor([[largest, -largest / 3]])
    codes, scales = encode_rows(row, None)
    assert float(scales) == scale_by_search(row)
    assert (decode_rows(codes, scales, torch.float32) - row).abs().max() <= float(scales) / 2


@given(st.integers(0, 1000), st.integers(0, 2**32 - 1))
def test_the_error_is_below_a_step_and_to_the_nearest_half_of_one(seed, noise):
    rows = rows_of(seed)
    for chosen, largest in ((noise, 1.0), (None, 0.5)):
        codes, scales = encode_rows(rows, chosen)
        error = (decode_rows(codes, scales, torch.float32) - rows).abs() / scales.float()[:, None]
        assert error.max() <= largest


@given(st.integers(0, 1000), st.integers(0, 2**32 - 1))
def test_what_was_decoded_is_found_again_to_the_bit_with_any_noise(seed, noise):
    codes, scales = encode_rows(rows_of(seed), noise)
    codes[::2] //= 5  # rows whose codes are small: other codes may say the same
    first = decode_rows(codes, scales, torch.float32)
    for chosen in (None, noise + 1):
        again = encode_rows(first, chosen)
        assert torch.equal(decode_rows(*again, torch.float32), first)
        assert torch.equal(decode_rows(*again, torch.bfloat16), first.bfloat16())
    assert torch.equal(first.bfloat16().float(), first)  # bfloat16 holds them


def test_rounding_is_right_on_average_and_differs_between_elements():
    rows = rows_of(0, width=600)
    draws = torch.stack([decode_rows(*encode_rows(rows, seed), torch.float32) for seed in range(400)]).double()
    _, scales = encode_rows(rows, None)
    error = (draws.mean(0) - rows.double()) / scales.double()[:, None]
    assert error.abs().max() < 6 * 0.5 / 400**0.5
    assert abs(float(error.mean())) < 4 * 0.5 / (400 * rows.numel()) ** 0.5
    nearest = decode_rows(*encode_rows(rows, None), torch.float32).double()
    assert (nearest - rows).abs().max() > 10 * (draws.mean(0) - rows).abs().mean()  # it could fail
    between = (rows / scales.float()[:, None]).frac().abs()
    up = (draws - draws.min(0).values).sign()[:, (between > 0.4) & (between < 0.6)]
    assert torch.corrcoef(up.T[:50]).fill_diagonal_(0).abs().max() < 0.3


def test_rows_have_the_same_codes_by_themselves_and_in_chunks(monkeypatch):
    rows = rows_of(3, num_rows=40, width=300)
    whole = encode_rows(rows, 7)
    monkeypatch.setattr("lightning_memsave.numerics.row_codes._CHUNK", 900)
    assert all(map(torch.equal, encode_rows(rows, 7), whole))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (4,), (4, 3, 2, 2)])
def test_any_shape(shape):
    whole = torch.randn(shape)
    codes, scales = encode_rows(whole, 1)
    assert (codes.shape, scales.shape) == (whole.shape, shape[:1])
    assert decode_rows(codes, scales, torch.float32).shape == whole.shape


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_seen_and_others_are_not_touched(value):
    rows = rows_of(1)
    expected = decode_rows(*encode_rows(rows, None), torch.float32)
    rows[4, 2] = value
    found = decode_rows(*encode_rows(rows, None), torch.float32)
    assert found[4].isnan().all()
    others = [i for i in range(9) if i != 4]
    assert torch.equal(found[others], expected[others])
