"""The kernels in C equal their references bit for bit, in any number of threads and after a fork."""

import math
import os

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memsave.numerics import bits, kbit, kernels, row_codes
from lightning_memsave.numerics.kernels import native

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
KINDS = {
    "normal": torch.randn,
    "relu": lambda n: torch.randn(n).relu(),
    "gelu": lambda n: torch.nn.functional.gelu(torch.randn(n)),
    "constant": lambda n: torch.full((n,), 0.3),
    "negative": lambda n: -torch.rand(n) - 5,
    "heavy tails": lambda n: torch.randn(n) / torch.randn(n).abs().clamp_min(1e-3),
    "denormal": lambda n: torch.randn(n) * 1e-39,
    "denormal relu": lambda n: (torch.randn(n) * 1e-44).relu(),
    "large": lambda n: torch.rand(n) * 3.39e38,
    "overflowing": lambda n: torch.randn(n) * 3e38,
    "zeros of both signs": lambda n: torch.zeros(n) * torch.randn(n),
    "few negative zeros": lambda n: torch.where(torch.rand(n) < 0.01, -0.0, torch.rand(n) * (torch.rand(n) < 0.5)),
}
floats = st.lists(st.floats(width=32), min_size=1, max_size=20)
any_kind = pytest.mark.parametrize("signed", [False, True], ids=["zeros", "signs"])
any_bits = pytest.mark.parametrize("width", kbit.BITS)
needs_compiler = pytest.mark.skipif(native.library() is None, reason="needs a C compiler")


def assert_equal_bit_for_bit(values, width, seed, signed, row=None):
    expected = kbit.quantize(values, width, seed, signed, row)
    found = native.quantize(values, width, seed, signed, row)
    if expected is None:
        assert found is None
        return
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    for dtype in DTYPES:
        decoded = native.dequantize(*expected, width, torch.empty(len(values), dtype=dtype), signed, row)
        reference = kbit.dequantize(*expected, width, torch.empty(len(values), dtype=dtype), signed, row)
        assert torch.equal(decoded.view(torch.uint8), reference.view(torch.uint8))


# ------------------------------------------------------------------------------- C equals the reference
@needs_compiler
@any_kind
@any_bits
@pytest.mark.parametrize("seed", [None, 2**32 - 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", KINDS)
def test_codes_equal_the_reference(name, dtype, seed, width, signed):
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    for size in (1, 255, 256, 1000):
        values = KINDS[name](size)
        values = values if name == "overflowing" else values.clamp(-limit, limit)
        assert_equal_bit_for_bit(values.to(dtype), width, seed, signed)


@needs_compiler
@any_kind
@any_bits
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [1, 2, 3, 17, 49, 64, 128, 192, 256, 257, 320, 768, 771])
def test_codes_in_rows_equal_the_reference(row, dtype, width, signed):
    values = torch.cat([torch.randn(row) * 10.0**power for power in range(-4, 4)])
    values[2 * row : 3 * row].relu_()
    for seed in (None, 7):
        assert_equal_bit_for_bit(values.to(dtype), width, seed, signed, row)


@needs_compiler
@any_kind
@any_bits
@settings(max_examples=60)
@given(values=floats, seed=st.none() | st.integers(0, 2**32 - 1))
def test_codes_of_any_floats_equal_the_reference(width, signed, values, seed):
    assert_equal_bit_for_bit(torch.tensor(values), width, seed, signed)


@needs_compiler
@any_kind
@any_bits
@settings(max_examples=60)
@given(patterns=st.lists(st.integers(-(2**15), 2**15 - 1), min_size=1, max_size=300))
def test_codes_of_any_bfloat16_equal_the_reference(width, signed, patterns):
    values = torch.tensor(patterns, dtype=torch.int16).view(torch.bfloat16)
    assert_equal_bit_for_bit(values, width, 3, signed)
    assert_equal_bit_for_bit(values.nan_to_num(0, 1, 1) / 2, width, 3, signed)  # all finite


@needs_compiler
@any_kind
@any_bits
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_range_from_nan_decodes_to_nan(dtype, width, signed):
    # What the kernels on CUDA write for a block that is not finite.
    ranges = torch.tensor([[math.nan, 0] * (2 if signed else 1)], dtype=torch.bfloat16)
    codes = torch.randint(0, 256, (1, 32 * width), dtype=torch.uint8)
    for module in (kbit, native):
        assert bool(module.dequantize(codes, ranges, width, torch.empty(256, dtype=dtype), signed).isnan().all())


@needs_compiler
@any_kind
def test_number_of_threads_does_not_show(signed, monkeypatch):
    monkeypatch.setattr(native, "_MIN_PER_THREAD", 256)
    values, mask = torch.randn(256 * 13 + 7), torch.rand(256 * 13 + 7) < 0.5
    found = []
    for threads in (1, 2, 3, 5):
        torch.set_num_threads(threads)
        codes, ranges = native.quantize(values, 4, 1, signed)
        decoded = native.dequantize(codes, ranges, 4, torch.empty_like(values), signed)
        packed = native.pack_mask(mask)
        found.append(
            (codes, ranges, decoded, packed, native.unpack_mask(packed, len(mask)), native.pack_positive(values))
        )
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True))


