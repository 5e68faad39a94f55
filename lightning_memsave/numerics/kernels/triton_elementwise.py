"""The CUDA kernels in Triton of rounding, masks and maps of values; equal bit for bit to the references in torch.

As in `triton_kbit.py`, every product and sum rounds on its own, and the host asks nothing: where the reference returns
`None` for values that are not finite, infinity and NaN stay what they are.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_memsave.numerics.blockwise import BLOCK_SIZE
from lightning_memsave.numerics.kernels.triton_kbit import _OPTIONS, _bits, _from_bits, _mix

_BLOCKS = 4  # of 256 elements, for a program
OPTIONS = {**_OPTIONS, "num_warps": 4}
_ALL_BUT_SIGN = tl.constexpr(0x7FFFFFFF)
_EXPONENT = tl.constexpr(0x7F800000)
_SMALLEST_NORMAL = tl.constexpr(0x38800000)  # float16's, as a float32
_REBIAS = tl.constexpr(112 << 23)  # between the exponents of float32 and float16
_LARGEST = tl.constexpr(0x7BFF)  # float16's
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_SIZE = tl.constexpr(BLOCK_SIZE)
_BYTES = 512  # packed, for a program
_INTEGERS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0 << 48),
}
"""The integers of a dtype's size, and infinity as one."""
_NO_NAN = torch.iinfo(torch.int8).max


def round_to_bfloat16(flat: Tensor, seed: int) -> Tensor:
    """Round as `rounding.round_to_bfloat16` does; what is not finite stays so."""
    return _rounded(flat, seed, torch.bfloat16)


def round_to_float16(flat: Tensor, seed: int) -> Tensor:
    """Round as `rounding.round_to_float16` does; what is not finite stays so."""
    return _rounded(flat, seed, torch.float16)


def _rounded(flat: Tensor, seed: int, dtype: torch.dtype) -> Tensor:
    flat = flat.float() if flat.dtype != torch.float32 else flat
    out, size = torch.empty_like(flat, dtype=dtype), flat.numel()
    with torch.cuda.device_of(flat):  # Triton launches on the current device
        _round[(triton.cdiv(size, _BLOCKS * BLOCK_SIZE),)](
            *(flat, out.view(torch.int16), size, _signed(seed), dtype == torch.bfloat16, _BLOCKS), **OPTIONS
        )
    return out


