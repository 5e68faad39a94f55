"""Arguments of a call, by place or by name."""

from __future__ import annotations

import inspect

import pytest
import torch.nn.functional as F

from lightning_memsave.saved_tensors.call_site import NO_CALL, Call


def test_an_argument_is_found_by_place_and_by_name():
    for args, kwargs in (((1, 2, 3), {}), ((1, 2), {"c": 3}), ((), {"a": 1, "b": 2, "c": 3})):
        call = Call("function", args, kwargs)
        assert [call.argument(i, name) for i, name in enumerate("abc")] == [1, 2, 3]


def test_what_was_not_given_is_the_default():
    call = Call("function", (1,), {"b": None})
    assert call.argument(2, "c", "default") == "default"
    assert call.argument(2, "c") is None
    assert call.argument(1, "b", "default") is None, "given as None"
    assert call.argument(0, "b", "default") == 1, "a place goes before a name"


def test_outside_of_any_call_there_is_nothing():
    assert NO_CALL.name == ""
    assert NO_CALL.argument(0, "input", "default") == "default"


@pytest.mark.parametrize(
    ("function", "name", "position"),
    [
        (F.batch_norm, "bias", 4),
        (F.batch_norm, "eps", 7),
        (F.group_norm, "bias", 3),
        (F.group_norm, "eps", 4),
        (F.layer_norm, "bias", 3),
        (F.layer_norm, "eps", 4),
        (F.embedding, "sparse", 6),
    ],
)
def test_places_of_torchs_arguments_are_those_that_are_read(function, name, position):
    """`function_mode` asks for these by number."""
    assert list(inspect.signature(function).parameters)[position] == name
    given = [object() for _ in range(position + 1)]
    assert Call(function.__name__, tuple(given), {}).argument(position, name) is given[position]