@needs_compiler
@any_kind
@pytest.mark.parametrize("place", [0, 1500, 256 * 13 + 6])
def test_every_thread_reports_what_is_not_finite(place, signed, monkeypatch):
    monkeypatch.setattr(native, "_MIN_PER_THREAD", 256)
    torch.set_num_threads(4)
    values = torch.randn(256 * 13 + 7)
    values[place] = math.inf
    assert native.quantize(values, 4, 1, signed) is None


@needs_compiler
def test_large_tensors_are_shared_between_threads(monkeypatch):
    torch.set_num_threads(2)
    pools = []
    pool = native._pool
    monkeypatch.setattr(native, "_pool", lambda threads: pools.append(threads) or pool(threads))
    values = torch.randn(2 * native._MIN_PER_THREAD + 300)
    assert_equal_bit_for_bit(values, 4, 1, False)
    assert set(pools) == {2}


# ------------------------------------------------------------------------------- tensors that are too short
@needs_compiler
@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_kernels_read_no_more_than_there_is(short, bits):
    codes, absmax, code_map = torch.zeros(1000 * bits // 8, dtype=torch.uint8), torch.ones(4), torch.arange(3.0)
    tensors = [codes[:-1] if short == 0 else codes, code_map, absmax[:-1] if short == 1 else absmax]
    with pytest.raises(ValueError, match=r"a kernel needs \d+ elements of a tensor that has \d+"):
        native.dequantize_from_map(*tensors, bits, 1000)
    with pytest.raises(ValueError, match="a kernel needs 125 elements of a tensor that has 124"):
        native.unpack_mask(codes[:124], 1000)
    values = torch.empty(1000)
    codes, ranges = native.quantize(torch.randn(1000), 4, 1)
    with pytest.raises(ValueError, match="a kernel needs"):
        native.dequantize(*((codes[:-1], ranges) if short else (codes, ranges[:-1])), 4, values)


@needs_compiler
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_codes_beyond_a_map_are_zero(bits):
    codes = torch.full((32 * bits // 8,), 255, dtype=torch.uint8)
    assert not native.dequantize_from_map(codes, torch.arange(3.0), torch.ones(1), bits, 32).any()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own():
    assert native._pool(2).submit(int).result(10) == 0
    if (child := os.fork()) == 0:
        is_done = False
        try:
            is_done = native._pool(2).submit(int).result(10) == 0
        finally:
            os._exit(0 if is_done else 1)
    assert os.waitpid(child, 0)[1] == 0


# ------------------------------------------------------------------------------- bits
SIZES = (0, 1, 7, 8, 9, 64, 1001)


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
def test_masks_and_their_set_bits_equal_the_reference(size):
    mask, values = torch.rand(size) < 0.3, torch.randn(size).relu()
    assert torch.equal(native.pack_mask(mask), bits.pack(mask, 1))
    assert torch.equal(native.pack_positive(values), bits.pack(values > 0, 1))
    assert torch.equal(native.unpack_mask(bits.pack(mask, 1), size), mask)
    assert torch.equal(native.set_bits(bits.pack(mask, 1)), mask.nonzero().view(-1))


@needs_compiler
def test_not_a_number_counts_as_positive():
    values = torch.tensor([math.nan, -math.inf, math.inf, -0.0, 1e-45, -1e-45])
    for dtype in (torch.float32, torch.float64):
        packed = native.pack_positive(values.to(dtype))
        expected = [True, False, True, False, True, False]
        assert native.unpack_mask(packed, 6).tolist() == expected


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [2.0, 1 / 0.9, 0.0])
def test_scaling_where_a_mask_holds_equals_the_reference(size, scale):
    values, mask = torch.randn(size), torch.rand(size) < 0.5
    values[:1] = math.inf
    found, expected = native.scale_where(mask, values, scale), bits.scale_where(mask, values, scale)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (37.3, 0.5 - 1.1), (-5.0, 3.0), (1e30, 0.0)])
def test_looking_up_equals_the_reference(size, scale, shift):
    values, table = torch.randn(size) * 10, torch.randn(100)
    values[:3] = torch.tensor([math.nan, math.inf, -math.inf])[:size]
    expected = bits.look_up(values.clone(), table, scale, shift)
    assert native.look_up(values, table, scale, shift) is values
    assert torch.equal(values.view(torch.int32)[1:], expected.view(torch.int32)[1:])
    assert size == 0 or (values[0].isnan() and expected[0].isnan())


