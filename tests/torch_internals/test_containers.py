"""Containers in each other: what can change is found once, and filled again in place."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque

import pytest

from lightning_memsave.torch_internals.containers import CONTAINERS, nested, refill, values

FILLED = [
    [1, [2]],
    {"a": 1, "b": [2]},
    {1, 2, 3},
    deque([1, 2], maxlen=5),
    defaultdict(list, {"a": [1]}),
    Counter("abca"),
    OrderedDict([("b", 1), ("a", 2)]),
]


@pytest.mark.parametrize("container", FILLED, ids=lambda container: type(container).__name__)
def test_a_container_is_filled_again_in_place_with_what_it_held(container):
    container, before = copy.deepcopy(container), copy.copy(container)
    same = container
    container.clear()
    (container.update if hasattr(container, "update") else container.extend)(type(container)())
    refill(container, before)
    assert container is same
    assert container == before
    assert type(container) in CONTAINERS
    if isinstance(container, OrderedDict):
        assert list(container) == ["b", "a"]
    if isinstance(container, deque):
        assert container.maxlen == 5


def test_what_came_and_what_was_replaced_is_gone_again():
    for container, change in (
        ([1, 2], lambda c: c.extend([3, 4])),
        ({"a": 1}, lambda c: c.update(a=2, b=3)),
        ({1, 2}, lambda c: (c.add(3), c.discard(1))),
        (Counter("aab"), lambda c: c.update("abc")),
        (deque([1, 2, 3], maxlen=3), lambda c: c.append(4)),
    ):
        before = copy.copy(container)
        change(container)
        assert container != before
        refill(container, before)
        assert container == before


def test_what_can_change_is_found_once_also_where_it_holds_itself():
    inner, tail = [1], {"x"}
    outer = {"first": inner, "second": (inner, (tail,)), "text": "abc"}
    inner.append(outer)
    small, large = nested(outer, 10)
    assert large == []
    assert {id(each) for each in small} == {id(outer), id(inner), id(tail)}
    assert len(small) == 3


def test_large_ones_are_told_apart_and_not_looked_into():
    hidden = [0]
    long = [hidden, *range(10)]
    small, large = nested([long, [1]], 10)
    assert [len(each) for each in small] == [2, 1]
    assert [each is long for each in large] == [True]
    small, large = nested([long, [1]], 11)
    assert any(each is hidden for each in small)
    assert large == []


def test_what_lies_behind_too_many_others_counts_as_large():
    row = [[0, 1, 2, 3] for _ in range(100)]
    small, large = nested(deque(row), 100)
    assert (len(small), len(large)) == (101, 0)
    parts = [[list(range(4)) for _ in range(4)] for _ in range(4)]
    small, large = nested(parts, 4)  # 21 lists of 4, of which 16 are looked into
    assert (len(small), sum(map(len, small))) == (16, 16 * 4)
    assert large


class Special(list):
    """Might mind being emptied."""


@pytest.mark.parametrize("value", [3, "text", None, Special([[1]]), (1, 2), frozenset({1}), range(3)])
def test_others_are_left_alone(value):
    assert nested(value, 10) == ([], [])


def test_values_are_what_a_container_holds():
    assert list(values({"a": 1, "b": 2})) == [1, 2]
    assert list(values((1, 2))) == [1, 2]
