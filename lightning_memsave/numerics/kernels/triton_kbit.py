"""The CUDA kernels in Triton, equal bit for bit to `kbit.py`.

Every product and sum rounds on its own, as in the reference: contraction into fused multiply-adds is off
(`enable_fp_fusion=False`), and divisions round to the nearest (`div_rn`). A range is one 32-bit word: the bfloat16 of
its lower end in the lower half, that of its step in the upper.

Whether all values are finite is not asked, since the host would have to wait for the answer: a block that is not
finite gets NaN for its lower ends, and decodes to NaN.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_memsave.numerics.kbit import Blocks

_PER_PROGRAM = 4  # blocks; a program is one warp, so that no reduction leaves it
_SMALLEST_STEP = tl.constexpr(2.0**-126)
_SMALLEST_POSITIVE = tl.constexpr(1e-38)
_OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
if torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1":  # which do not know it
    _OPTIONS["enable_reflect_ftz"] = False  # else a division flushes subnormal steps to zero
_NAN_RANGE = tl.constexpr(0x7FC0)  # from NaN by steps of 0


def quantize(
    flat: Tensor, bits: int, seed: int | None, signed: bool = False, row: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize as `kbit.quantize` does, but a block that is not finite is coded all the same, and decoded as NaN."""
    flat = flat.float() if flat.dtype == torch.float64 else flat
    is_bfloat16 = flat.dtype == torch.bfloat16
    blocks = Blocks.of_rows(row or flat.numel())
    num_blocks = blocks.count(flat.numel())
    codes = torch.empty(num_blocks, blocks.num_bytes(bits), dtype=torch.uint8, device=flat.device)
    ranges = torch.empty(num_blocks, 4 if signed else 2, dtype=torch.bfloat16, device=flat.device)
    with torch.cuda.device_of(flat):  # Triton launches on the current device
        _quantize[(triton.cdiv(num_blocks, _PER_PROGRAM),)](
            *(flat.view(torch.int16) if is_bfloat16 else flat, codes, ranges.view(torch.int32)),
            *(num_blocks, blocks.row, blocks.per_row),
            ((seed or 0) ^ 2**31) - 2**31,  # the seed's 32 bits as a signed integer
            *_sizes(blocks, bits),
            *(bits, signed, seed is not None, is_bfloat16, blocks.row % blocks.size == 0, _PER_PROGRAM),
            **_OPTIONS,
        )
    return codes, ranges


def dequantize(
    codes: Tensor, ranges: Tensor, bits: int, out: Tensor, signed: bool = False, row: int | None = None
) -> Tensor:
    """Dequantize as `kbit.dequantize` does."""
    target = torch.empty_like(out, dtype=torch.float32) if out.dtype == torch.float64 else out
    blocks = Blocks.of_rows(row or out.numel())
    with torch.cuda.device_of(codes):
        _dequantize[(triton.cdiv(len(codes), _PER_PROGRAM),)](
            *(codes, ranges.view(torch.int32), target, len(codes), blocks.row, blocks.per_row),
            *_sizes(blocks, bits),
            *(bits, signed, torch.finfo(target.dtype).max, _PER_PROGRAM),
            **_OPTIONS,
        )
    return out if target is out else out.copy_(target)


def _sizes(blocks: Blocks, bits: int) -> tuple[int, int, int]:
    """Return elements and bytes of a block and the power of two that holds the bytes."""
    num_bytes = blocks.num_bytes(bits)
    return blocks.size, num_bytes, triton.next_power_of_2(num_bytes)


