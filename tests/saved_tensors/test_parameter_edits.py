"""Edits of parameters are told, those through `.data` by their values, and undone where a trial has made them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memsave.saved_tensors.parameter_edits import ParameterEdits, ParametersKept, RepeatedEdits


def in_place(p):
    with torch.no_grad():
        p.mul_(2)


def by_foreach(p):
    with torch.no_grad():
        torch._foreach_mul_([p], 2)


def of_a_part(p):
    p.data[1:, :2].fill_(7)


def hidden(p):
    p.data.mul_(2)


def new_data(p):
    p.data = p.data * 2


def not_a_number(p):
    p.data[0, 0] = float("nan")


EDITS = [in_place, by_foreach, of_a_part, hidden, new_data, not_a_number]
HIDDEN = EDITS[2:]


def some(dtype=torch.float32, trained=True):
    return nn.Parameter(torch.arange(1.0, 13).view(3, 4).to(dtype), requires_grad=trained)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_told_where_values_are_read(edit, trained, dtype):
    p, other = some(dtype, trained), some(dtype, trained)
    edits = ParameterEdits([("p", p), ("other", other)], reads=None)
    assert not edits.edited()
    edit(p)
    assert list(edits.edited()) == ["p"]
    assert edits.edited()["p"] is p
    assert edits.without_version() == ({"p"} if edit in HIDDEN else set())


@pytest.mark.parametrize("edit", EDITS)
def test_versions_alone_tell_what_autograd_counts(edit):
    p, read = some(), some()
    edits = ParameterEdits([("p", p), ("read", read)], reads={"read"})
    edit(p)
    edit(read)
    assert set(edits.edited()) == ({"read"} if edit in HIDDEN else {"p", "read"})


def test_a_parameter_of_nan_is_not_edited_by_being_read():
    p = nn.Parameter(torch.full((3,), float("nan")))
    assert not ParameterEdits([("p", p)], reads=None).edited()


def test_memory_that_was_freed_has_no_values_to_differ():
    p = some()
    edits = ParameterEdits([("p", p)], reads=None)
    p.data.untyped_storage().resize_(0)
    assert not edits.edited()


@pytest.mark.parametrize(
    ("edit", "is_repeated"), [(lambda p: p.data.clamp_(max=5), False), (lambda p: p.data.mul_(0.5), True)]
)
def test_an_edit_that_sets_the_same_again_is_not_repeated(edit, is_repeated):
    p, repeated = some(), RepeatedEdits()
    edit(p)
    repeated.add({"p": p})
    edit(p)
    assert repeated.take() == (["p"] if is_repeated else [])
    assert repeated.take() == []


@pytest.mark.parametrize("edit", EDITS)
def test_a_trial_gives_parameters_their_values_and_their_memory_back(edit):
    module = nn.Linear(4, 3)
    before, address = module.weight.detach().clone(), module.weight.data_ptr()
    with ParametersKept(module):
        edit(module.weight)
        assert not torch.equal(module.weight, before)
    assert torch.equal(module.weight, before)
    assert module.weight.data_ptr() == address


def test_parameters_are_given_back_when_the_trial_fails():
    module = nn.Linear(4, 3)
    before = module.weight.detach().clone()

    def failing():
        hidden(module.weight)
        raise KeyError

    with pytest.raises(KeyError), ParametersKept(module):
        failing()
    assert torch.equal(module.weight, before)
