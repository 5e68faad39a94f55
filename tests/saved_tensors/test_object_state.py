"""The state of plain objects: what counts as a change, and copies of how they were."""

from __future__ import annotations

import random
import threading
from collections import Counter, deque

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memsave.saved_tensors.object_state import ObjectState, Stub, is_immutable, is_object, state_of


class Cache:
    def __init__(self):
        self.keys, self.count, self.table = torch.zeros(2), 0, {"a": [1, 2]}
        self.module, self.queue = nn.Linear(1, 1), deque([1])

    def method(self):
        return self.count


def replace_the_tensor(cache):
    cache.keys = cache.keys.clone()


def edit_the_tensor(cache):
    cache.keys.add_(1)


CHANGES = {
    "a number": lambda cache: setattr(cache, "count", 1),
    "an item inside": lambda cache: cache.table["a"].append(3),
    "a new attribute": lambda cache: setattr(cache, "more", None),
    "a queue": lambda cache: cache.queue.rotate(0) or cache.queue.append(2),
    "another tensor": replace_the_tensor,
    "a tensor in place": edit_the_tensor,
    "another module": lambda cache: setattr(cache, "module", nn.Linear(1, 1)),
    "a bound method of another": lambda cache: setattr(cache, "callback", Cache().method),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name):
    cache = Cache()
    cache.callback = cache.method
    before = ObjectState(cache)
    assert before.equals(ObjectState(cache))
    CHANGES[name](cache)
    assert not before.equals(ObjectState(cache))
    assert not ObjectState(cache).equals(before)


def test_a_copy_is_the_object_as_it_was_with_what_it_refers_to():
    cache = Cache()
    tensor, module = cache.keys, cache.module
    before = ObjectState(cache)
    cache.table["a"].append(3)
    cache.count, cache.keys = 5, torch.ones(2)
    copy = before.copy(before.references)
    assert (copy.count, copy.table, copy.queue) == (0, {"a": [1, 2]}, deque([1]))
    assert copy.keys is tensor
    assert copy.module is module
    copy.table["a"].clear()
    assert before.copy(before.references).table == {"a": [1, 2]}
    other = torch.full((2,), 7.0)
    replaced = [other if each is tensor else each for each in before.references]
    assert before.copy(replaced).keys is other


def test_a_tensor_that_is_held_twice_stays_one():
    x = torch.zeros(2)
    state = ObjectState([x, {"again": x}])
    assert len(state.references) == 1
    first, second = state.copy(state.references)
    assert first is second["again"] is x


def test_an_iterator_goes_on_from_where_it_was():
    steps = iter([1, 2, 3])
    next(steps)
    state = ObjectState(steps)
    assert list(steps) == [2, 3]
    assert list(state.copy(state.references)) == [2, 3]


@pytest.mark.parametrize(
    "value",
    [(n for n in range(3)), np.zeros(2**24), bytearray(2**24 + 1), {"large": np.zeros(2**21), "too": bytes(2**24)}],
    ids=["a generator", "an array", "bytes", "bytes inside"],
)
def test_what_cannot_be_written_down_is_refused(value):
    with pytest.raises(TypeError, match="has no state that can be written down"):
        ObjectState(value)
    assert state_of(value) is None


def test_small_arrays_are_part_of_the_state():
    array = np.arange(4)
    before = ObjectState({"ids": array})
    array[0] = 9
    assert not before.equals(ObjectState({"ids": array}))
    assert before.copy(before.references)["ids"].tolist() == [0, 1, 2, 3]


def test_what_has_no_state_of_its_own():
    for value in (3, "text", None, torch.float32, slice(2), torch.zeros(2), nn.ReLU(), len, Cache, random.Random(0)):
        assert not is_object(value)
        assert state_of(value) is None
    for value in ([1], {}, Cache(), Counter(), np.zeros(2)):
        assert is_object(value)
        assert state_of(value) is not None


def test_tuples_of_numbers_and_texts_are_immutable():
    for value in (1, "a", None, torch.Size([2]), (1, ("a", None)), (), range(3)):
        assert is_immutable(value)
    for value in ([1], (1, [2]), {"a": 1}, torch.zeros(1), (torch.zeros(1),)):
        assert not is_immutable(value)


def test_locks_modules_and_functions_are_kept_by_reference():
    lock, module = threading.Lock(), nn.ReLU()
    state = ObjectState({"lock": lock, "module": module, "function": torch.relu})
    copy = state.copy(state.references)
    assert copy["lock"] is lock
    assert copy["module"] is module
    assert copy["function"] is torch.relu


def test_a_stub_gives_the_tensor_while_it_lives_and_then_its_shape():
    tensor = torch.randn(30, 40, dtype=torch.float64)
    stub = Stub(tensor)
    assert stub.get() is tensor
    assert stub.stands_for(tensor)
    assert not stub.stands_for(tensor.clone())
    del tensor
    found = stub.get()
    assert (found.shape, found.dtype) == ((30, 40), torch.float64)
    assert found.untyped_storage().nbytes() == 8
    assert not stub.stands_for(None)
