"""Errors and warnings, each of one shape: the setting, the rule, the value received, the remedy."""

from __future__ import annotations


def setting_error(name: str, rule: str, value: object, remedy: str) -> ValueError:
    """Build the one error that a user sees for a wrong setting.

    >>> raise setting_error("microbatch", "must be a positive integer", 0, "Use `microbatch=1` for the smallest.")
    Traceback (most recent call last):
        ...
    ValueError: `microbatch` must be a positive integer, got 0. Use `microbatch=1` for the smallest.
    """
    return ValueError(f"`{name}` {rule}, got {value!r}. {remedy}")


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


class MemoryGrowthWarning(UserWarning):
    """A run holds, or needs, more memory from measured step to measured step; the text names what and where."""
