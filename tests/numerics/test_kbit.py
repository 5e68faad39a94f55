import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lightning_memsave.numerics import kbit

BITS = (8, 4, 2)
SIZES = (1, 255, 256, 257, 1000)
ROWS = (1, 2, 3, 49, 64, 192, 256, 257, 320, 514, 768)
TINY = 2e-38  # what the smallest step and the smallest positive value may add to an error
DISTRIBUTIONS = {
    "normal": torch.randn,
    "relu": lambda n: torch.randn(n).relu(),
    "gelu": lambda n: torch.nn.functional.gelu(torch.randn(n)),
    "constant": lambda n: torch.full((n,), 0.3),
    "heavy tails": lambda n: torch.randn(n) / torch.randn(n).abs().clamp_min(1e-3),
    "zeros": torch.zeros,
    "negative": lambda n: -torch.rand(n) - 5,
    "denormal": lambda n: torch.randn(n) * 1e-39,
    "denormal relu": lambda n: (torch.randn(n) * 1e-44).relu(),
    "large": lambda n: torch.rand(n) * 3.39e38,
}
any_kind = pytest.mark.parametrize("signed", [False, True], ids=["zeros", "signs"])
any_bits = pytest.mark.parametrize("bits", BITS)
any_values = pytest.mark.parametrize("name", DISTRIBUTIONS)


def there_and_back(values, bits, seed=None, signed=False, row=None):
    codes, ranges = kbit.quantize(values, bits, seed, signed, row)
    return kbit.dequantize(codes, ranges, bits, torch.empty_like(values), signed, row)


def block_lengths(row):
    """Of the blocks of one row: as few as possible, of one size, the last one with what is left."""
    count = math.ceil(row / 256)
    size = math.ceil(row / count)
    return [size] * (count - 1) + [row - size * (count - 1)]


def largest_steps(values, ranges):
    """Per element, the larger of its block's steps, where all is one row."""
    steps = ranges.float()[:, 1::2].abs().amax(1)
    return steps.repeat_interleave(torch.tensor(block_lengths(len(values))))


# ------------------------------------------------------------------------------- an independent model, in float64
def bfloat16_neighbour(value, up):
    """The bfloat16 at or next to a float32, outwards."""
    exponent = max(math.frexp(value)[1] - 8, -133)
    return math.ldexp((math.ceil if up else math.floor)(math.ldexp(value, -exponent)), exponent)


def model_codes(values, bits, signed):
    """Ranges and float levels of one block, from the description of the format and none of its code."""
    values, top = values.astype(np.float64), 2**bits - 1

    def levels_of(part, top, first):
        if not len(part):
            return (0.0, 0.0), part
        low = bfloat16_neighbour(part.min(), up=False)
        step = bfloat16_neighbour(float(np.float32(part.max() - low) / np.float32(top)), up=True)
        return (low, step), first + np.clip((part - low) / (step or 1), 0, top)

    levels = np.zeros(len(values))
    if signed:
        half = 2 ** (bits - 1)
        ranges_n, levels[values <= 0] = levels_of(-values[values <= 0], half - 1, 0)
        ranges_p, levels[values > 0] = levels_of(values[values > 0], half - 1, half)
        return [*ranges_n, *ranges_p], levels
    if values.min() == 0 < values.max():
        (low, step), levels[values > 0] = levels_of(values[values > 0], top - 1, 1)
        return [low, -step], levels
    ranges, levels = levels_of(values, top, 0)
    return list(ranges), levels


@any_kind
@any_bits
@pytest.mark.parametrize("name", [name for name in DISTRIBUTIONS if not name.startswith("denormal")])
def test_agrees_with_a_model_of_the_format(name, bits, signed):
    values = DISTRIBUTIONS[name](256)
    codes, ranges = kbit.quantize(values, bits, None, signed)
    expected_ranges, levels = model_codes(values.numpy(), bits, signed)
    assert ranges[0].tolist() == expected_ranges
    unpacked = np.concatenate([codes[0].numpy() >> shift & 2**bits - 1 for shift in range(0, 8, bits)])
    assert np.abs(unpacked - levels).max() <= 0.5 + 1e-4


