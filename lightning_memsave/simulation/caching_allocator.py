"""What a CUDA device would hold: a step's allocations replayed through the rules of torch's caching allocator.

Sizes are rounded up to 512 bytes. Up to 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB,
and larger ones from segments of their own, rounded up to 2 MiB. A free block that is the smallest to fit is cut where
the rest is worth keeping; neighbours that are free become one again; segments are not given back. One stream, the
default settings.

Source: torch's `c10/cuda/CUDACachingAllocator.cpp`, its documented constants. Held against an H100 (`docs/gpu.md`):
allocated bytes within 0.2 %, reserved bytes between 0.87 and 1.17 of the device's.
"""

from __future__ import annotations

import bisect
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lightning_memsave.core.units import MIB
from lightning_memsave.measuring.allocation_trace import Allocations
from lightning_memsave.measuring.allocator import AllocatorBytes

_ROUNDING = 512
_SMALL, _SMALL_SEGMENT = MIB, 2 * MIB
_MIN_LARGE, _LARGE_SEGMENT, _LARGE_ROUNDING = 10 * MIB, 20 * MIB, 2 * MIB
CONTEXT_BYTES = (300 * MIB, 1024 * MIB)
"""What the driver's context, kernels and the libraries' own workspace take besides: a range, not a measurement."""


@dataclass(eq=False, slots=True)
class _Block:
    size: int
    address: int
    is_small: bool
    previous: _Block | None = None
    next: _Block | None = None
    is_free: bool = False

    def key(self) -> tuple[int, int]:
        return self.size, self.address


@dataclass
class CachingAllocator:
    """The bookkeeping alone.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3)
    >>> allocator.peak
    AllocatorBytes(allocated_bytes=512, reserved_bytes=2097152)
    """

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    _free: dict[bool, list[_Block]] = field(default_factory=lambda: {True: [], False: []})
    _end: int = 0

    @property
    def peak(self) -> AllocatorBytes:
        """The highest figures so far; what is reserved never falls."""
        return AllocatorBytes(allocated_bytes=self.peak_allocated_bytes, reserved_bytes=self.reserved_bytes)

    def allocate(self, num_bytes: int) -> _Block:
        """Return a block of at least so many bytes."""
        size = _rounded(num_bytes)
        is_small = size <= _SMALL
        free = self._free[is_small]
        place = bisect.bisect_left(free, (size, -1), key=_Block.key)
        block = free.pop(place) if place < len(free) else self._new_segment(size, is_small)
        block.is_free = False
        rest = block.size - size
        if rest >= _ROUNDING if is_small else rest > _SMALL:
            self._cut(block, size)
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def _new_segment(self, size: int, is_small: bool) -> _Block:
        if is_small:
            segment = _SMALL_SEGMENT
        else:
            segment = _LARGE_SEGMENT if size < _MIN_LARGE else -(-size // _LARGE_ROUNDING) * _LARGE_ROUNDING
        block = _Block(segment, self._end, is_small)
        self._end += segment
        self.reserved_bytes += segment
        return block

    def _cut(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.address + size, block.is_small, block, block.next)
        if block.next is not None:
            block.next.previous = rest
        block.size, block.next = size, rest
        self._put_back(rest)

    def _put_back(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], block, key=_Block.key)

    def _take_out(self, block: _Block) -> None:
        free = self._free[block.is_small]
        free.pop(bisect.bisect_left(free, block.key(), key=_Block.key))

    def free(self, block: _Block) -> None:
        """Give a block back."""
        self.allocated_bytes -= block.size
        if (before := block.previous) is not None and before.is_free:
            self._take_out(before)
            block.address, block.size = before.address, before.size + block.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if (after := block.next) is not None and after.is_free:
            self._take_out(after)
            block.size += after.size
            block.next = after.next
            if block.next is not None:
                block.next.previous = block
        self._put_back(block)


def cublas_workspaces() -> tuple[int, int]:
    """Return the bytes that cuBLAS keeps from torch's allocator: for the thread of forward, and for autograd's.

    Each is 32 MiB on Hopper and later GPUs, which are assumed where there is none, and 8.1 MiB on earlier ones;
    `CUBLAS_WORKSPACE_CONFIG` sets another size (https://docs.nvidia.com/cuda/cublas/#results-reproducibility).
    """
    pairs = [each.split(":") for each in re.findall(r":(\d+:\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))]
    size = sum(1024 * int(kibibytes) * int(count) for kibibytes, count in pairs)
    if not size:
        is_early = torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)
        size = 1024 * (2 * 4096 + 8 * 16) if is_early else 32 * MIB
    return size, size


_NUM_STEPS = 3  # what one leaves in pieces, the next ones find


def replay(step: Allocations, lasting: Sequence[int] = ()) -> AllocatorBytes:
    """Return the peaks of some equal steps: what one gives back, the next one finds.

    Args:
        step: its allocations.
        lasting: sizes that are there from beginning to end, besides.

    >>> replay(Allocations((2**20,), ((2**21, 1), (-(2**21), 1))))
    AllocatorBytes(allocated_bytes=3145728, reserved_bytes=23068672)
    """
    allocator = CachingAllocator()
    for size in lasting:
        allocator.allocate(size)
    live = {number: allocator.allocate(size) for number, size in enumerate(step.held)}
    for _ in range(_NUM_STEPS):
        sizes: dict[int, int] = dict(enumerate(step.held))
        for change, number in step.changes:
            if (block := live.pop(number, None)) is not None:
                allocator.free(block)  # what grows is a new block
            sizes[number] = sizes.get(number, 0) + change
            if sizes[number] > 0:
                live[number] = allocator.allocate(sizes[number])
        _begin_again(allocator, live, step, sizes)
    return allocator.peak


def _rounded(num_bytes: int) -> int:
    return max(_ROUNDING, -(-num_bytes // _ROUNDING) * _ROUNDING)


def _begin_again(
    allocator: CachingAllocator, live: dict[int, _Block], step: Allocations, sizes: Mapping[int, int]
) -> None:
    """Let what the step made and left take the places of what it took away (gradients of before).

    Told by the size that was asked for: a block may be larger, where its rest was too small to be cut off.
    """
    num_held = len(step.held)
    survivors: defaultdict[int, list[_Block]] = defaultdict(list)
    for number in [number for number in live if number >= num_held]:
        survivors[_rounded(sizes[number])].append(live.pop(number))
    for number in range(num_held):
        if number not in live:
            size = _rounded(step.held[number])
            live[number] = survivors[size].pop() if survivors[size] else allocator.allocate(size)
    for blocks in survivors.values():
        for block in blocks:
            allocator.free(block)