# ------------------- kernels: values and codes are [blocks, 8 // bits, bytes], a row per place inside the bytes
@triton.jit(do_not_specialize=["seed"])
def _quantize(
    x,
    codes,
    ranges,
    num_blocks,
    row,
    per_row,
    seed,
    size: tl.constexpr,
    num_bytes: tl.constexpr,
    padded_bytes: tl.constexpr,
    bits: tl.constexpr,
    signed: tl.constexpr,
    stochastic: tl.constexpr,
    is_bfloat16: tl.constexpr,
    are_full: tl.constexpr,
    per_program: tl.constexpr,
):
    block, shift, byte, element = _places(bits, num_bytes, padded_bytes, per_program)
    block_exists = block < num_blocks
    start, length = _span(block, row, per_row, size)
    is_padded: tl.constexpr = (8 // bits) * padded_bytes > size
    if not are_full:
        place = tl.minimum(element, length[:, None, None] - 1)  # filled up with the last element
    elif is_padded:
        place = tl.minimum(element, size - 1)
    else:
        place = element  # one after the other, which is read 128 bits at a time
    raw = tl.load(x + start[:, None, None] + place, mask=block_exists[:, None, None], other=0)
    values = _from_bits(raw.to(tl.int32) << 16) if is_bfloat16 else raw.to(tl.float32)
    above = values > 0
    finite = tl.max(tl.max(_bits(values) & 0x7FFFFFFF, axis=2), axis=1) < 0x7F800000  # [blocks]
    if signed:
        top = 2.0 ** (bits - 1) - 1
        magnitudes = tl.abs(values)
        low_n, step_n = _range(magnitudes, ~above, top)
        low_p, step_p = _range(magnitudes, above, top)
        finite &= _is_finite(low_n) & _is_finite(step_n) & _is_finite(low_p) & _is_finite(step_p)
        tl.store(ranges + 2 * block, tl.where(finite, _word(low_n, step_n), _NAN_RANGE), mask=block_exists)
        tl.store(ranges + 2 * block + 1, tl.where(finite, _word(low_p, step_p), _NAN_RANGE), mask=block_exists)
        low = tl.where(above, low_p[:, None, None], low_n[:, None, None])
        inverse = tl.where(above, _inverse(step_p)[:, None, None], _inverse(step_n)[:, None, None])
        code = _level(magnitudes, low, inverse, top, block, element, seed, stochastic)
        code += tl.where(above, 2 ** (bits - 1), 0)
    else:
        smallest, largest = _smallest(values), _largest(values)
        keeps_zero = (smallest == 0) & (largest > 0)  # [blocks]
        top = tl.where(keeps_zero, 2.0**bits - 2, 2.0**bits - 1)
        smallest = tl.where(keeps_zero, _smallest(tl.where(above, values, float("inf"))), smallest)
        low, step = _rounded_range(smallest, largest, top)
        finite &= _is_finite(low) & _is_finite(step)
        word = _word(low, step) | tl.where(keeps_zero, -(2**31), 0)
        tl.store(ranges + block, tl.where(finite, word, _NAN_RANGE), mask=block_exists)
        low, inverse, top = low[:, None, None], _inverse(step)[:, None, None], top[:, None, None]
        code = _level(values, low, inverse, top, block, element, seed, stochastic)
        code += (above & keeps_zero[:, None, None]).to(tl.int32)  # a zero is below the range, so its code is 0
    code <<= shift
    if is_padded:
        code = tl.where(element < size, code, 0)
    packed = tl.sum(code, axis=1)  # [blocks, bytes]
    is_there = block_exists[:, None] & (byte < num_bytes)
    tl.store(codes + block[:, None] * num_bytes + byte, packed.to(tl.uint8), mask=is_there)


@triton.jit
def _dequantize(
    codes,
    ranges,
    out,
    num_blocks,
    row,
    per_row,
    size: tl.constexpr,
    num_bytes: tl.constexpr,
    padded_bytes: tl.constexpr,
    bits: tl.constexpr,
    signed: tl.constexpr,
    limit: tl.constexpr,
    per_program: tl.constexpr,
):
    block, shift, byte, element = _places(bits, num_bytes, padded_bytes, per_program)
    exists = block < num_blocks
    is_there = exists[:, None] & (byte < num_bytes)
    packed = tl.load(codes + block[:, None] * num_bytes + byte, mask=is_there, other=0).to(tl.int32)
    code = (packed[:, None, :] >> shift) & (2**bits - 1)
    if signed:
        above = code >= 2 ** (bits - 1)
        word_n = tl.load(ranges + 2 * block, mask=exists, other=0)[:, None, None]
        word_p = tl.load(ranges + 2 * block + 1, mask=exists, other=0)[:, None, None]
        low = tl.where(above, _low(word_p), _low(word_n))
        step = tl.where(above, _step(word_p), _step(word_n))
        value = low + step * tl.where(above, code - 2 ** (bits - 1), code).to(tl.float32)
        value = tl.where(above, _at_least_positive(value), 0.0 - value)
    else:
        word = tl.load(ranges + block, mask=exists, other=0)[:, None, None]
        keeps_zero = word < 0
        value = _low(word) + _step(word) * tl.where(keeps_zero, code - 1, code).to(tl.float32)
        value = tl.where(keeps_zero, tl.where(code > 0, _at_least_positive(value), 0.0), value)
    value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))  # comparisons keep NaN
    start, length = _span(block, row, per_row, size)
    is_stored = is_there[:, None, :] & (element < length[:, None, None])
    tl.store(out + start[:, None, None] + element, value.to(out.dtype.element_ty), mask=is_stored)


