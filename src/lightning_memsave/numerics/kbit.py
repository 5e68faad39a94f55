"""Blockwise k-bit codes with stochastic rounding, in plain torch: the reference that every kernel equals bit for bit.

A tensor is cut into blocks of 256 along its memory. A block keeps k bits per element and its range in bfloat16: the
lower end rounded down, the step rounded up, so that every element lies inside and stochastic rounding is unbiased:
E[decode(encode(x))] = x. bits/8 + 4/256 bytes per element: 1.016 at 8 bit, 0.516 at 4, 0.266 at 2.

*Zero-preserving.* In a block whose smallest element is exactly zero (the output of a ReLU), code 0 means exactly zero
and the other codes span [smallest positive, largest]; the step's sign bit marks such a block. Without it the mask of a
ReLU is wrong for 4 % of the elements at 4 bit and 18 % at 2 bit, and the gradient is biased.

*Sign-preserving* (`signed=True`). Half of the codes span the block's elements <= 0, the other half those > 0, each with
its own range (8/256 bytes per element more than the codes: 0.531 at 4 bit). Positive elements stay positive and the
others do not become so (beside a zero a negative one may become zero), so a ReLU that reads the decoded tensor has the
exact mask. Both halves code magnitudes: their ends nearest to zero are
rounded towards zero and never past it, where cutting the decoded value off would be a bias.

The dither is a hash of (seed, block, element), never a random generator: any implementation on any device draws the
same numbers, and a resumed run repeats them.

Sources: Chen et al., "ActNN: Reducing Training Memory Footprint via 2-Bit Activation Compressed Training", 2021
(https://arxiv.org/abs/2104.14129) for blockwise stochastic rounding of activations; the hash is Wellons' `lowbias32`
(https://nullprogram.com/blog/2018/07/31/). Ours: outward-rounded bfloat16 ranges, both kinds of preserved sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memsave.numerics.fakes import truth

BLOCK_SIZE = 256
BITS = (8, 4, 2)
_CHUNK = 1024 * BLOCK_SIZE  # elements at a time: bounds the temporaries of the reference
CHUNK_ELSEWHERE = 4096 * BLOCK_SIZE
"""Elements whose noise is made at a time where starting a kernel takes longer than on a CPU."""
_SMALLEST_STEP = 2.0**-126  # the smallest normal float32: its reciprocal is finite
_SMALLEST_POSITIVE = 1e-38  # what a decoded element > 0 is at least


def coded_bytes(num_elements: int, bits: int, signed: bool = False) -> int:
    """Bytes of codes and ranges.

    >>> coded_bytes(1024, 4), coded_bytes(1024, 4, signed=True), coded_bytes(1, 8)
    (528, 544, 260)
    """
    blocks = -(-num_elements // BLOCK_SIZE)
    return blocks * (BLOCK_SIZE * bits // 8 + (8 if signed else 4))


def quantize(flat: Tensor, bits: int, seed: int | None, signed: bool = False) -> tuple[Tensor, Tensor] | None:
    """Codes (uint8, [blocks, 32 * bits]) and ranges (bfloat16, [blocks, 2], or [blocks, 4] with `signed`).

    Args:
        flat: floating point, [n], contiguous.
        bits: 8, 4 or 2.
        seed: of the dither, below 2**32; `None` rounds to the nearest.
        signed: preserve signs instead of zeros.

    Returns:
        `None` when the values, or their range in bfloat16, are not all finite.
    """
    parts = []
    for start in range(0, flat.numel(), _CHUNK):
        values = flat[start : start + _CHUNK].float()
        blocks = torch.cat([values, values[-1:].expand(-values.numel() % BLOCK_SIZE)]).view(-1, BLOCK_SIZE)
        dither = 0.5 if seed is None else _dither(seed, start // BLOCK_SIZE, len(blocks), flat.device)
        part = (_signed_chunk if signed else _chunk)(blocks, bits, dither)
        if not (truth(blocks.isfinite().all(), True) and truth(part[1].isfinite().all(), True)):
            return None
        parts.append(part)
    codes, ranges = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(ranges)


def dequantize(codes: Tensor, ranges: Tensor, bits: int, out: Tensor, signed: bool = False) -> Tensor:
    """Decode into `out` (floating point, [n], contiguous) and return it."""
    limit = min(torch.finfo(out.dtype).max, torch.finfo(torch.float32).max)  # a range rounded outwards may leave it
    per_chunk = _CHUNK // BLOCK_SIZE
    for first in range(0, len(codes), per_chunk):
        code = _unpack(codes[first : first + per_chunk], bits)
        span = ranges[first : first + per_chunk].float()
        values = (_decode_signed if signed else _decode)(code, span, bits)
        target = out[first * BLOCK_SIZE : first * BLOCK_SIZE + values.numel()]
        target.copy_(values.reshape(-1)[: target.numel()].clamp(-limit, limit))
    return out


# ------------------------------------------------------------------------------- one chunk: blocks are [N, 256]
def _chunk(blocks: Tensor, bits: int, dither: Tensor | float) -> tuple[Tensor, Tensor]:
    low, high = blocks.amin(1), blocks.amax(1)  # [N]
    keeps_zero = (low == 0) & (high > 0)
    low = torch.where(keeps_zero, torch.where(blocks > 0, blocks, torch.inf).amin(1), low)
    top = torch.where(keeps_zero, float(2**bits - 2), float(2**bits - 1))
    low, step = _range(low, high, top)
    code = _round(blocks, low[:, None], step[:, None], top[:, None], dither)
    code = torch.where(keeps_zero[:, None], torch.where(blocks > 0, code + 1, 0), code)
    return _pack(code.to(torch.uint8), bits), torch.stack([low, torch.where(keeps_zero, -step, step)], 1).bfloat16()


def _decode(code: Tensor, span: Tensor, bits: int) -> Tensor:
    low, step = span[:, :1], span[:, 1:]  # [N, 1]
    keeps_zero = step.signbit()
    values = low + step.abs() * (code - keeps_zero.float())
    positive = torch.where(code > 0, values.clamp_min(_SMALLEST_POSITIVE), 0.0)
    return torch.where(keeps_zero, positive, values)


def _signed_chunk(blocks: Tensor, bits: int, dither: Tensor | float) -> tuple[Tensor, Tensor]:
    half = 2 ** (bits - 1)
    magnitudes, is_positive = blocks.abs(), blocks > 0
    low_n, step_n = _side(magnitudes, ~is_positive, half)
    low_p, step_p = _side(magnitudes, is_positive, half)
    low = torch.where(is_positive, low_p[:, None], low_n[:, None])
    step = torch.where(is_positive, step_p[:, None], step_n[:, None])
    code = _round(magnitudes, low, step, torch.tensor(half - 1.0), dither) + is_positive * half
    return _pack(code.to(torch.uint8), bits), torch.stack([low_n, step_n, low_p, step_p], 1).bfloat16()


def _side(magnitudes: Tensor, belongs: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Range of the elements that belong; zeros when none does."""
    low = torch.where(belongs.any(1), torch.where(belongs, magnitudes, torch.inf).amin(1), 0)
    high = torch.where(belongs, magnitudes, 0).amax(1)
    return _range(low, high, torch.full_like(low, half - 1))


