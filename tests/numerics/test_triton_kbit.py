"""Triton against the reference: on a GPU, or on the CPU with Triton installed and `TRITON_INTERPRET=1`.

Triton's interpreter computes with numpy, which rounds every operation on its own, so it proves nothing about fused
multiply-adds; and it truncates when it stores bfloat16. Both are for the GPU.
"""

import math
import os

import pytest
import torch

from lightning_memsave.numerics import kbit, kernels

triton_kbit = pytest.importorskip("lightning_memsave.numerics.kernels.triton_kbit", reason="needs triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, about NaN and division by zero
if not INTERPRETED:
    pytestmark += [pytest.mark.gpu, pytest.mark.kernels]
SEEDS = (None, 1, 2**32 - 1)
BLOCKS = {
    "normal": lambda: torch.randn(256),
    "relu": lambda: torch.randn(256).relu(),
    "constant": lambda: torch.full((256,), 0.3),
    "negative": lambda: -torch.rand(256) - 5,
    "heavy tails": lambda: torch.randn(256) / torch.randn(256).abs().clamp_min(1e-3),
    "denormal": lambda: torch.randn(256) * 1e-39,
    "denormal relu": lambda: (torch.randn(256) * 1e-44).relu(),
    "large": lambda: torch.rand(256) * 3.39e38,
    "zeros of both signs": lambda: torch.zeros(256) * torch.randn(256),
    "normal again": lambda: torch.randn(256),
}
any_kind = pytest.mark.parametrize("signed", [False, True], ids=["zeros", "signs"])
any_bits = pytest.mark.parametrize("bits", kbit.BITS)
any_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])


def all_blocks(dtype=torch.float32):
    """One block of each, and a part of one."""
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return torch.cat([make() for make in BLOCKS.values()])[:-99].clamp(-limit, limit).to(DEVICE, dtype)


def assert_same_bits(found, expected):
    assert (found.dtype, found.shape, found.device) == (expected.dtype, expected.shape, expected.device)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@any_dtype
@any_kind
@any_bits
def test_codes_equal_the_reference(bits, signed, dtype):
    values = all_blocks(dtype)
    for seed in SEEDS:
        codes, ranges = triton_kbit.quantize(values, bits, seed, signed)
        expected_codes, expected_ranges = kbit.quantize(values, bits, seed, signed)
        assert_same_bits(codes, expected_codes)
        assert_same_bits(ranges, expected_ranges)


@any_dtype
@any_kind
@any_bits
def test_decoded_values_equal_the_reference(bits, signed, dtype):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates to bfloat16")
    codes, ranges = kbit.quantize(all_blocks(dtype), bits, 3, signed)
    codes.random_(0, 256)  # and so the last levels, beyond the largest value
    empty = torch.empty(all_blocks().shape, dtype=dtype, device=DEVICE)
    decoded = triton_kbit.dequantize(codes, ranges, bits, empty, signed)
    assert decoded is empty
    assert_same_bits(decoded, kbit.dequantize(codes, ranges, bits, torch.empty_like(empty), signed))


@any_kind
@pytest.mark.parametrize("size", [1, 16, 255, 256, 257, 1024, 1025])
def test_any_size(size, signed):
    values = torch.randn(size, device=DEVICE)
    codes, ranges = triton_kbit.quantize(values, 4, 7, signed)
    expected_codes, expected_ranges = kbit.quantize(values, 4, 7, signed)
    assert_same_bits(codes, expected_codes)
    assert_same_bits(ranges, expected_ranges)
    beyond = torch.full((size + 300,), 5.0, device=DEVICE)
    triton_kbit.dequantize(codes, ranges, 4, beyond[:size], signed)
    assert_same_bits(beyond[:size], kbit.dequantize(codes, ranges, 4, torch.empty_like(values), signed))
    assert bool((beyond[size:] == 5).all())