# ------------------------------------------------------------------------------- sizes and errors
@any_kind
@any_bits
@pytest.mark.parametrize("size", SIZES)
def test_size_is_the_stated_one(size, bits, signed):
    codes, ranges = kbit.quantize(torch.randn(size), bits, 0, signed)
    lengths = block_lengths(size)
    assert (codes.dtype, codes.shape) == (torch.uint8, (len(lengths), math.ceil(lengths[0] * bits / 8)))
    assert (ranges.dtype, ranges.shape) == (torch.bfloat16, (len(lengths), 4 if signed else 2))
    assert codes.nbytes + ranges.nbytes == kbit.coded_bytes(size, bits, signed)


@pytest.mark.parametrize(
    ("row", "bytes_8", "bytes_4", "bytes_2"),
    [
        (256, 260, 132, 68),
        (192, 196, 100, 52),
        (64, 68, 36, 20),
        (768, 780, 396, 204),
        (320, 328, 168, 88),
        (3, 7, 6, 5),
    ],
)
def test_bytes_of_a_row(row, bytes_8, bytes_4, bytes_2):
    for bits, expected in ((8, bytes_8), (4, bytes_4), (2, bytes_2)):
        codes, ranges = kbit.quantize(torch.randn(10 * row), bits, 0, row=row)
        assert codes.nbytes + ranges.nbytes == kbit.coded_bytes(10 * row, bits, row=row) == 10 * expected


# ------------------------------------------------------------------------------- rows
@any_kind
@any_bits
@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_coded_by_itself(row, bits, signed):
    rows = torch.randn(5, row) * torch.tensor([1.0, 1e6, 1e-6, 0.0, 1e-3])[:, None]
    together = kbit.quantize(rows.flatten(), bits, None, signed, row)
    alone = [kbit.quantize(values, bits, None, signed) for values in rows]
    for found, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.equal(found, torch.cat(parts))
    assert torch.equal(
        kbit.dequantize(*together, bits, torch.empty(5 * row), signed, row),
        torch.cat([there_and_back(values, bits, None, signed) for values in rows]),
    )


@any_bits
@settings(max_examples=60)
@given(values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=600))
def test_the_noise_in_a_row_is_bounded_by_its_deviations(bits, values):
    """Size of a block / (2 top^2) times the sum of squares around the mean, which is 0 here; ranges round outwards."""
    row = torch.tensor(values) - torch.tensor(values).mean()
    _, ranges = kbit.quantize(row, bits, 0)
    keeps_zero = bool(ranges[:, 1].signbit().any())  # which takes one level
    top = 2**bits - (2 if keeps_zero else 1)
    variance = (torch.tensor(block_lengths(len(row))) * ranges[:, 1].double().square() / 4).sum()
    assert variance <= 1.06 * block_lengths(len(row))[0] / (2 * top**2) * row.double().square().sum() + TINY


@any_kind
@any_bits
@any_values
@pytest.mark.parametrize("seed", [None, 0, 2**32 - 1])
def test_error_is_below_a_step(name, bits, signed, seed):
    for size in SIZES:
        values = DISTRIBUTIONS[name](size)
        codes, ranges = kbit.quantize(values, bits, seed, signed)
        decoded = kbit.dequantize(codes, ranges, bits, torch.empty_like(values), signed)
        error = (decoded.double() - values.double()).abs()
        bound = largest_steps(values, ranges).double() * (1 if seed is not None else 0.5)
        assert bool((error <= bound * (1 + 1e-4) + values.double().abs() * 1e-6 + TINY).all())


@any_kind
@any_bits
@settings(max_examples=60)
@given(values=st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=20), seed=st.integers(0, 99))
def test_error_is_below_a_step_for_any_floats(bits, signed, values, seed):
    values = torch.tensor(values)
    codes, ranges = kbit.quantize(values, bits, seed, signed)
    decoded = kbit.dequantize(codes, ranges, bits, torch.empty_like(values), signed)
    scale = values.double().abs().max()
    assert bool(
        (decoded.double() - values.double()).abs().le(largest_steps(values, ranges) + scale * 1e-6 + TINY).all()
    )