def _decode_signed(code: Tensor, span: Tensor, bits: int) -> Tensor:
    half = 2 ** (bits - 1)
    negative = 0 - (span[:, 0:1] + span[:, 1:2] * code)
    positive = (span[:, 2:3] + span[:, 3:4] * (code - half)).clamp_min(_SMALLEST_POSITIVE)
    return torch.where(code >= half, positive, negative)


def _range(low: Tensor, high: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Lower end rounded down and step rounded up to bfloat16, as float32."""
    low = _to_bfloat16(low, up=False)
    step = _to_bfloat16((high - low) / top, up=True)
    return low, torch.where(step > 0, step.clamp_min(_SMALLEST_STEP), step)


def _to_bfloat16(values: Tensor, up: bool) -> Tensor:
    bits = (values + 0.0).view(torch.int32)  # -0 becomes 0: which of the two a minimum gives depends on order
    truncated = bits & -65536
    is_away = (truncated != bits) & ((bits >= 0) if up else (bits < 0))
    return torch.where(is_away, truncated + 65536, truncated).view(torch.float32)


def _round(blocks: Tensor, low: Tensor, step: Tensor, top: Tensor, dither: Tensor | float) -> Tensor:
    inverse = torch.where(step > 0, 1 / step, 0)
    level = (blocks - low) * inverse + dither
    return torch.minimum(level.clamp_min(0), top).floor()


def _pack(code: Tensor, bits: int) -> Tensor:
    """[N, 256] codes -> [N, 32 * bits] bytes: byte i holds elements i, i + 32 * bits, ..."""
    per_byte = 8 // bits
    lanes = code.view(len(code), per_byte, -1)  # [N, per_byte, 32 * bits]
    packed = lanes[:, 0].clone()
    for lane in range(1, per_byte):
        packed |= lanes[:, lane] << (lane * bits)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    lanes = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.cat(lanes, 1).float()  # [N, 256]


# ------------------------------------------------------------------------------- the dither
def mix(value: int) -> int:
    """The hash, of one 32-bit integer."""
    value ^= value >> 16
    value = value * 0x7FEB352D & 0xFFFFFFFF
    value ^= value >> 15
    value = value * 0x846CA68B & 0xFFFFFFFF
    return value ^ value >> 16


def _mix(value: Tensor) -> Tensor:
    """The hash, of 32-bit integers held in int64."""
    value = value ^ value >> 16
    value = value * 0x7FEB352D & 0xFFFFFFFF
    value = value ^ value >> 15
    value = value * 0x846CA68B & 0xFFFFFFFF
    return value ^ value >> 16


def random_bits(seed: int, first_block: int, num_blocks: int, device: torch.device) -> Tensor:
    """32 random bits per element, held in int64, [num_blocks, 256]."""
    block = torch.arange(first_block, first_block + num_blocks, device=device) & 0xFFFFFFFF
    element = torch.arange(BLOCK_SIZE, device=device) * 0x9E3779B9
    return _mix((_mix(block ^ seed)[:, None] + element) & 0xFFFFFFFF)


def _dither(seed: int, first_block: int, num_blocks: int, device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1) with 24 bits, [num_blocks, 256]."""
    return (random_bits(seed, first_block, num_blocks, device) >> 8).float() * 2.0**-24
