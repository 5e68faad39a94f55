"""Blockwise quantisation to a map of 256 values, rounding to the nearest, in plain torch.

A tensor is cut into blocks of 256 along its memory; each block is divided by its largest magnitude (absmax) and every
element is replaced by the index of the nearest value of an increasing map that spans at most [-1, 1]. 1 byte per
element plus 4 bytes per block: 1.016 B per element.

Source: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", 2021
(https://arxiv.org/abs/2110.02861). Written for conversions, where being exact matters and speed does not: given the
same absmax, `quantize_blockwise` inverts `dequantize_blockwise` exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_SIZE = 256


def num_blocks(num_elements: int) -> int:
    """Blocks that `num_elements` elements occupy, the last one perhaps partly.

    >>> num_blocks(256), num_blocks(257)
    (1, 2)
    """
    return -(-num_elements // BLOCK_SIZE)


def _per_element(per_block: Tensor, num_elements: int) -> Tensor:
    return per_block.repeat_interleave(BLOCK_SIZE)[:num_elements]


def blockwise_absmax(values: Tensor) -> Tensor:
    """Largest magnitude of each block, float32, shape [num_blocks]."""
    flat = values.detach().reshape(-1).float().abs()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK_SIZE))
    return padded.view(-1, BLOCK_SIZE).amax(dim=1)  # [num_blocks, BLOCK_SIZE] -> [num_blocks]


def quantize_blockwise(values: Tensor, code_map: Tensor, absmax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes (uint8, shape of `values`) and absmax (float32, [num_blocks]).

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


def dequantize_blockwise(codes: Tensor, code_map: Tensor, absmax: Tensor) -> Tensor:
    """Float32 values, shape of `codes`: `code_map[code] * absmax` of the block."""
    flat = code_map[codes.reshape(-1).int()]
    return flat.mul_(_per_element(absmax, flat.numel())).view(codes.shape)
