import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from lightning_memsave.numerics import bits

BITS = (1, 2, 4, 5, 8)


@st.composite
def integers_below(draw):
    width = draw(st.sampled_from(BITS))
    return width, draw(st.lists(st.integers(0, 2**width - 1), max_size=70))


@given(drawn=integers_below())
def test_integers_survive_in_the_bytes_that_are_stated(drawn):
    width, values = drawn
    packed = bits.pack(torch.tensor(values, dtype=torch.uint8), width)
    assert (packed.dtype, packed.numel()) == (torch.uint8, -(-len(values) * width // 8))
    assert bits.unpack(packed, width, len(values)).tolist() == values


@given(drawn=integers_below())
def test_first_element_is_in_the_lowest_bits(drawn):
    width, values = drawn
    number = sum(value << (i * width) for i, value in enumerate(values))
    packed = bits.pack(torch.tensor(values, dtype=torch.uint8), width)
    assert int.from_bytes(bytes(packed.tolist()), "little") == number


@given(mask=st.lists(st.booleans(), max_size=70))
def test_masks_are_integers_of_one_bit(mask):
    packed = bits.pack(torch.tensor(mask, dtype=torch.bool), 1)
    assert bits.unpack(packed, 1, len(mask)).bool().tolist() == mask


@pytest.mark.parametrize("width", BITS)
def test_packed_integers_share_no_memory_with_their_source(width):
    values = torch.zeros(16, dtype=torch.uint8)
    packed = bits.pack(values, width)
    values.fill_(1)
    assert not packed.any()


@pytest.mark.parametrize(("num_values", "width"), [(1, 1), (3, 2), (5, 4), (16, 4), (17, 8), (256, 8), (257, 0)])
def test_fewest_bits(num_values, width):
    assert bits.bits_for(num_values) == width
