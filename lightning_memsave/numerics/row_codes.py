"""Rows of weights as int8 codes, each row with a power of two.

A float32 weight [N, ...] becomes a code in -127..127 for each element, and for each of the N rows the smallest power of
two `scale` for which no element is beyond 127 times it. Bytes: 1 per element and 2 per row.

Why a power of two, and not 1/127 of the largest element, whose step is up to twice as fine:

* A code times a power of two is exact in bfloat16, which holds 8 bits. What a network computes with is what is kept.
* The weights alone say what their codes are. A checkpoint of dense weights gives the same codes, or, where all of a row
  are below 64, others of the same weights, and the next step is the same in both cases.
* A row's step stays while its largest element moves a little, so that an element that does not move keeps its value.

Rounding is stochastic with a seed: a weight between two codes becomes the upper one with a probability that equals its
distance from the lower one, so that E[decoded] = weight.

Source: Li et al., "Training Quantized Nets: A Deeper Understanding", 2017 (https://arxiv.org/abs/1706.02379) for
stochastic rounding of quantised weights; different: a power of two per row, which follows the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memsave.numerics.kbit import BLOCK_SIZE, CHUNK_ELSEWHERE, random_bits
from lightning_memsave.torch_internals.fake_tensors import is_fake

_LARGEST_CODE = 127
_SMALLEST, _HIGHEST = -120, 120
"""Exponents of scales: bfloat16 holds codes times any of them as normal numbers."""
_CHUNK = 128 * BLOCK_SIZE


def encode_rows(whole: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Return codes (int8, the shape of `whole`) and scales (bfloat16, [N]) of float32 weights.

    Args:
        whole: [N, ...]. A row with an element that is not finite gets the scale NaN, and decodes to NaN.
        seed: of the noise; `None` rounds to the nearest.

    >>> codes, scales = encode_rows(torch.tensor([[1.0, -0.3], [0.0, 100.0]]), seed=None)
    >>> codes, scales
    (tensor([[ 64, -19],
            [  0, 100]], dtype=torch.int8), tensor([0.0156, 1.0000], dtype=torch.bfloat16))
    >>> decode_rows(codes, scales, torch.float32)
    tensor([[  1.0000,  -0.2969],
            [  0.0000, 100.0000]])
    """
    rows = whole.reshape(len(whole), whole.numel() // max(1, len(whole)))
    codes = torch.empty(rows.shape, dtype=torch.int8, device=whole.device)
    scales = torch.zeros(len(rows), dtype=torch.bfloat16, device=whole.device)
    size = _CHUNK if whole.device.type == "cpu" else CHUNK_ELSEWHERE
    step = max(1, size // max(1, rows.shape[1]))
    starts = range(0, len(rows) if rows.numel() else 0, step)
    for start in starts[:1] if is_fake(whole) else starts:  # all take the same memory
        some = slice(start, start + step)
        scales[some] = _scales_of(rows[some])
        codes[some] = _codes_of(rows[some], scales[some], None if seed is None else (seed, start * rows.shape[1]))
    return codes.view(whole.shape), scales


def decode_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights (bfloat16 or float32, new) of codes [N, ...] and scales [N]; exact."""
    return codes.to(dtype).mul_(scales.to(dtype).view(-1, *(1 for _ in codes.shape[1:])))


def _scales_of(rows: Tensor) -> Tensor:
    largest = rows.abs().amax(1)
    mantissa, exponent = torch.frexp(largest)  # of [0.5, 1)
    fits = mantissa * 128 <= _LARGEST_CODE
    exponent = torch.where(fits, exponent - 7, exponent - 6).clamp(_SMALLEST, _HIGHEST)
    scales = torch.ldexp(torch.ones_like(largest), exponent)
    return scales.where(largest.isfinite(), torch.nan)


def _codes_of(rows: Tensor, scales: Tensor, noise: tuple[int, int] | None) -> Tensor:
    """Round rows by their scales; `noise` is a seed, and the number of the first element."""
    steps = (rows / scales.float()[:, None]).nan_to_num(0.0).clamp_(-_LARGEST_CODE, _LARGEST_CODE)
    if noise is None:
        return steps.round_().to(torch.int8)
    (seed, first), size = noise, steps.numel()
    begin = first % BLOCK_SIZE
    num_blocks = -(-(begin + size) // BLOCK_SIZE)
    bits = random_bits(seed, first // BLOCK_SIZE, num_blocks, rows.device).view(-1)[begin : begin + size]
    uniform = (bits >> 8).float().mul_(2.0**-24).view(steps.shape)
    lower = steps.floor()
    return lower.add_((steps - lower) > uniform).to(torch.int8)
