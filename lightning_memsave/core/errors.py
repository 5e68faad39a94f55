"""Errors and warnings, each of one shape: the setting, the rule, the value received, the remedy."""

from __future__ import annotations

import dataclasses
from typing import Any


def add_note(error: BaseException, text: str) -> None:
    """Add a line below the message of an error; to the message itself in Python 3.10, where errors have no notes."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        error.args = ("\n".join([*map(str, error.args[:1]), text]), *error.args[1:])


def setting_error(name: str, rule: str, value: object, remedy: str) -> ValueError:
    """Build the one error that a user sees for a wrong setting.

    >>> raise setting_error("microbatch", "must be a positive integer", 0, "Use `microbatch=1` for the smallest.")
    Traceback (most recent call last):
        ...
    ValueError: `microbatch` must be a positive integer, got 0. Use `microbatch=1` for the smallest.
    """
    return ValueError(f"`{name}` {rule}, got {value!r}. {remedy}")


def check_unused(config: Any, names: str, needed: str) -> None:
    """Refuse settings of a frozen dataclass that nothing would read.

    Args:
        config: the dataclass.
        names: of the settings, separated by spaces.
        needed: what they are for.

    Raises:
        ValueError: one of them is not its default.
    """
    defaults = defaults_of(config)
    for name in names.split():
        if (value := getattr(config, name)) != defaults[name]:
            raise setting_error(
                f"{type(config).__name__}.{name}", f"is used with {needed} only", value, f"Leave `{name}` out."
            )


def defaults_of(config: Any) -> dict[str, Any]:
    """Return what the fields of a dataclass are by default, by name."""
    return {
        field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(config)
    }


class BudgetTooSmallError(ValueError):
    """No set of checkpoint regions meets a budget."""

    lowest_bytes: int
    """The smallest budget that one does meet."""


class NoEffectWarning(UserWarning):
    """A technique found nothing to work on."""


class NotLosslessWarning(UserWarning):
    """A step that changes results was taken under the `"lossless"` recipe; the text names the modules."""


class MicrobatchWarning(UserWarning):
    """A batch is run whole, because splitting it would be a guess or would change the loss."""


class BudgetWarning(UserWarning):
    """A step was measured above its budget, and there is no way known to bring it below."""


class RefusedRegionError(ValueError):
    """A module cannot be a checkpoint region, which its forward has shown."""


class RegionError(RefusedRegionError, RuntimeError):
    """A checkpoint region cannot be run again as it ran, which backward has found out."""

    edited: tuple[str, ...] = ()
    """Names of trained parameters that its forward has edited in place, each time that it ran."""


class MemoryGrowthWarning(UserWarning):
    """A run holds, or needs, more memory from measured step to measured step; the text names what and where."""
