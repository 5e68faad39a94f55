"""Other weights for a while, without a copy of them: samples then have different losses, whatever the start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_memsave.torch_internals.fake_tensors import is_plain
from lightning_memsave.torch_internals.sharded_parameters import as_local, free_gathered

_SMALL = 0.02  # what parameters of zeros become, the standard deviation
_MOST_MOVED = 2**12  # elements of each parameter


@contextlib.contextmanager
def moved(module: nn.Module) -> Iterator[None]:
    """Change some elements of every parameter inside: samples then have different losses, whatever the start.

    No copy is kept: leading bits of the significands are flipped, which changes numbers by up to a factor of two, and
    flipped again.
    """
    flipped: list[tuple[Tensor, bool]] = []
    try:
        for data in _movable(module):
            some = data.view(-1)[:: -(-data.numel() // _MOST_MOVED)]
            is_zero = not some.any()
            _flip(some, is_zero)
            flipped.append((some, is_zero))
        yield
    finally:
        for some, is_zero in flipped:
            _flip(some, is_zero)


@contextlib.contextmanager
def enlarged(module: nn.Module) -> Iterator[None]:
    """Multiply some elements of every parameter by a power of two inside, which loses no bit either way."""
    some = [data.view(-1)[:: -(-data.numel() // _MOST_MOVED)] for data in _movable(module)]
    changed = [torch.where(each.abs() < _LARGEST_ENLARGED, _ENLARGED, 1.0).to(each.dtype) for each in some]
    done: list[tuple[Tensor, Tensor]] = []
    try:
        for each, factor in zip(some, changed, strict=True):
            each.mul_(factor)
            done.append((each, factor))
        yield
    finally:
        for each, factor in done:
            each.div_(factor)


def _movable(module: nn.Module) -> list[Tensor]:
    """Return what this process has of every parameter: of sharded ones the shard, as what is gathered is freed."""
    free_gathered(module)
    parameters = (as_local(p.data) for p in dict.fromkeys(module.parameters()))
    return [p for p in parameters if p.dtype in _SIGNIFICANDS and is_plain(p) and p.is_contiguous() and p.numel()]


_ENLARGED, _LARGEST_ENLARGED = 8.0, 2.0**10
_SIGNIFICANDS = {  # the integers, and the leading bits of the significand in them
    torch.float64: (torch.int64, 7 << 49),
    torch.float32: (torch.int32, 7 << 20),
    torch.float16: (torch.int16, 7 << 7),
    torch.bfloat16: (torch.int16, 7 << 4),
}


@torch.no_grad()
def _flip(values: Tensor, is_zero: bool) -> None:
    """Flip some bits in place, of zeros those of small numbers of either sign. Done twice, nothing has changed."""
    integers, leading = _SIGNIFICANDS[values.dtype]
    generator = torch.Generator().manual_seed(values.numel())
    bits = torch.randint(leading + 1, values.shape, generator=generator, dtype=integers, device="cpu") & leading
    if is_zero:
        small = torch.randn(values.shape, generator=generator, device="cpu").to(values.dtype) * _SMALL
        bits = small.view(integers)
    values.view(integers).bitwise_xor_(bits.to(values.device))
