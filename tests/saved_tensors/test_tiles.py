"""Slices of a call: their lengths, their noise, their layout in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_memsave.saved_tensors.kept_noise import Draw, KeptNoise, NoiseError
from lightning_memsave.saved_tensors.region_members import Group, Member, Membership
from lightning_memsave.saved_tensors.tiles import Cut, lengths_of, run_in_tiles


def member() -> Member:
    return Member("module", [Membership(Group(1), 0)], None)


@given(st.integers(1, 300), st.integers(1, 300))
def test_lengths_add_up_and_differ_by_one_at_most(extent, size):
    lengths = lengths_of(extent, size)
    assert sum(lengths) == extent
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1
    assert len(lengths) == -(-extent // size)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool])
def test_masks_of_tiles_are_the_slices_of_the_whole_mask(order, dtype):
    shape, lengths = (7, 50, 3), [3, 2, 2]
    torch.manual_seed(0)
    whole = torch.empty_permuted(shape, order, dtype=dtype).bernoulli_(0.7)
    following = torch.rand(())
    torch.manual_seed(0)
    noise = KeptNoise([Draw(1, order)], 0, lengths)
    parts = []
    for number, length in enumerate(lengths):
        with noise.of_tile(number):
            parts.append(torch.empty(length, 50, 3, dtype=dtype).bernoulli_(0.7))
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(torch.rand(()), following)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_in_one_operation_has_the_slices_of_the_whole_mask(order, dtype):
    """As all dropout on CUDA."""
    shape, lengths = (7, 50, 3), [3, 2, 2]
    x = torch.empty_permuted(shape, order, dtype=dtype)
    x.copy_(torch.randn(shape))
    torch.manual_seed(0)
    whole, mask = torch.native_dropout(x, 0.3, True)
    following = torch.rand(())
    torch.manual_seed(0)
    noise = KeptNoise([Draw(1, order)], 0, lengths)
    parts = []
    for number, part in enumerate(x.split(lengths)):
        with noise.of_tile(number):
            parts.append(torch.native_dropout(part, 0.3, True))
            torch.native_dropout(part, 0.3, False)  # draws nothing
    assert torch.equal(torch.cat([values for values, _ in parts]), whole)
    assert torch.equal(torch.cat([mask for _, mask in parts]), mask)
    assert torch.equal(torch.rand(()), following)


def test_what_all_entries_share_is_drawn_once():
    torch.manual_seed(0)
    whole, shared, following = torch.randn(5, 6), torch.rand(1, 3), torch.rand(())
    torch.manual_seed(0)
    noise = KeptNoise([Draw(1, (0, 1)), Draw(0, (0, 1))], 1, [4, 2])
    found = []
    for number, length in enumerate([4, 2]):
        with noise.of_tile(number):
            found.append((torch.randn(5, length), torch.rand(1, 3)))
    assert torch.equal(torch.cat([first for first, _ in found], 1), whole)
    assert all(torch.equal(second, shared) for _, second in found)
    assert torch.equal(torch.rand(()), following)


def test_a_tile_draws_the_same_again():
    noise = KeptNoise([Draw(1, (0,))], 0, [4, 4])
    found = []
    for _ in range(2):
        with noise.of_tile(1):
            found.append(torch.zeros(4).bernoulli_(0.5))
    assert torch.equal(*found)


def test_what_nobody_has_announced_is_an_error():
    noise = KeptNoise([], 0, [4, 4])
    with noise.of_tile(0), pytest.raises(NoiseError, match="more numbers"):
        torch.rand(4)
    noise = KeptNoise([Draw(1, (0,))], 0, [4, 4])
    with noise.of_tile(0), pytest.raises(NoiseError, match="aten::bernoulli_"):
        torch.zeros(4).bernoulli_(torch.full((4,), 0.5))


def test_the_result_lies_in_memory_as_the_plain_one():
    class Turned(nn.Module):
        def forward(self, x):
            return x.transpose(0, 1).contiguous().transpose(0, 1) * 2, x.sum(-1)

    x = torch.randn(6, 5, 4)
    found = run_in_tiles(member(), Turned(), (x,), {}, Cut(0, (), ((1, 0, 2), (0, 1))), 1)
    expected = Turned()(x)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, expected, strict=True))


def test_an_output_without_entries_is_refused():
    class Mean(nn.Module):
        def forward(self, x):
            return x.mean()

    with pytest.raises(ValueError, match="does not have the 2 entries"):
        run_in_tiles(member(), Mean(), (torch.randn(4, 3),), {}, Cut(0, (), ((),)), 2)


def test_backward_holds_the_hidden_layer_of_one_slice():
    most = [0]

    class Hidden(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            most[0] = max(most[0], x.shape[0])
            return gradient * x.exp()

    class Module(nn.Module):
        def forward(self, x):
            return Hidden.apply(x * 2)

    x = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    run_in_tiles(member(), Module(), (x,), {}, Cut(0, (), ((0, 1),)), 3).sum().backward()
    assert most == [3]
    torch.testing.assert_close(x.grad, 2 * (2 * x.detach()).exp())
