"""Small integers packed into bytes: masks at 1 bit, window positions at 2 or 4, moments at 4, 5 or 8.

In plain torch; kernels equal it. Bits follow each other, the lowest first: of 5, eight integers are five bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memsave.torch_internals.fake_tensors import has_two_values, is_fake


def bits_for(num_values: int) -> int:
    """Return the fewest of 1, 2, 4, 8 bits that tell `num_values` values apart; 0 when a byte does not.

    >>> [bits_for(n) for n in (2, 4, 9, 49, 257)]
    [1, 2, 4, 8, 0]
    """
    return next((bits for bits in (1, 2, 4, 8) if num_values <= 2**bits), 0)


def pack(values: Tensor, bits: int) -> Tensor:
    """Return bytes (uint8, [ceil(n * bits / 8)]) of integers (uint8 or bool, [n]) below 2**bits.

    >>> pack(torch.tensor([1, 0, 0, 1, 1], dtype=torch.uint8), 1)
    tensor([25], dtype=torch.uint8)
    """
    if bits == 8:
        return values.to(torch.uint8, copy=True)
    per_word, dtype = (8 // bits, torch.uint8) if 8 % bits == 0 else (8, torch.int64)
    padded = torch.nn.functional.pad(values.view(torch.uint8), (0, -values.numel() % per_word)).view(-1, per_word)
    words = padded[:, 0].to(dtype, copy=True)
    for place in range(1, per_word):
        words |= padded[:, place].to(dtype) << (place * bits)
    if dtype == torch.uint8:
        return words
    return words[:, None].view(torch.uint8)[:, :bits].flatten()[: -(-values.numel() * bits // 8)]


def unpack(packed: Tensor, bits: int, num_values: int) -> Tensor:
    """Return the integers (uint8, [num_values]) that `pack` was given."""
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        values: Tensor = (packed[:, None] >> shifts) & (2**bits - 1)
        return values.view(-1)[:num_values]
    padded = torch.nn.functional.pad(packed, (0, -packed.numel() % bits)).view(-1, bits)
    words = torch.nn.functional.pad(padded, (0, 8 - bits)).view(torch.int64)[:, 0]
    values = torch.stack([(words >> place * bits & 2**bits - 1).to(torch.uint8) for place in range(8)], 1)
    return values.view(-1)[:num_values]


def pack_mask(mask: Tensor) -> Tensor:
    """Return one bit per element of a boolean mask, [n]."""
    return pack(mask, 1)


def pack_positive(flat: Tensor) -> Tensor:
    """Return the mask of what is not <= 0 (NaN counts as positive), one bit per element."""
    return pack(~(flat <= 0), 1)


def unpack_mask(packed: Tensor, num_values: int) -> Tensor:
    """Return the boolean mask, [num_values]."""
    return unpack(packed, 1, num_values).view(torch.bool)


def scale_where(mask: Tensor, values: Tensor, scale: float) -> Tensor:
    """Return `values` times `scale` where the boolean mask holds, times 0 elsewhere.

    >>> scale_where(torch.tensor([True, False]), torch.tensor([3.0, -3.0]), 2.0)
    tensor([6., -0.])
    """
    return (values * mask).mul_(scale)


def look_up(values: Tensor, table: Tensor, scale: float, shift: float) -> Tensor:
    """Replace `values` by the table's entries at `values * scale + shift`, cut off to an entry that exists; in place.

    >>> look_up(torch.tensor([0.2, 1.7, 9.0, torch.nan]), torch.tensor([10.0, 20.0, 30.0]), 1.0, 0.0)
    tensor([10., 20., 30., nan])
    """
    for part in values.split(_CHUNK):
        place = part.mul_(scale).add_(shift).clamp_(0, table.numel() - 1).nan_to_num(0.0).to(torch.int32)
        part.mul_(0.0).add_(table[place])
    return values


_CHUNK = 2**22  # elements at a time: bounds the temporaries
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def pack_two(flat: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return one bit per element, and the two values, of a tensor [n] that holds at most two bit patterns; else `None`.

    >>> packed, values = pack_two(torch.tensor([0.0, 2.0, 2.0]))
    >>> unpack_two(packed, values, 3)
    tensor([0., 2., 2.])
    >>> pack_two(torch.tensor([0.0, -0.0, 1.0])) is None
    True
    """
    patterns = flat.view(_INTEGERS[flat.element_size()])
    head = patterns[:256]
    if not (has_two_values(flat) if is_fake(flat) else _are_two(head, *head.aminmax())):
        return None  # nearly all others end here
    low, high = patterns.aminmax()
    if not is_fake(flat) and not _are_two(patterns, low, high):
        return None
    return pack(patterns == high, 1), torch.stack([low, high]).view(flat.dtype)


def _are_two(patterns: Tensor, low: Tensor, high: Tensor) -> bool:
    return bool(((patterns == low) | (patterns == high)).all())


def unpack_two(packed: Tensor, values: Tensor, size: int) -> Tensor:
    """Return the values that `pack_two` was given, [size]."""
    return torch.where(unpack(packed, 1, size).view(torch.bool), values[1], values[0])
