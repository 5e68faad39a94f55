"""Dataclasses from what a file holds, and what is refused by its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import pytest

from lightning_memsave.core.plain_data import from_data


@dataclass(frozen=True, kw_only=True)
class Inner:
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    size: int
    ratio: float = 0.5
    kind: Literal["a", "b"] = "a"
    inner: Inner | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    anything: Any = None


FULL = Outer(size=-3, ratio=1.25, kind="b", inner=Inner(numbers=(1, 2**63 - 1)), sizes={"x": 0}, anything=[None, "y"])


def read(values, **ready):
    return from_data(Outer, values, "outer", "Write it again.", **ready)


@pytest.mark.parametrize("made", [FULL, Outer(size=0)])
def test_json_and_back_is_the_same_dataclass(made):
    found = read(json.loads(json.dumps(asdict(made))))
    assert found == made
    assert type(found.inner) is type(made.inner)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"size": "3"}, "outer.size"),
        ({"size": 3.0}, "outer.size"),
        ({"size": True}, "outer.size"),
        ({"size": None}, "outer.size"),
        ({"ratio": "0.5"}, "outer.ratio"),
        ({"kind": "c"}, "outer.kind"),
        ({"inner": {"numbers": [1, "2"]}}, "outer.inner.numbers.1"),
        ({"inner": {"numbers": 1}}, "outer.inner.numbers"),
        ({"sizes": {"x": 1.5}}, "outer.sizes.x"),
        ({"size": 2**63}, "outer.size"),
        ({"size": -(10**30)}, "outer.size"),
        ({"anything": {"deep": [[10**400]]}}, "outer.anything"),
    ],
)
def test_another_type_is_refused_by_its_place(change, place):
    with pytest.raises(ValueError, match=rf"^`{place}` .*, got .*\. Write it again\.$"):
        read({"size": 1, **change})


def test_unknown_and_missing_fields_are_refused():
    with pytest.raises(ValueError, match=r"`outer` must have no fields but those of a Outer, got \['more'\]"):
        read({"size": 1, "more": 2})
    with pytest.raises(ValueError, match=r"`outer` must have all fields of a Outer.*size"):
        read({"ratio": 0.5})


@pytest.mark.parametrize("values", [None, 3, "text", [1], [["size", 1]]])
def test_what_is_no_mapping_is_refused(values):
    with pytest.raises(ValueError, match="`outer` must be the fields of a Outer"):
        read(values)


def test_what_json_cannot_hold_is_refused_by_its_field():
    for value in (object(), {1, 2}, b"bytes"):
        with pytest.raises(ValueError, match=r"`outer\.anything` must be plain data"):
            read({"size": 1, "anything": value})


def test_a_field_that_is_no_data_is_handed_over_as_it_is():
    marker = object()
    assert read({"size": 1}, anything=marker).anything is marker
    with pytest.raises(ValueError, match="no fields but"):
        read({"size": 1, "anything": 2}, anything=marker)


def test_a_long_value_does_not_fill_the_error():
    with pytest.raises(ValueError, match=r"`outer\.size`") as caught:
        read({"size": "x" * 10_000})
    assert len(str(caught.value)) < 300