@pytest.mark.parametrize(
    ("bits", "signed", "bound"),
    [(8, False, 0.0092), (4, False, 0.16), (2, False, 0.84), (8, True, 0.0095), (4, True, 0.17), (2, True, 1.2)],
)
def test_relative_error_on_normal_values(bits, signed, bound):
    values = torch.randn(256 * 400)
    decoded = there_and_back(values, bits, seed=1, signed=signed)
    found = float((decoded - values).norm() / values.norm())
    assert 0.8 * bound < found < bound


# ------------------------------------------------------------------------------- no bias
@any_kind
@any_bits
@pytest.mark.parametrize("name", ["normal", "relu", "gelu", "constant", "heavy tails"])
def test_stochastic_rounding_is_unbiased(name, bits, signed):
    seeds = 200
    values = DISTRIBUTIONS[name](512)
    drawn = torch.stack([there_and_back(values, bits, kbit.mix(seed), signed) for seed in range(seeds)]).double()
    _, ranges = kbit.quantize(values, bits, 0, signed)
    steps = largest_steps(values, ranges).double()
    deviations = (drawn.mean(0) - values.double()).abs()
    standard_errors = drawn.std(0) / seeds**0.5 + steps * 2 / seeds  # an element near a level may never have left it
    assert bool((deviations <= 5 * standard_errors).all())
    overall = (drawn.mean(0) - values.double()).sum()
    assert abs(overall) <= 5 * drawn.var(0).div(seeds).sum().sqrt() + 1e-5 * steps.sum()


def test_nearest_rounding_is_biased_where_stochastic_is_not():
    values = torch.cat([torch.tensor([0.0, 3.0]), torch.full((254,), 0.2)]) - 1
    assert float(there_and_back(values, 2).mean() - values.mean()) < -0.15
    found = [float(there_and_back(values, 2, seed).mean() - values.mean()) for seed in range(300)]
    assert abs(sum(found) / len(found)) < 0.01


# ------------------------------------------------------------------------------- preserved zeros and signs
@any_bits
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", ["relu", "denormal relu", "zeros", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_stay_zero_and_positives_positive(name, bits, seed, dtype):
    values = DISTRIBUTIONS[name](1000)
    values[::3] = 0  # in every block
    values = values.clamp_max(torch.finfo(dtype).max).to(dtype)
    decoded = there_and_back(values, bits, seed)
    assert torch.equal(decoded > 0, values > 0)
    assert torch.equal(decoded == 0, values == 0)


@any_bits
@any_values
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_signs_survive(name, bits, seed, dtype):
    limit = torch.finfo(dtype).max
    for size in SIZES:
        values = DISTRIBUTIONS[name](size).clamp(-limit, limit).to(dtype)
        decoded = there_and_back(values, bits, seed, signed=True)
        assert torch.equal(decoded > 0, values > 0)
        assert not decoded[values == 0].any()


@settings(max_examples=100)
@given(values=st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=1, max_size=20), bits=st.sampled_from(BITS))
def test_signs_survive_for_any_floats(values, bits):
    values = torch.tensor(values)
    assert torch.equal(there_and_back(values, bits, 5, signed=True) > 0, values > 0)


# ------------------------------------------------------------------------------- edges of the numbers
@any_kind
@any_bits
@pytest.mark.parametrize("intruder", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 255, 256, 299])
def test_values_that_are_not_finite_are_refused(intruder, place, bits, signed):
    values = torch.randn(300)
    values[place] = intruder
    assert kbit.quantize(values, bits, 0, signed) is None


@any_bits
def test_ranges_that_overflow_are_refused(bits):
    wide, low = torch.tensor([-3e38, 3e38]), torch.tensor([torch.finfo(torch.float32).min, 0.0])
    assert kbit.quantize(wide, bits, 0) is None
    assert kbit.quantize(low, bits, 0) is None
    assert kbit.quantize(torch.tensor([1e300], dtype=torch.float64), bits, 0) is None


