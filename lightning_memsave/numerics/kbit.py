"""Blockwise k-bit codes with stochastic rounding, in plain torch: the reference that every kernel equals bit for bit.

A tensor is a sequence of rows, and a row is cut into equal blocks of at most 256 elements: no block crosses the end of
a row, so the noise in a row follows from the values in that row, however large its neighbours are. A block keeps k bits
per element and its range in bfloat16: the lower end rounded down, the step rounded up, so that every element lies
inside and stochastic rounding is unbiased: E[decode(encode(x))] = x.

| bytes per element | 8 bits | 4 bits | 2 bits |
|---|---:|---:|---:|
| rows of 256 and its multiples: bits / 8 + 4 / 256 | 1.016 | 0.516 | 0.266 |
| rows of 192 | 1.021 | 0.521 | 0.271 |
| rows of 64 | 1.063 | 0.563 | 0.313 |

*The noise in a row is bounded by the row.* Two elements of a block differ by its range r, so the block adds at least
r^2 / 2 to the sum of squared deviations from the row's mean; its n <= 256 elements get a noise of variance
<= (r / (2^k - 1))^2 / 4 each. Summed over blocks: noise <= n / (2 (2^k - 1)^2) times those squares, at most 0.0020 at 8
bits and 0.57 at 4, for any values; 0.0001 and 0.02 for normally distributed ones. The rounding of the range's lower end
adds to it where a row's mean is hundreds of times its deviation.

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

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memsave.torch_internals.fake_tensors import truth

BLOCK_SIZE = 256
"""Elements of a block at most."""
BITS = (8, 4, 2)
_CHUNK = 1024  # blocks at a time: bounds the temporaries of the reference
CHUNK_ELSEWHERE = 4096 * BLOCK_SIZE
"""Elements whose noise is made at a time where starting a kernel takes longer than on a CPU."""
_SMALLEST_STEP = 2.0**-126  # the smallest normal float32: its reciprocal is finite
_SMALLEST_POSITIVE = 1e-38  # what a decoded element > 0 is at least


class Blocks(NamedTuple):
    """How rows are cut into blocks.

    >>> Blocks.of_rows(192), Blocks.of_rows(600)
    (Blocks(row=192, size=192, per_row=1), Blocks(row=600, size=200, per_row=3))
    """

    row: int
    """Elements of a row."""
    size: int
    """Elements of a block; the last one of a row may have fewer."""
    per_row: int

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of_rows(cls, row: int) -> Blocks:
        """Return the fewest blocks of one size, at most 256, that fill a row."""
        per_row = -(-row // BLOCK_SIZE)
        return cls(row, -(-row // per_row), per_row)

    def num_bytes(self, bits: int) -> int:
        """Return bytes of a block's codes: byte i holds elements i, i + num_bytes, ..."""
        return -(-self.size * bits // 8)

    def count(self, num_elements: int) -> int:
        """Return how many blocks a tensor of whole rows has."""
        return num_elements // self.row * self.per_row

    def positions(self, first: int, last: int, device: torch.device) -> Tensor:
        """Return the positions of the elements of some blocks, int64, [blocks, size].

        A short block repeats its last one.
        """
        block = torch.arange(first, last, device=device)[:, None]
        within = block % self.per_row * self.size + torch.arange(self.size, device=device)
        return block // self.per_row * self.row + within.clamp_max(self.row - 1)


def coded_bytes(num_elements: int, bits: int, signed: bool = False, row: int | None = None) -> int:
    """Return bytes of codes and ranges.

    >>> coded_bytes(1024, 4), coded_bytes(1024, 4, signed=True), coded_bytes(1024, 4, row=64), coded_bytes(1, 8)
    (528, 544, 576, 5)
    """
    blocks = Blocks.of_rows(row or num_elements)
    return blocks.count(num_elements) * (blocks.num_bytes(bits) + (8 if signed else 4))


def quantize(
    flat: Tensor, bits: int, seed: int | None, signed: bool = False, row: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """Return codes (uint8, [blocks, bytes of a block]) and ranges (bfloat16, [blocks, 2]; [blocks, 4] with `signed`).

    Args:
        flat: floating point, [n], contiguous.
        bits: 8, 4 or 2.
        seed: of the dither, below 2**32; `None` rounds to the nearest.
        signed: preserve signs instead of zeros.
        row: elements of a row, of which n is a multiple; n by default.

    Returns:
        `None` when the values, or their range in bfloat16, are not all finite.
    """
    parts = []
    blocks = Blocks.of_rows(row or flat.numel())
    num_blocks = blocks.count(flat.numel())
    for first in range(0, num_blocks, _CHUNK):
        last = min(first + _CHUNK, num_blocks)
        values = _blocks_of(flat, blocks, first, last).float()
        dither = 0.5 if seed is None else _dither(seed, first, last - first, flat.device)[:, : blocks.size]
        part = (_signed_chunk if signed else _chunk)(values, bits, dither)
        if not (truth(values.isfinite().all(), True) and truth(part[1].isfinite().all(), True)):
            return None
        parts.append(part)
    codes, ranges = zip(*parts, strict=True)
    return torch.cat(codes), torch.cat(ranges)


def dequantize(
    codes: Tensor, ranges: Tensor, bits: int, out: Tensor, signed: bool = False, row: int | None = None
) -> Tensor:
    """Decode into `out` (floating point, [n], contiguous) and return it."""
    limit = min(torch.finfo(out.dtype).max, torch.finfo(torch.float32).max)  # a range rounded outwards may leave it
    blocks = Blocks.of_rows(row or out.numel())
    for first in range(0, len(codes), _CHUNK):
        code = _unpack(codes[first : first + _CHUNK], bits)[:, : blocks.size]
        span = ranges[first : first + _CHUNK].float()
        values = (_decode_signed if signed else _decode)(code, span, bits).clamp(-limit, limit).to(out.dtype)
        if blocks.row % blocks.size:
            places = blocks.positions(first, first + len(code), out.device)
            out[places] = values.gather(1, places - places[:, :1])
        else:
            out[first * blocks.size : (first + len(code)) * blocks.size] = values.view(-1)
    return out


def _blocks_of(flat: Tensor, blocks: Blocks, first: int, last: int) -> Tensor:
    """Return the elements of some blocks, [last - first, size]."""
    if blocks.row % blocks.size:
        return flat[blocks.positions(first, last, flat.device)]
    return flat[first * blocks.size : last * blocks.size].view(-1, blocks.size)


# ------------------------------------------------------------------------------- one chunk: blocks are [N, size]
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
    code = _round(magnitudes, low, step, torch.tensor(half - 1.0, device="cpu"), dither) + is_positive * half
    return _pack(code.to(torch.uint8), bits), torch.stack([low_n, step_n, low_p, step_p], 1).bfloat16()


def _side(magnitudes: Tensor, belongs: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Return the range of the elements that belong; zeros when none does."""
    low = torch.where(belongs.any(1), torch.where(belongs, magnitudes, torch.inf).amin(1), 0)
    high = torch.where(belongs, magnitudes, 0).amax(1)
    return _range(low, high, torch.full_like(low, half - 1))


def _decode_signed(code: Tensor, span: Tensor, bits: int) -> Tensor:
    half = 2 ** (bits - 1)
    negative = 0 - (span[:, 0:1] + span[:, 1:2] * code)
    positive = (span[:, 2:3] + span[:, 3:4] * (code - half)).clamp_min(_SMALLEST_POSITIVE)
    return torch.where(code >= half, positive, negative)


def _range(low: Tensor, high: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lower end rounded down and step rounded up to bfloat16, as float32."""
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
    """Pack codes [N, size] into [N, bytes]: byte i holds elements i, i + bytes, ..."""
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(code, (0, -code.shape[1] % per_byte))
    lanes = padded.view(len(code), per_byte, -1)  # [N, per_byte, bytes]
    packed = lanes[:, 0].clone()
    for lane in range(1, per_byte):
        packed |= lanes[:, lane] << (lane * bits)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    lanes = [(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return torch.cat(lanes, 1).float()  # [N, at least size]


# ------------------------------------------------------------------------------- the dither
def mix(value: int) -> int:
    """Return the hash, of one 32-bit integer."""
    value ^= value >> 16
    value = value * 0x7FEB352D & 0xFFFFFFFF
    value ^= value >> 15
    value = value * 0x846CA68B & 0xFFFFFFFF
    return value ^ value >> 16


def _mix(value: Tensor) -> Tensor:
    """Return the hash, of 32-bit integers held in int64."""
    value = value ^ value >> 16
    value = value * 0x7FEB352D & 0xFFFFFFFF
    value = value ^ value >> 15
    value = value * 0x846CA68B & 0xFFFFFFFF
    return value ^ value >> 16


def random_bits(seed: int, first_block: int, num_blocks: int, device: torch.device) -> Tensor:
    """Return 32 random bits per element, held in int64, [num_blocks, 256]."""
    block = torch.arange(first_block, first_block + num_blocks, device=device) & 0xFFFFFFFF
    element = torch.arange(BLOCK_SIZE, device=device) * 0x9E3779B9
    return _mix((_mix(block ^ seed)[:, None] + element) & 0xFFFFFFFF)


def _dither(seed: int, first_block: int, num_blocks: int, device: torch.device) -> Tensor:
    """Return uniform numbers in [0, 1) with 24 bits, [num_blocks, 256]."""
    return (random_bits(seed, first_block, num_blocks, device) >> 8).float() * 2.0**-24
