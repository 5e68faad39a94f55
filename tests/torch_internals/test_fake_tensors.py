"""What is known of tensors without values, and that real ones are read."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from lightning_memsave.torch_internals import fake_tensors
from lightning_memsave.torch_internals.fake_tensors import (
    UNKNOWN,
    Facts,
    FakeTensorMode,
    facts_of,
    has_two_values,
    integer_range,
    is_fake,
    is_plain,
    note,
    note_num_set,
    num_set,
    truth,
    with_values,
)


def fake(*shape, dtype=torch.float32):
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype)


class Subclass(Tensor):
    pass


def test_a_fake_tensor_stands_for_a_plain_one():
    real, made = torch.zeros(3), fake(3)
    assert not is_fake(real)
    assert is_fake(made)
    assert is_plain(real)
    assert is_plain(made)
    assert not is_plain(real.as_subclass(Subclass))
    assert not is_plain(nn.Parameter(real))
    assert is_plain(nn.Parameter(real), nn.Parameter)
    assert not is_plain(real, nn.Parameter)
    with torch.inference_mode():
        assert not is_plain(torch.zeros(3))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_a_nested_tensor_is_not_plain():
    assert not is_plain(torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]))


def test_a_condition_without_a_value_is_what_it_is_said_to_be():
    for otherwise in (True, False):
        assert truth(torch.tensor(1), otherwise) is True
        assert truth(torch.tensor(False), otherwise) is False
        assert truth(fake(dtype=torch.bool), otherwise) is otherwise


def test_a_function_has_values_inside_of_a_fake_mode():
    with FakeTensorMode():
        made = with_values(lambda: torch.arange(4).sum())
        assert is_fake(torch.zeros(1))
    assert not is_fake(made)
    assert made.item() == 6


def test_what_a_function_raises_comes_through():
    with pytest.raises(ZeroDivisionError):
        with_values(lambda: 1 // 0)


def test_facts_are_of_the_storage_and_die_with_it():
    before = len(fake_tensors._facts)
    x = fake(4, 4, dtype=torch.int64)
    assert facts_of(x) == UNKNOWN
    note(x, Facts(0, 9, 3))
    assert facts_of(x) == facts_of(x.view(16)) == facts_of(x[1:]) == Facts(0, 9, 3)
    note(x, UNKNOWN)
    assert facts_of(x) == UNKNOWN
    note(x.view(16), Facts(1, 2))
    assert facts_of(x) == Facts(1, 2)
    assert len(fake_tensors._facts) == before + 1
    del x
    gc.collect()
    assert len(fake_tensors._facts) == before


def test_the_facts_of_one_tensor_are_not_anothers():
    for i in range(50):  # addresses are given again
        x = fake(3, dtype=torch.int64)
        assert facts_of(x) == UNKNOWN
        note(x, Facts(i, i))


def test_a_range_is_read_where_there_are_values_and_else_bounded():
    assert integer_range(torch.tensor([[3, -7], [5, 0]])) == (-7, 5)
    x = fake(5, dtype=torch.int16)
    assert integer_range(x) == (-(2**15), 2**15 - 1)
    note(x, Facts(low=-1))
    assert integer_range(x) == (-1, 2**15 - 1)
    note(x, Facts(low=-1, high=4))
    assert integer_range(x) == (-1, 4)


@pytest.mark.parametrize(("num_values", "expected"), [(None, False), (1, True), (2, True), (3, False)])
def test_two_values_are_few(num_values, expected):
    x = fake(5)
    note(x, Facts(num_values=num_values))
    assert has_two_values(x) is expected


def test_all_bits_of_a_mask_may_be_set_until_it_is_noted():
    mask, real = fake(10, dtype=torch.uint8), torch.zeros(10, dtype=torch.uint8)
    assert num_set(mask) == 80
    note_num_set(mask, 7)
    note_num_set(real, 7)
    assert num_set(mask) == 7
    assert num_set(real) == 80  # its bits can be counted