@triton.jit
def _places(bits: tl.constexpr, num_bytes: tl.constexpr, padded_bytes: tl.constexpr, per_program: tl.constexpr):
    """Return a program's blocks, [blocks]; shifts in a byte, [1, lanes, 1]; bytes, [1, bytes]; elements of a block."""
    block = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, per_program)
    lane, byte = tl.arange(0, 8 // bits)[None, :, None], tl.arange(0, padded_bytes)[None, :]
    return block, lane * bits, byte, lane * num_bytes + byte[:, None, :]


@triton.jit
def _span(block, row, per_row, size: tl.constexpr):
    """Return where blocks begin, and how many elements they have; both [blocks]."""
    within = block % per_row * size
    return block // per_row * row + within, tl.minimum(row - within, size)


@triton.jit
def _range(values, belongs, top):
    """Return lower end, rounded down, and step, rounded up to bfloat16, of values that belong, [blocks]; or zeros."""
    low = _smallest(tl.where(belongs, values, float("inf")))
    return _rounded_range(low, _largest(tl.where(belongs, values, -float("inf"))), top)


@triton.jit
def _rounded_range(low, high, top):
    exists = low <= high
    low = _to_bfloat16(tl.where(exists, low, 0.0), False)
    step = _to_bfloat16(tl.math.div_rn(tl.where(exists, high, 0.0) - low, top), True)
    return low, tl.where((step > 0) & (step < _SMALLEST_STEP), _SMALLEST_STEP, step)


@triton.jit
def _inverse(step):
    return tl.where(step > 0, tl.math.div_rn(1.0, step), 0.0)


@triton.jit
def _level(values, low, inverse, top, block, element, seed, stochastic: tl.constexpr):
    """Return the codes from 0 to `top`, int32; 0 where a value is NaN."""
    level = (values - low) * inverse + (_dither(block, element, seed) if stochastic else 0.5)
    return tl.minimum(tl.maximum(level, 0.0), top).to(tl.int32)


@triton.jit
def _dither(block, element, seed):
    """Return uniform numbers in [0, 1) with 24 bits."""
    of_block = _mix(block.to(tl.uint32) ^ seed.to(tl.uint32))[:, None, None]
    return (_mix(of_block + element.to(tl.uint32) * 0x9E3779B9) >> 8).to(tl.int32).to(tl.float32) * 2.0**-24


@triton.jit
def _mix(value):
    value ^= value >> 16
    value *= 0x7FEB352D
    value ^= value >> 15
    value *= 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def _to_bfloat16(value, up: tl.constexpr):
    bits = _bits(value + 0.0)  # -0 becomes 0: which of the two a minimum gives depends on order
    truncated = bits & -65536
    is_away = (truncated != bits) & ((bits >= 0) if up else (bits < 0))
    return _from_bits(tl.where(is_away, truncated + 65536, truncated))


@triton.jit
def _word(low, step):
    return (_bits(low) >> 16 & 0xFFFF) | _bits(step)


@triton.jit
def _low(word):
    return _from_bits(word << 16)


@triton.jit
def _step(word):
    return _from_bits(word & 0x7FFF0000)


@triton.jit
def _at_least_positive(value):
    smallest = tl.full(value.shape, _SMALLEST_POSITIVE, tl.float32)
    return tl.where(value < smallest, smallest, value)


@triton.jit
def _smallest(values):
    return tl.min(tl.min(values, axis=2), axis=1)


@triton.jit
def _largest(values):
    return tl.max(tl.max(values, axis=2), axis=1)


@triton.jit
def _is_finite(value):
    return (_bits(value) & 0x7F800000) != 0x7F800000


@triton.jit
def _bits(value):
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _from_bits(bits):
    return bits.to(tl.float32, bitcast=True)
