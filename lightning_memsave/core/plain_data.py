"""Dataclasses from plain data, as files hold it: each value is of the type that its field declares."""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from lightning_memsave.core.errors import setting_error

T = TypeVar("T")
_LARGEST = 2**63  # no counter has more


def from_data(kind: type[T], values: Any, setting: str, remedy: str, **ready: Any) -> T:
    """Build a dataclass from its fields; lists become tuples, and dictionaries dataclasses, where it declares them.

    Args:
        kind: the dataclass.
        values: what `json.loads` gives.
        setting: what an error calls them.
        remedy: what an error advises.
        ready: fields that are no data.

    Raises:
        ValueError: a field is unknown, missing, or of another type, or a whole number needs more than 64 bits.

    >>> from lightning_memsave.core.report import Timeline
    >>> from_data(Timeline, {"events": [1], "by_category": {"data": [3]}}, "timeline", "Make it again.")
    Timeline(events=(1,), by_category={'data': (3,)})
    >>> from_data(Timeline, {"events": [1], "by_category": {"data": "3"}}, "timeline", "Make it again.")
    Traceback (most recent call last):
        ...
    ValueError: `timeline.by_category.data` Input should be a valid array, got '3'. Make it again.
    """
    from pydantic import ValidationError

    names = {each.name for each in fields(kind)} - ready.keys()  # type: ignore[arg-type]  # a dataclass
    if not isinstance(values, Mapping):
        raise setting_error(setting, f"must be the fields of a {kind.__name__}", _brief(values), remedy)
    if unknown := sorted(map(str, values.keys() - names)):
        raise setting_error(setting, f"must have no fields but those of a {kind.__name__}", _brief(unknown), remedy)
    found = {}
    for name, value in values.items():
        try:
            adapter = _adapter(kind, name)  # type: ignore[arg-type]  # classes are hashable
            found[name] = adapter.validate_json(json.dumps(value), strict=True)
        except (TypeError, RecursionError) as error:
            raise setting_error(f"{setting}.{name}", "must be plain data", _brief(value), remedy) from error
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, (setting, name, *first["loc"])))
            raise setting_error(place, first["msg"], _brief(first["input"]), remedy) from error
        if any(abs(number) >= _LARGEST for number in _whole_numbers(value)):
            raise setting_error(f"{setting}.{name}", "must have numbers of 64 bits", _brief(value), remedy)
    try:
        return kind(**found, **ready)
    except TypeError as error:
        raise setting_error(setting, f"must have all fields of a {kind.__name__}", str(error), remedy) from error


@functools.cache
def _adapter(kind: Any, name: str) -> Any:
    from pydantic import TypeAdapter  # where it is needed: it takes its time to load

    return TypeAdapter(typing.get_type_hints(kind)[name])


def _whole_numbers(value: Any) -> Iterable[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _whole_numbers(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _whole_numbers(each)


def _brief(value: Any) -> Any:
    return value if len(text := repr(value)) < 80 else f"{text[:80]}..."
