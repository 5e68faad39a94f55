"""State that is elsewhere comes back bit for bit, and is not where it was."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch

from lightning_memsave.techniques.optimizer_state.host_offload import Elsewhere, fetch_ahead

TENSORS = {
    "float32": lambda: torch.randn(300, 5),
    "not a number": lambda: torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
    "bfloat16": lambda: torch.randn(70_000).bfloat16(),
    "bytes": lambda: torch.randint(0, 256, (9, 7), dtype=torch.uint8),
    "transposed": lambda: torch.randn(8, 30).t(),
    "a scalar": lambda: torch.tensor(3.0),
    "nothing": lambda: torch.zeros(0, 4),
}


def same_bits(first, second):
    first, second = first.contiguous(), second.contiguous()
    return (first.shape, first.dtype) == (second.shape, second.dtype) and (
        first.view(-1).view(torch.uint8).tolist() == second.view(-1).view(torch.uint8).tolist()
    )


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_bit_for_bit(name):
    tensor = TENSORS[name]()
    elsewhere = Elsewhere(tensor)
    assert same_bits(elsewhere.get(), tensor)
    assert same_bits(elsewhere.host(), tensor)


def test_what_is_given_back_is_a_copy():
    elsewhere = Elsewhere(torch.ones(4))
    elsewhere.get().zero_()
    elsewhere.host().zero_()
    assert elsewhere.get().tolist() == [1.0] * 4


def test_the_tensor_is_not_kept_alive():
    tensor = torch.ones(4)
    storage, elsewhere = weakref.ref(tensor.untyped_storage()), Elsewhere(tensor)
    del tensor
    assert storage() is None
    assert elsewhere.get().tolist() == [1.0] * 4


def test_another_value_takes_its_place():
    elsewhere, others = Elsewhere(torch.ones(1000)), [Elsewhere(torch.full((1000,), float(i))) for i in range(3)]
    for value in (2.0, 3.0):
        elsewhere.put(torch.full((1000,), value))
        assert elsewhere.get().unique().tolist() == [value]
    assert [other.get().unique().tolist() for other in others] == [[0.0], [1.0], [2.0]]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))], ids=["copy", "pickle"])
def test_copies_go_on_by_themselves(copied):
    elsewhere = Elsewhere(torch.ones(10))
    other = copied(elsewhere)
    elsewhere.put(torch.zeros(10))
    assert other.get().tolist() == [1.0] * 10


def test_fetching_ahead_changes_nothing():
    state = {"step": torch.tensor(1.0), "exp_avg": Elsewhere(torch.ones(3)), "n": 3}
    fetch_ahead([state, {}])
    assert state["exp_avg"].get().tolist() == [1.0] * 3


@pytest.mark.gpu
def test_on_cuda_copies_in_flight_are_in_order():
    values = [torch.full((2**20,), float(i), device="cuda") for i in range(20)]
    elsewhere = Elsewhere(values[0])
    for value in values[1:]:
        elsewhere.put(value)
        elsewhere.fetch()
        found = elsewhere.get()
        assert found.device == value.device
        assert torch.equal(found, value)
        assert torch.equal(elsewhere.host(), value.cpu())
    assert elsewhere.host().device.type == "cpu"
