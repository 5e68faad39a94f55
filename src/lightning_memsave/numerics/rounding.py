"""Stochastic rounding to bfloat16, in plain torch: the reference that the C kernel equals bit for bit.

16 random bits are added to the 16 that bfloat16 lacks, and these are cut off: a value is rounded away from zero with a
probability that equals its distance, so that E[round(x)] = x. The error is below one unit in the last place, 2**-7 of
the value. A value that would pass the largest finite one is rounded towards zero instead.

Source: Zamirai, Zhang, Aberger, De Sa, "Revisiting BFloat16 Training", 2020 (https://arxiv.org/abs/2010.06192).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memsave.numerics.fakes import truth
from lightning_memsave.numerics.kbit import BLOCK_SIZE, random_bits

_CHUNK = 1024 * BLOCK_SIZE
_EXPONENT = 0x7F800000


def round_to_bfloat16(flat: Tensor, seed: int) -> Tensor | None:
    """Rounded values (bfloat16, [n]) of floating-point ones ([n], contiguous); `None` when they are not all finite."""
    out = torch.empty(flat.shape, dtype=torch.bfloat16, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].float().view(torch.int32)
        if truth(((bits & _EXPONENT) == _EXPONENT).any(), False):
            return None
        blocks = -(-bits.numel() // BLOCK_SIZE)
        noise = random_bits(seed, start // BLOCK_SIZE, blocks, flat.device).view(-1)[: bits.numel()] & 0xFFFF
        rounded = (bits + noise.int()) & -65536
        rounded = torch.where((rounded & _EXPONENT) == _EXPONENT, bits & -65536, rounded)
        out[start : start + _CHUNK] = rounded.view(torch.float32).bfloat16()
    return out
