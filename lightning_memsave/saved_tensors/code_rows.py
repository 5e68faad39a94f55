"""Rows: how a storage is cut, so that no block of a code crosses the end of a row.

The noise in a block is as large as the block's range. Where a small row shared a block with a large one, its noise
would have nothing to do with its own size. So codes end at rows: what a normalisation normalises together
(`norm_recompute`), for all else the smallest run of whole dimensions in memory that has 64 elements: a token, a plane,
some small planes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

SMALLEST_ROW = 64
"""Elements of a row that nobody normalises, at least: with 64, ranges make a code of 4 bits 9 % larger."""
SMALLEST_PIECE = 16
"""Elements of a piece, at least, of a row that lies in pieces."""
_CHUNK = 2**20  # elements that are put in another order at a time

Dim = tuple[int, int]
"""Size and stride."""


@dataclass(frozen=True, slots=True)
class Rows:
    """How a storage is cut into rows."""

    length: int
    order: tuple[Dim, ...] | None = None
    """The storage's dimensions in the order in which rows run through it; `None`: as it lies in memory."""

    def parts(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield the elements of a storage, some whole rows at a time.

        `flat` itself, or views of it in the order of rows.
        """
        if self.order is None:
            yield flat
            return
        sizes, strides = zip(*self.order, strict=True)
        view = flat.as_strided(sizes, strides, flat.storage_offset())
        yield from view.split(max(1, _CHUNK // (view.numel() // sizes[0])))


@functools.lru_cache(maxsize=4096)
def rows_in_memory(shape: tuple[int, ...], strides: tuple[int, ...], num_elements: int) -> Rows:
    """Return the smallest runs of whole dimensions that have 64 elements; one row where there is none.

    >>> rows_in_memory((8, 100, 192), (19200, 192, 1), 8 * 100 * 192).length
    192
    >>> rows_in_memory((8, 16, 4, 4), (256, 16, 4, 1), 8 * 256).length  # a plane has 16
    256
    """
    run = 1
    for size, stride in _in_memory(zip(shape, strides, strict=True)):
        if stride != run or run >= SMALLEST_ROW:
            break
        run *= size
    return Rows(run if run >= SMALLEST_ROW and num_elements % run == 0 else num_elements)


def rows_over(tensor: Tensor, outer: Sequence[Dim], inner: Sequence[Dim]) -> Rows | None:
    """Return a row for each place in the dimensions `outer`, over the dimensions `inner`, of the storage of `tensor`.

    A row may lie in pieces of 16 elements or more, each of which is a row then. `None` where pieces are smaller and
    `tensor` is a window into its storage.
    """
    outer, inner = _in_memory(outer), _in_memory(inner)
    run, num_joined = 1, 0
    while num_joined < len(inner) and inner[num_joined][1] == run:
        run *= inner[num_joined][0]
        num_joined += 1
    length = math.prod(size for size, _ in inner)
    distances = [stride for _, stride in (*outer, *inner[num_joined:])]
    if run >= min(length, SMALLEST_PIECE) and not any(
        distance % run for distance in (*distances, tensor.storage_offset(), _storage_size(tensor))
    ):
        return Rows(run)
    if not covers_its_storage(tensor):
        return None
    return Rows(length, (*reversed(outer), *reversed(inner)) if outer else None)  # one row is the same in any order


def covers_its_storage(tensor: Tensor) -> bool:
    """Return whether a tensor is all of its storage, each element once, in any order of its dimensions."""
    expected = 1
    for size, stride in _in_memory(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride != expected:
            return False
        expected *= size
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _in_memory(dims: Iterable[Dim]) -> list[Dim]:
    """Return the dimensions from the innermost in memory to the outermost, without those of one element."""
    return sorted(((size, stride) for size, stride in dims if size != 1), key=lambda dim: dim[1])


def _storage_size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.element_size()
