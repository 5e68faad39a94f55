"""Stochastic rounding to bfloat16 and float16, in plain torch: the reference that the C kernels equal bit for bit.

Random bits are added to those that the shorter format lacks, and these are cut off: a value is rounded away from zero
with a probability that equals its distance, so that E[round(x)] = x. The error is below one unit in the last place: of
bfloat16 2**-7 of the value, of float16 2**-10 of it, or 2**-24 where it is below 2**-14. A value that would pass the
largest finite one is rounded towards zero instead; so is one beyond float16's largest, 65,504.

Source: Zamirai, Zhang, Aberger, De Sa, "Revisiting BFloat16 Training", 2020 (https://arxiv.org/abs/2010.06192).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_memsave.numerics.kbit import BLOCK_SIZE, CHUNK_ELSEWHERE, random_bits
from lightning_memsave.torch_internals.fake_tensors import truth

_CHUNK = 1024 * BLOCK_SIZE
_EXPONENT = 0x7F800000
_SMALLEST_NORMAL = 0x38800000  # 2**-14, float16's, as a float32
_REBIAS = 112 << 23  # between the exponents of float32 and float16
_LARGEST = 0x7BFF  # float16's


def round_to_bfloat16(flat: Tensor, seed: int) -> Tensor | None:
    """Round floating-point values ([n], contiguous) to bfloat16 ([n]); `None` when they are not all finite."""
    out, is_finite = (
        torch.empty(flat.shape, dtype=torch.bfloat16, device=flat.device),
        flat.new_ones((), dtype=torch.bool),
    )
    for span in _spans(flat):
        bits = flat[span].float().view(torch.int32)
        is_finite &= ((bits & _EXPONENT) != _EXPONENT).all()
        blocks = -(-bits.numel() // BLOCK_SIZE)
        noise = random_bits(seed, span.start // BLOCK_SIZE, blocks, flat.device).view(-1)[: bits.numel()] & 0xFFFF
        rounded = (bits + noise.int()) & -65536
        rounded = torch.where((rounded & _EXPONENT) == _EXPONENT, bits & -65536, rounded)
        out[span] = rounded.view(torch.float32).bfloat16()
    return out if truth(is_finite, True) else None


def round_to_float16(flat: Tensor, seed: int) -> Tensor | None:
    """Round as `round_to_bfloat16` does, to float16."""
    out, is_finite = (
        torch.empty(flat.shape, dtype=torch.float16, device=flat.device),
        flat.new_ones((), dtype=torch.bool),
    )
    for span in _spans(flat):
        bits = flat[span].float().view(torch.int32)
        is_finite &= ((bits & _EXPONENT) != _EXPONENT).all()
        blocks = -(-bits.numel() // BLOCK_SIZE)
        noise = random_bits(seed, span.start // BLOCK_SIZE, blocks, flat.device).view(-1)[: bits.numel()]
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude - _REBIAS + (noise & 0x1FFF).int()) >> 13).clamp_max(_LARGEST)
        # Below the smallest normal number the spacing is 2**-24, and the code is the multiple of it.
        tiny = (magnitude.view(torch.float32) * 2.0**24 + (noise >> 8).float() * 2.0**-24).clamp_max(1024).int()
        code = torch.where(magnitude >= _SMALLEST_NORMAL, normal, tiny) | (bits >> 16 & 0x8000)
        out[span] = code.to(torch.int16).view(torch.float16)
    return out if truth(is_finite, True) else None


def _spans(flat: Tensor) -> Iterator[slice]:
    """Yield elements at a time, which bounds the temporaries; the device is asked once for all of them."""
    size = _CHUNK if flat.device.type == "cpu" else CHUNK_ELSEWHERE
    return (slice(start, start + size) for start in range(0, flat.numel(), size))
