"""Positions of the live elements of a sparse tensor, packed, and the way between its live values and its dense form.

Whichever of two formats takes fewer bytes, told apart by their length; bytes (uint8), as collectives know no int16:

| format                                        | bytes, n elements of which k live  | chosen at densities |
|-----------------------------------------------|------------------------------------|---------------------|
| one bit per element                           | ceil(n / 8)                        | above 1/16          |
| 16 bit per live one, inside blocks of 65,536  | 2 k + 4 ceil(n / 65,536)           | below               |

32-bit positions would be the smallest only with less than two live elements in each block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memsave.numerics import kernels
from lightning_memsave.torch_internals.fake_tensors import note_num_set

BLOCK = 2**16


def index_bytes(num_live: int, size: int) -> int:
    """Return bytes of the packed positions of `num_live` out of `size` elements.

    >>> index_bytes(100, 1000), index_bytes(10, 1000)
    (125, 24)
    """
    return min(_bitmask_bytes(size), _blocks_bytes(num_live, size))


def _bitmask_bytes(size: int) -> int:
    return -(-size // 8)


def _blocks_bytes(num_live: int, size: int) -> int:
    return 2 * num_live + 4 * -(-size // BLOCK)


def _is_bitmask(index: Tensor, size: int) -> bool:
    return index.numel() == _bitmask_bytes(size)


def pack_positions(positions: Tensor, size: int) -> Tensor:
    """Return the index of ascending positions (int64, [k]) in a tensor of `size` elements.

    >>> pack_positions(torch.tensor([0, 3, 4]), 8)
    tensor([25], dtype=torch.uint8)
    """
    if _bitmask_bytes(size) <= _blocks_bytes(positions.numel(), size):
        packed = kernels.pack_mask(
            torch.zeros(size, dtype=torch.bool, device=positions.device).index_fill_(0, positions, True)
        )
        note_num_set(packed, positions.numel())
        return packed
    counts = torch.zeros(-(-size // BLOCK), dtype=torch.int32, device=positions.device)
    counts.scatter_add_(0, positions // BLOCK, torch.ones_like(positions, dtype=torch.int32))
    return torch.cat([counts.view(torch.int16), (positions % BLOCK).to(torch.int16)]).view(torch.uint8)


def unpack_positions(index: Tensor, size: int) -> Tensor:
    """Return the positions that `pack_positions` was given."""
    if _is_bitmask(index, size):
        return kernels.set_bits(index)
    num_blocks = -(-size // BLOCK)
    counts = index[: 4 * num_blocks].view(torch.int32)
    local = index[4 * num_blocks :].view(torch.int16).long() & (BLOCK - 1)
    starts = torch.arange(0, num_blocks * BLOCK, BLOCK, device=index.device)
    return local.add_(starts.repeat_interleave(counts, output_size=local.numel()))


def scatter(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Return the dense tensor, [size], of live values, [k]; zero elsewhere."""
    # `scatter_` would copy the whole of 16-bit values in float32 on the CPU.
    return values.new_zeros(size).index_copy_(0, unpack_positions(index, size), values)


def gather(dense: Tensor, index: Tensor) -> Tensor:
    """Return the live values, [k], of a dense tensor, [size]."""
    return dense.index_select(0, unpack_positions(index, dense.numel()))


def entries_of_rows(index: Tensor, shape: torch.Size, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the live elements in some rows of a sparse matrix.

    Args:
        index: of the matrix.
        shape: of the matrix, (n, m).
        rows: ascending, [r].

    Returns:
        Their numbers among the live elements, and their positions in the matrix of these rows alone, [r, m].

    >>> index = pack_positions(torch.tensor([0, 3, 4]), 6)  # of a matrix of 3 rows
    >>> entries_of_rows(index, torch.Size([3, 2]), torch.tensor([0, 2]))
    (tensor([0, 2]), tensor([0, 2]))
    """
    positions, width = unpack_positions(index, shape.numel()), shape[1]
    starts = torch.searchsorted(positions, rows * width)
    counts = torch.searchsorted(positions, (rows + 1) * width) - starts
    row = torch.repeat_interleave(counts)  # for each entry, [k']
    numbers = torch.arange(row.numel(), device=row.device) + (starts - counts.cumsum(0) + counts)[row]
    moved = (torch.arange(rows.numel(), device=rows.device) - rows) * width
    return numbers, positions[numbers] + moved[row]