def quantize_to_map(flat: Tensor, code_map: Tensor, bits: int, seed: int, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize as `blockwise.quantize_to_map` does."""
    size = flat.numel()
    num_blocks = triton.cdiv(size, BLOCK_SIZE)
    codes = flat.new_empty(triton.cdiv(size * bits, 8), dtype=torch.uint8)
    absmax = flat.new_empty(num_blocks, dtype=torch.float32)
    with torch.cuda.device_of(flat):
        _quantize_to_map[(triton.cdiv(num_blocks, _BLOCKS),)](
            *(flat.float(), code_map, codes, absmax, size, num_blocks, code_map.numel(), _signed(seed), _signed(shift)),
            *(bits, _BLOCKS),
            **OPTIONS,
        )
    return codes, absmax


def dequantize_from_map(codes: Tensor, code_map: Tensor, absmax: Tensor, bits: int, num_values: int) -> Tensor:
    """Dequantize as `blockwise.dequantize_from_map` does."""
    out = absmax.new_empty(num_values)
    with torch.cuda.device_of(codes):
        _dequantize_from_map[(triton.cdiv(num_values, _BLOCKS * BLOCK_SIZE),)](
            *(codes, code_map, absmax, out, num_values, bits, _BLOCKS), **OPTIONS
        )
    return out


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a boolean mask as `bits.pack(mask, 1)` does."""
    return _packed(mask.view(torch.int8), _NO_NAN)


def pack_positive(flat: Tensor) -> Tensor:
    """Pack the signs as `bits.pack(~(flat <= 0), 1)` does."""
    integers, infinity = _INTEGERS[flat.dtype]
    return _packed(flat.view(integers), infinity)


def _packed(patterns: Tensor, infinity: int) -> Tensor:
    size = patterns.numel()
    num_bytes = triton.cdiv(size, 8)
    packed = patterns.new_empty(num_bytes, dtype=torch.uint8)
    with torch.cuda.device_of(patterns):
        most = torch.iinfo(patterns.dtype).max
        _pack[(triton.cdiv(num_bytes, _BYTES),)](patterns, packed, size, infinity, most, _BYTES, **OPTIONS)
    return packed


def unpack_mask(packed: Tensor, num_values: int) -> Tensor:
    """Unpack a mask as `bits.unpack(packed, 1, num_values).bool()` does."""
    mask = packed.new_empty(num_values, dtype=torch.bool)
    with torch.cuda.device_of(packed):
        _unpack[(triton.cdiv(num_values, 8 * _BYTES),)](packed, mask.view(torch.uint8), num_values, _BYTES, **OPTIONS)
    return mask


def look_up(values: Tensor, table: Tensor, scale: float, shift: float) -> Tensor:
    """Look up as `bits.look_up` does; in place."""
    size = values.numel()
    with torch.cuda.device_of(values):
        _look_up[(triton.cdiv(size, _BLOCKS * BLOCK_SIZE),)](
            *(values, table, size, table.numel(), scale, shift, _BLOCKS * BLOCK_SIZE), **OPTIONS
        )
    return values


def _signed(seed: int) -> int:
    """Return 32 bits as a signed integer."""
    return (seed ^ 2**31) - 2**31


# ---------------------------------------------------------------- kernels
@triton.jit
def _noise(block, element, seed):
    """Return 32 random bits, [blocks, 256], as `kbit.random_bits` does."""
    return _mix(_mix(block.to(tl.uint32) ^ seed.to(tl.uint32)) + element.to(tl.uint32) * 0x9E3779B9)


@triton.jit
def _places(blocks: tl.constexpr):
    """Return a program's blocks, [blocks, 1], and the elements of each, [1, 256]."""
    block = tl.program_id(0).to(tl.int64) * blocks + tl.arange(0, blocks)[:, None]
    return block, tl.arange(0, _SIZE)[None, :]


@triton.jit(do_not_specialize=["seed"])
def _round(x, out, size, seed, to_bfloat16: tl.constexpr, blocks: tl.constexpr):
    block, element = _places(blocks)
    place = block * _SIZE + element
    value = _bits(tl.load(x + place, mask=place < size, other=0.0))
    noise = _noise(block, element, seed)
    magnitude = value & _ALL_BUT_SIGN
    if to_bfloat16:
        code = rounded_to_bfloat16(value, noise)
    else:
        normal = tl.minimum((magnitude - _REBIAS + (noise & 0x1FFF).to(tl.int32)) >> 13, _LARGEST)
        # Below the smallest normal number the spacing is 2**-24, and the code is the multiple of it.
        dither = (noise >> 8).to(tl.int32).to(tl.float32) * 2.0**-24
        tiny = tl.minimum(_from_bits(magnitude) * 2.0**24 + dither, 1024.0).to(tl.int32)
        code = tl.where(magnitude >= _SMALLEST_NORMAL, normal, tiny)
        code = tl.where(magnitude == _EXPONENT, 0x7C00, tl.where(magnitude > _EXPONENT, 0x7E00, code))
        code |= (value >> 16) & 0x8000
    tl.store(out + place, code.to(tl.int16), mask=place < size)


@triton.jit(do_not_specialize=["seed", "shift"])
def _quantize_to_map(
    x, code_map, codes, absmax, size, num_blocks, num_entries, seed, shift, bits: tl.constexpr, blocks: tl.constexpr
):
    block, element = _places(blocks)
    place = block * _SIZE + element
    exists = place < size
    value = tl.load(x + place, mask=exists, other=0.0)
    noise = _noise(block, element, seed) + shift.to(tl.uint32)
    encode_block(value, code_map, codes, absmax, block, place, size, num_blocks, num_entries, noise, bits, blocks)


@triton.jit
def encode_block(
    value,
    code_map,
    codes,
    absmax,
    block,
    place,
    size,
    num_blocks,
    num_entries,
    noise,
    bits: tl.constexpr,
    blocks: tl.constexpr,
):
    """Write codes and scales of values, [blocks, 256], that are 0 where they do not exist."""
    exists = place < size
    largest = _from_bits(tl.max(_bits(value) & _ALL_BUT_SIGN, axis=1, keep_dims=True))  # [blocks, 1]; NaN if one is
    tl.store(absmax + block, largest, mask=block < num_blocks)
    unit = tl.math.div_rn(value, tl.broadcast_to(tl.maximum(largest, _TINY), value.shape))
    below, after = tl.zeros_like(place).to(tl.int32), tl.zeros_like(place).to(tl.int32) + num_entries
    for _ in range(8):  # the last entry that is not above, by halves
        middle = (below + after) // 2
        is_before = tl.load(code_map + middle, mask=middle < num_entries, other=float("inf")) <= unit
        below, after = tl.where(is_before, middle, below), tl.where(is_before, after, middle)
    below = tl.minimum(below, num_entries - 2)
    low, high = tl.load(code_map + below), tl.load(code_map + below + 1)
    fraction = tl.math.div_rn(unit - low, high - low)
    code = below + ((noise >> 8).to(tl.int32).to(tl.float32) < fraction * 16777216.0).to(tl.int32)
    code = tl.where(exists, code, 0)
    if bits == 8:
        tl.store(codes + place, code.to(tl.uint8), mask=exists)
    elif bits == 4:
        first, second = tl.split(tl.reshape(code, (blocks, _SIZE // 2, 2)))
        half = block * (_SIZE // 2) + tl.arange(0, _SIZE // 2)[None, :]
        tl.store(codes + half, (first | (second << 4)).to(tl.uint8), mask=2 * half < size)
    else:  # eight codes are so many bytes
        lane = tl.arange(0, 8)[None, None, :]
        word = tl.sum(tl.reshape(code, (blocks, _SIZE // 8, 8)).to(tl.int64) << (bits * lane), axis=2)
        group = block * (_SIZE // 8) + tl.arange(0, _SIZE // 8)[None, :]
        byte = group[:, :, None] * bits + lane
        value = (word[:, :, None] >> (8 * lane)) & 255
        tl.store(codes + byte, value.to(tl.uint8), mask=(lane < bits) & (8 * byte // bits < size))


@triton.jit
def _dequantize_from_map(codes, code_map, absmax, out, size, bits: tl.constexpr, blocks: tl.constexpr):
    block, element = _places(blocks)
    place = block * _SIZE + element
    exists = place < size
    tl.store(out + place, decode_block(codes, code_map, absmax, block, place, size, bits), mask=exists)


@triton.jit
def decode_block(codes, code_map, absmax, block, place, size, bits: tl.constexpr):
    """Return the values of codes, [blocks, 256]."""
    exists = place < size
    if bits == 8:
        code = tl.load(codes + place, mask=exists, other=0).to(tl.int32)
    elif bits == 4:
        code = (tl.load(codes + place // 2, mask=exists, other=0).to(tl.int32) >> (place % 2).to(tl.int32) * 4) & 15
    else:
        byte, shift = place * bits // 8, (place * bits % 8).to(tl.int32)
        lower = tl.load(codes + byte, mask=exists, other=0).to(tl.int32)
        upper = tl.load(codes + byte + 1, mask=exists & ((8 * byte + 8) // bits < size), other=0).to(tl.int32)
        code = ((lower | (upper << 8)) >> shift) & (2**bits - 1)
    scale = tl.load(absmax + block, mask=block * _SIZE < size, other=0.0)
    return tl.load(code_map + code) * scale


@triton.jit
def rounded_to_bfloat16(pattern, noise):
    """Return 16 bits of float32 patterns, rounded with the lower bits of `noise`."""
    rounded = pattern + (noise & 0xFFFF).to(tl.int32)
    code = tl.where((rounded & _EXPONENT) == _EXPONENT, pattern, rounded) >> 16
    return tl.where((pattern & _ALL_BUT_SIGN) > _EXPONENT, 0x7FC0, code)


@triton.jit
def _pack(patterns, packed, size, infinity: tl.constexpr, all_but_sign: tl.constexpr, num_bytes: tl.constexpr):
    """Write one bit per element: whether it is a number above 0, or NaN."""
    byte = tl.program_id(0).to(tl.int64) * num_bytes + tl.arange(0, num_bytes)
    place = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    pattern = tl.load(patterns + place, mask=place < size, other=0)
    bit = ((pattern > 0) | ((pattern & all_but_sign) > infinity)).to(tl.int32)
    tl.store(packed + byte, tl.sum(bit << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8), mask=8 * byte < size)


@triton.jit
def _unpack(packed, mask, size, num_bytes: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * num_bytes + tl.arange(0, num_bytes)
    bits = tl.load(packed + byte, mask=8 * byte < size, other=0).to(tl.int32)
    place = byte[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(mask + place, ((bits[:, None] >> tl.arange(0, 8)[None, :]) & 1).to(tl.uint8), mask=place < size)


@triton.jit
def _look_up(values, table, size, num_entries, scale, shift, per_program: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, per_program)
    exists = place < size
    level = tl.load(values + place, mask=exists, other=0.0) * scale + shift
    is_nan = level != level
    level = tl.minimum(tl.maximum(tl.where(is_nan, 0.0, level), 0.0), num_entries - 1.0)
    found = tl.load(table + level.to(tl.int32), mask=exists, other=0.0)
    tl.store(values + place, tl.where(is_nan, float("nan"), found), mask=exists)
