"""Float32 weights split into a bfloat16 part, with which the network computes, and a correction.

| correction | bytes per weight | bits of the significand kept | largest error of a weight |
|---|---:|---:|---:|
| int8 | 1 | 16 | 2**-15 of it |
| bfloat16 | 2 | 17 | 2**-17 of it |

int8: the distance between the bit patterns of the weight and of its bfloat16 part, in steps of 256; float32 without its
last eight bits. bfloat16: what is missing, as a number of its own. Both round to the nearest, and splitting what was
joined gives the same two parts, so that a weight written as float32 is found again bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join(rounded: Tensor, correction: Tensor | None) -> Tensor:
    """Return the weights (float32, new) that `split` was given, as far as they were kept."""
    whole = rounded.to(torch.float32, copy=True)
    if correction is None:
        return whole
    # A zero has no correction: where there is one, the weight was set to zero since (pruning, a row of padding).
    correction = correction.masked_fill(rounded == 0, 0)
    if correction.dtype == torch.int8:
        return (whole.view(torch.int32) + correction.int() * 256).view(torch.float32)
    return whole.add_(correction)


def split(whole: Tensor, correction_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 part and the correction (int8 or bfloat16) of float32 weights.

    >>> rounded, correction = split(torch.tensor([1.001, -3.0]), torch.int8)
    >>> join(rounded, correction)
    tensor([ 1.0010, -3.0000])
    """
    if correction_dtype == torch.int8:
        rounded = whole.bfloat16()
        distance = whole.view(torch.int32) - rounded.float().view(torch.int32)
        # At -128 the weight lies between two bfloat16 values, of which the next split may choose the other.
        correction = ((distance + 128) >> 8).clamp_(-127, 127).to(torch.int8)
        return rounded, correction.masked_fill_(rounded == 0, 0)  # `join` reads none there
    rounded = whole.bfloat16()
    kept = rounded.float().add_((whole - rounded.float()).bfloat16())
    kept = torch.where(kept.isfinite(), kept, whole)
    rounded = kept.bfloat16()  # of what is kept, for the same reason
    return rounded, torch.where(rounded.isfinite(), kept - rounded.float(), 0).bfloat16()
