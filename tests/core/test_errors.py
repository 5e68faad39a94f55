"""The shape of errors, and settings that nothing would read."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

import pytest

from lightning_memsave.core.errors import (
    BudgetTooSmallError,
    RefusedRegionError,
    RegionError,
    add_note,
    check_unused,
    defaults_of,
    setting_error,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    size: int = 4
    names: list[str] = field(default_factory=lambda: ["a"])
    method: str = "plain"


@pytest.mark.parametrize("value", [0, -1.5, "text", None, [1], float("nan")])
def test_an_error_names_the_setting_the_rule_the_value_and_the_remedy_in_that_order(value):
    error = setting_error("microbatch", "must be a positive integer", value, "Use 1.")
    assert type(error) is ValueError
    parts = ["`microbatch`", "must be a positive integer", repr(value), "Use 1."]
    places = [str(error).index(part) for part in parts]
    assert places == sorted(places)


def test_defaults_are_those_of_an_instance_and_nobody_shares_a_list():
    assert defaults_of(Config(size=9, names=["b"])) == {"size": 4, "names": ["a"], "method": "plain"} == vars(Config())
    config = Config()
    defaults_of(config)["names"].append("b")
    assert defaults_of(config)["names"] == ["a"]


@pytest.mark.parametrize(("change", "name"), [({"size": 5}, "size"), ({"names": ["a", "b"]}, "names")])
def test_a_setting_that_nothing_reads_is_refused_by_name(change, name):
    with pytest.raises(ValueError, match=rf"`Config\.{name}` is used with .*`method='other'`.* only") as caught:
        check_unused(Config(**change), "size names", "`method='other'`")
    assert f"Leave `{name}` out." in str(caught.value)


def test_settings_at_their_defaults_or_not_asked_for_pass():
    check_unused(Config(), "size names", "something")
    check_unused(Config(size=4, names=["a"], method="other"), "size names", "something")
    check_unused(Config(size=5), "names", "something")


def test_what_catches_a_wrong_setting_catches_a_refusal_as_well():
    """Callers try another setting on `ValueError`; what backward finds out is what torch would raise, too."""
    for kind in (BudgetTooSmallError, RefusedRegionError, RegionError):
        assert issubclass(kind, ValueError)
    assert issubclass(RegionError, RuntimeError)
    assert not issubclass(RefusedRegionError, RuntimeError)


class Python310Error(RuntimeError):
    """An error without notes."""

    @property
    def add_note(self):
        raise AttributeError


@pytest.mark.parametrize("kind", [RuntimeError, Python310Error])
def test_a_note_is_shown_below_the_message_in_every_python(kind):
    error = kind("expected Half", 3)
    add_note(error, "set precision=False")
    shown = "".join(traceback.format_exception(error))
    assert shown.index("expected Half") < shown.index("set precision=False")
    assert error.args[1:] == (3,)