@any_kind
@any_bits
@pytest.mark.parametrize("row", [1, 3, 49, 64, 192, 257, 768])
def test_rows_equal_the_reference(row, bits, signed):
    values = torch.cat([torch.randn(row) * 10.0**power for power in range(-4, 4)]).to(DEVICE)
    found = triton_kbit.quantize(values, bits, 7, signed, row)
    expected = kbit.quantize(values, bits, 7, signed, row)
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)
    decoded = triton_kbit.dequantize(*expected, bits, torch.empty_like(values), signed, row)
    assert_same_bits(decoded, kbit.dequantize(*expected, bits, torch.empty_like(values), signed, row))


@any_kind
@any_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_that_are_not_finite_decode_to_nan(dtype, bits, signed):
    values = torch.randn(6 * 256, device=DEVICE).to(dtype)
    expected_codes, expected_ranges = kbit.quantize(values, bits, 3, signed)
    values[3], values[511], values[600], values[5 * 256 : 6 * 256] = math.nan, math.inf, -math.inf, math.nan
    codes, ranges = triton_kbit.quantize(values, bits, 3, signed)
    decoded = triton_kbit.dequantize(codes, ranges, bits, torch.empty_like(values), signed).view(6, 256)
    assert decoded.isnan().all(1).tolist() == decoded.isnan().any(1).tolist() == [True, True, True, False, False, True]
    assert_same_bits(codes[3:5], expected_codes[3:5])
    assert_same_bits(ranges[3:5], expected_ranges[3:5])


@any_bits
def test_a_block_whose_range_overflows_decodes_to_nan(bits):
    values = torch.randn(512, device=DEVICE)
    values[:2] = torch.tensor([-3e38, 3e38])
    decoded = triton_kbit.dequantize(*triton_kbit.quantize(values, bits, 3), bits, torch.empty_like(values))
    assert bool(decoded[:256].isnan().all())
    assert bool(decoded[256:].isfinite().all())


@pytest.mark.kernels
@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs compiled kernels")
class TestOnTheDevice:
    def test_is_what_cuda_uses_and_equals_the_cpu(self):
        values = torch.randn(300_001, device=DEVICE)
        assert kernels.implementation(values.device) == "triton"
        codes, ranges = kernels.quantize(values, 4, 5)
        expected_codes, expected_ranges = kernels.quantize(values.cpu(), 4, 5)
        assert_same_bits(codes.cpu(), expected_codes)
        assert_same_bits(ranges.cpu(), expected_ranges)

    def test_every_seed_is_one_compiled_kernel(self):
        values = torch.randn(4096, device=DEVICE)
        triton_kbit.quantize(values, 2, 3, True)
        caches = triton_kbit._quantize.device_caches
        count = sum(len(cache[0]) for cache in caches.values())
        for seed in (0, 1, 16, 2**31, 2**32 - 1):
            triton_kbit.quantize(values, 2, seed, True)
        assert sum(len(cache[0]) for cache in caches.values()) == count

    def test_offsets_beyond_32_bits(self):
        size, tail = 2**31 + 1280, 1280
        if torch.cuda.mem_get_info()[0] < 12 * 2**30:
            pytest.skip("needs 12 GiB")
        values = torch.zeros(size, dtype=torch.float16, device=DEVICE)
        values[-tail:] = torch.randn(tail, device=DEVICE)  # of rows of their own
        codes, ranges = triton_kbit.quantize(values, 4, None, row=256)
        tail_codes, tail_ranges = kbit.quantize(values[-tail:], 4, None, row=256)
        assert_same_bits(codes[-5:], tail_codes)
        assert_same_bits(ranges[-5:], tail_ranges)
        decoded = triton_kbit.dequantize(codes, ranges, 4, torch.empty_like(values), row=256)
        expected = kbit.dequantize(tail_codes, tail_ranges, 4, torch.empty_like(values[-tail:]), row=256)
        assert_same_bits(decoded[-tail:], expected)
        assert not decoded[:-tail].any()