@needs_compiler
@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1001])
@pytest.mark.parametrize("pair", [(0.0, 2.0), (0.0, -0.0), (math.nan, 1.0), (-3.0, -3.0)])
def test_tensors_of_two_values_equal_the_reference(size, pair):
    values = torch.where(torch.rand(size) < 0.3, *map(torch.tensor, pair))
    for flat in (values, values.view(torch.int32)):
        packed, both = native.pack_two(flat)
        assert packed.nbytes + both.nbytes == -(-size // 8) + 8
        back = native.unpack_two(packed, both, size)
        assert back.dtype == flat.dtype
        assert torch.equal(back.view(torch.int32), values.view(torch.int32))


@needs_compiler
@pytest.mark.parametrize("place", [0, 5, 999])
def test_a_third_value_anywhere_is_noticed(place):
    values = torch.where(torch.rand(1000) < 0.5, 1.0, 2.0)
    values[place] = 3.0
    assert native.pack_two(values) is None
    assert bits.pack_two(values) is None


# ------------------------------------------------------------------------------- fake tensors
@needs_compiler
def test_fake_tensors_have_the_shapes_of_real_ones():
    def all_of(values, mask):
        codes, ranges = native.quantize(values, 4, 1)
        mapped, absmax = native.quantize_to_map(values, torch.linspace(-1, 1, 16), 4, 3)
        packed = native.pack_mask(mask)
        return (
            *(codes, ranges, native.dequantize(codes, ranges, 4, torch.empty_like(values))),
            *(mapped, absmax, native.dequantize_from_map(mapped, torch.linspace(-1, 1, 16), absmax, 4, 1000)),
            *(packed, native.unpack_mask(packed, 1000), native.pack_positive(values)),
            *(native.scale_where(mask, values, 2.0), native.round_to_bfloat16(values, 1)),
            native.round_to_float16(values, 1),
        )

    real = all_of(torch.randn(1000), torch.rand(1000) < 0.5)
    with FakeTensorMode():
        fake = all_of(torch.empty(1000), torch.empty(1000, dtype=torch.bool))
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4095, 4096, 4097, 3 * 4096 + 17, 1 << 20])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_sums_are_those_of_float64_up_to_rounding(size, num_threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    x = torch.randn(size)
    total, magnitude = native.sums(x)
    exact = x.double()
    assert magnitude == pytest.approx(float(exact.abs().sum()), rel=1e-6)
    assert total == pytest.approx(float(exact.sum()), abs=1e-6 * magnitude)
    assert native.sums(x.flip(0).contiguous()) == pytest.approx((total, magnitude), rel=1e-6, abs=1e-6 * magnitude)


def test_a_sum_over_what_is_not_a_number_is_none():
    assert all(math.isnan(each) for each in native.sums(torch.tensor([1.0, math.nan])))
    assert native.sums(torch.tensor([1.0, math.inf])) == (math.inf, math.inf)


def assert_equal_with_nan(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("seed", [None, 0, 2**32 - 1])
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (1, 1), (5, 255), (3, 257), (4, 3, 9, 9), (2, 1024)])
@pytest.mark.parametrize("name", KINDS)
def test_rows_of_codes_equal_the_reference(name, shape, seed):
    torch.manual_seed(0)
    whole = KINDS[name](math.prod(shape)).view(shape)
    expected, found = row_codes.encode_rows(whole, seed), native.encode_rows(whole, seed)
    for a, b in zip(found, expected, strict=True):
        assert_equal_with_nan(a, b)
    for dtype in (torch.float32, torch.bfloat16):
        assert_equal_with_nan(native.decode_rows(*expected, dtype), row_codes.decode_rows(*expected, dtype))


@needs_compiler
@given(st.lists(floats, min_size=1, max_size=4), st.one_of(st.none(), st.integers(0, 2**32 - 1)))
def test_any_rows_equal_the_reference(rows, seed):
    whole = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    expected = row_codes.encode_rows(whole, seed)
    for a, b in zip(native.encode_rows(whole, seed), expected, strict=True):
        assert_equal_with_nan(a, b)
    assert_equal_with_nan(
        native.decode_rows(*expected, torch.bfloat16), row_codes.decode_rows(*expected, torch.bfloat16)
    )


@needs_compiler
def test_rows_that_do_not_lie_together_are_encoded_all_the_same():
    whole = torch.randn(6, 4, 5, 5).to(memory_format=torch.channels_last)
    codes, scales = kernels.encode_rows(whole, 3)
    assert all(map(torch.equal, (codes, scales), row_codes.encode_rows(whole, 3)))
    laid_out = codes.to(memory_format=torch.channels_last)
    decoded = kernels.decode_rows(laid_out, scales, torch.bfloat16)
    assert torch.equal(decoded, row_codes.decode_rows(codes, scales, torch.bfloat16))
    assert decoded.is_contiguous(memory_format=torch.channels_last)
