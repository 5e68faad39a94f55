"""Reasons why a call cannot be made in slices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning_memsave.saved_tensors.kept_noise import NoiseError


class DependsError(Exception):
    """A reason why a call cannot be made in slices."""


class FailsError(DependsError):
    """The call raises an error."""


@contextlib.contextmanager
def as_reason(length: int) -> Iterator[None]:
    """Take an error of a call with `length` entries for a reason, unless it is about memory."""
    try:
        yield
    except NoiseError as error:
        raise DependsError(str(error)) from error
    except Exception as error:
        if is_about_memory(error):
            raise
        text = " ".join(str(error).split())[:100]
        raise FailsError(f"it fails with {length} entries ({type(error).__name__}: {text})") from error


def is_about_memory(error: Exception) -> bool:
    """Return whether there was too little memory for a call, which says nothing about it."""
    return isinstance(error, MemoryError) or "memory" in str(error)