@any_kind
@any_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_decodes_beyond_the_dtype_saturates(dtype, bits, signed):
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    for values in (torch.linspace(0, 1, 300), torch.linspace(0.5, 1, 300)):
        values = (values.double() * limit).clamp_max(limit).to(dtype)
        for seed in range(20):
            assert bool(there_and_back(values, bits, seed, signed).isfinite().all())


@any_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_count_as_their_float32_values(dtype, signed):
    values = torch.randn(300).to(dtype)
    codes, ranges = kbit.quantize(values, 4, 9, signed)
    expected_codes, expected_ranges = kbit.quantize(values.float(), 4, 9, signed)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(ranges, expected_ranges)
    decoded = kbit.dequantize(codes, ranges, 4, torch.empty(300), signed)
    assert torch.equal(kbit.dequantize(codes, ranges, 4, torch.empty_like(values), signed), decoded.to(dtype))


@any_kind
@pytest.mark.parametrize("chunk", [1 << 8, 1 << 12])
def test_chunks_do_not_show(chunk, signed, monkeypatch):
    values = torch.randn(1024 * 256 + 700)
    codes, ranges = kbit.quantize(values, 4, 3, signed)
    decoded = kbit.dequantize(codes, ranges, 4, torch.empty_like(values), signed)
    monkeypatch.setattr(kbit, "_CHUNK", chunk)
    found_codes, found_ranges = kbit.quantize(values, 4, 3, signed)
    assert torch.equal(found_codes, codes)
    assert torch.equal(found_ranges, ranges)
    assert torch.equal(kbit.dequantize(codes, ranges, 4, torch.empty_like(values), signed), decoded)


def test_a_row_s_last_block_is_filled_with_its_last_element():
    values = torch.randn(2, 301)  # 151 and 150
    codes, ranges = kbit.quantize(values.flatten(), 4, 3, row=301)
    filled_codes, filled_ranges = kbit.quantize(torch.cat([values, values[:, -1:]], 1).flatten(), 4, 3, row=302)
    assert torch.equal(codes, filled_codes)
    assert torch.equal(ranges, filled_ranges)


# ------------------------------------------------------------------------------- the dither
@given(value=st.integers(0, 2**32 - 1))
def test_both_hashes_are_one(value):
    assert kbit._mix(torch.tensor([value])).item() == kbit.mix(value)


def test_hash_is_the_published_one():
    # https://nullprogram.com/blog/2018/07/31/: a bijection of 32 bits, that keeps 0
    assert kbit.mix(0) == 0
    assert len({kbit.mix(value) for value in range(100_000)}) == 100_000
    flips = [(kbit.mix(value) ^ kbit.mix(value ^ 1 << bit)).bit_count() for value in range(200) for bit in range(32)]
    assert abs(sum(flips) / len(flips) - 16) < 0.2  # one bit in changes half of the bits out


def test_dither_is_the_hash_of_seed_block_and_element():
    found = kbit._dither(77, 5, 3, torch.device("cpu"))
    for block, element in ((0, 0), (1, 200), (2, 255)):
        expected = kbit.mix((kbit.mix(5 + block ^ 77) + element * 0x9E3779B9) % 2**32) >> 8
        assert found[block, element].item() == expected / 2**24


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_dither_is_uniform_and_uncorrelated(seed):
    drawn = kbit._dither(seed, 0, 2000, torch.device("cpu")).double()
    few = 5 / drawn.numel() ** 0.5  # standard errors of a mean of numbers of variance 1
    assert drawn.min() >= 0
    assert drawn.max() < 1
    normal = (drawn - 0.5) * 12**0.5
    assert abs(normal.mean()) < few
    assert abs(normal.square().mean() - 1) < few
    counts = torch.histc(drawn.float(), 64, 0, 1).double() / drawn.numel() * 64 - 1
    assert counts.abs().max() < few * 8
    flat = normal.view(-1)
    for lag in (1, 2, 3, 16, 64, 128, 255, 256, 257, 512):
        assert abs((flat[lag:] * flat[:-lag]).mean()) < few
    other = (kbit._dither(seed ^ 1, 0, 2000, torch.device("cpu")).double() - 0.5) * 12**0.5
    assert abs((normal * other).mean()) < few
