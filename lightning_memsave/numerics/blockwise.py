"""Blockwise quantisation to a map of at most 256 values, to the nearest or stochastically, in plain torch.

A tensor is cut into blocks of 256 along its memory; each block is divided by its largest magnitude (absmax) and every
element is replaced by the index of a value of an increasing map that spans at most [-1, 1]. 1 byte per element plus 4
bytes per block: 1.016 B per element.

Source: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", 2021
(https://arxiv.org/abs/2110.02861). Conversions round to the nearest: given the same absmax, `quantize_blockwise`
inverts `dequantize_blockwise` exactly. Optimizer steps round stochastically, on CUDA with this code, on CPU with C
kernels that equal it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memsave.numerics.bits import pack, unpack
from lightning_memsave.numerics.kbit import CHUNK_ELSEWHERE, random_bits

BLOCK_SIZE = 256
_CHUNK = 128 * BLOCK_SIZE  # elements whose noise is made at a time, on CPU: bounds the temporaries


def num_blocks(num_elements: int) -> int:
    """Return how many blocks `num_elements` elements occupy, the last one perhaps partly.

    >>> num_blocks(256), num_blocks(257)
    (1, 2)
    """
    return -(-num_elements // BLOCK_SIZE)


def _per_element(per_block: Tensor, num_elements: int) -> Tensor:
    return per_block.repeat_interleave(BLOCK_SIZE)[:num_elements]


def blockwise_absmax(values: Tensor) -> Tensor:
    """Return the largest magnitude of each block, float32, shape [num_blocks]."""
    flat = values.detach().reshape(-1).float().abs()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK_SIZE))
    return padded.view(-1, BLOCK_SIZE).amax(dim=1)  # [num_blocks, BLOCK_SIZE] -> [num_blocks]


def quantize_blockwise(values: Tensor, code_map: Tensor, absmax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes (uint8, shape of `values`) and absmax (float32, [num_blocks]).

    Args:
        values: floating point, any shape.
        code_map: float32, [256], increasing.
        absmax: scales to use; by default those of `values`.
    """
    scales = blockwise_absmax(values) if absmax is None else absmax
    flat = values.detach().reshape(-1).float()
    unit = flat / _per_element(scales.clamp_min(torch.finfo(torch.float32).tiny), flat.numel())
    midpoints = (code_map[1:] + code_map[:-1]) / 2
    codes = torch.bucketize(unit, midpoints, out_int32=True).to(torch.uint8)
    return codes.view(values.shape), scales


def quantize_stochastically(values: Tensor, code_map: Tensor, seed: int, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize as `quantize_blockwise` does, to one of the two values next to each element, right on average.

    Elements below the map become its lowest value. The error is below the map's largest gap, times the block's absmax.
    What is rounded again and again, a little changed, gains from the same seed with shifts that are multiples of the
    golden ratio: each element's noise then covers its range evenly, and errors of consecutive roundings cancel.

    Args:
        values: floating point, any shape.
        code_map: float32, [at most 256], increasing, up to 1.
        seed: of the noise, below 2**32.
        shift: added to the noise, modulo 2**32.
    """
    scales = blockwise_absmax(values)
    flat = values.detach().reshape(-1)
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=flat.device)
    chunk = _CHUNK if flat.device.type == "cpu" else CHUNK_ELSEWHERE
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk].float()
        first, blocks = start // BLOCK_SIZE, num_blocks(part.numel())
        absmax = scales[first : first + blocks].clamp_min(torch.finfo(torch.float32).tiny)
        unit = part / _per_element(absmax, part.numel())
        below = (torch.bucketize(unit, code_map, right=True) - 1).clamp_(0, len(code_map) - 2)
        fraction = (unit - code_map[below]) / (code_map[below + 1] - code_map[below])
        noise = (random_bits(seed, first, blocks, flat.device).view(-1)[: part.numel()] + shift) & 0xFFFFFFFF
        codes[start : start + chunk] = below + ((noise >> 8) < fraction * 2**24)
    return codes.view(values.shape), scales


def dequantize_blockwise(codes: Tensor, code_map: Tensor, absmax: Tensor) -> Tensor:
    """Return float32 values, shape of `codes`: `code_map[code] * absmax` of the block."""
    flat = code_map[codes.reshape(-1).int()]
    return flat.mul_(_per_element(absmax, flat.numel())).view(codes.shape)


def quantize_to_map(flat: Tensor, code_map: Tensor, bits: int, seed: int, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize [n] as `quantize_stochastically` does, with packed codes of `bits` (4, 5 or 8), [ceil(n * bits / 8)]."""
    codes, absmax = quantize_stochastically(flat, code_map, seed, shift)
    return pack(codes, bits), absmax


def dequantize_from_map(codes: Tensor, code_map: Tensor, absmax: Tensor, bits: int, num_values: int) -> Tensor:
    """Return float32 values, [num_values], of packed codes."""
    return dequantize_blockwise(unpack(codes, bits, num_values), code_map, absmax)
