from __future__ import annotations

import unittest.mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_memsave.measuring import allocation_peak
from lightning_memsave.numerics import kernels
from lightning_memsave.numerics.sparse_index import (
    BLOCK,
    gather,
    index_bytes,
    pack_positions,
    scatter,
    unpack_positions,
)


@given(st.integers(1, 3000), st.floats(0, 1), st.integers(0, 99))
def test_positions_survive_and_take_the_stated_bytes(size, density, seed):
    mask = torch.rand(size, generator=torch.Generator().manual_seed(seed)) < density
    positions = mask.nonzero().view(-1)
    index = pack_positions(positions, size)
    assert index.nbytes == index_bytes(positions.numel(), size)
    assert torch.equal(unpack_positions(index, size), positions)
    dense = torch.arange(1.0, size + 1)
    assert torch.equal(gather(dense, index), dense[mask])
    assert torch.equal(scatter(dense[mask], index, size), dense * mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_values_are_made_without_a_copy_of_them(dtype):
    positions = torch.arange(0, 4000, 8)
    index, values = pack_positions(positions, 4000), torch.rand(500).to(dtype)
    unpacking = allocation_peak(lambda: unpack_positions(index, 4000), 0)
    assert allocation_peak(lambda: scatter(values, index, 4000), 0) == 4000 * values.element_size() + unpacking


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_blocks_of_16_bit_positions(size):
    positions = torch.tensor(sorted({0, 1, BLOCK - 2, size - 1}))
    index = pack_positions(positions, size)
    assert index.nbytes == 2 * len(positions) + 4 * -(-size // BLOCK)
    assert torch.equal(unpack_positions(index, size), positions)


def test_the_smaller_format_is_chosen():
    size = 4 * BLOCK
    for num_live, expected in ((1000, 2016), (size // 16 - 9, 32766), (size // 16, 32768), (size, 32768)):
        assert pack_positions(torch.arange(num_live), size).nbytes == expected == index_bytes(num_live, size)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_set_bits_are_found_with_and_without_a_compiler(values):
    packed = torch.tensor(values, dtype=torch.uint8)
    expected = [8 * j + i for j, value in enumerate(values) for i in range(8) if value >> i & 1]
    assert kernels.set_bits(packed).tolist() == expected
    with unittest.mock.patch.object(kernels, "_has_native", return_value=False):
        assert kernels.set_bits(packed).tolist() == expected


def test_nothing_lives():
    for size in (8, 3 * BLOCK):
        index = pack_positions(torch.empty(0, dtype=torch.int64), size)
        assert unpack_positions(index, size).numel() == 0
        assert torch.equal(scatter(torch.empty(0), index, size), torch.zeros(size))
