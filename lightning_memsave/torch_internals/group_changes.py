"""What an optimizer's step changes in its parameter group, where parameters step one after the other.

Schedule-free optimizers, for example, count their steps there. The step of each parameter begins with the group as it
was, and what it changes is taken over once, when all have stepped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.errors import setting_error

_CHANGES = "_memsave_group_changes"
"""An optimizer's attribute while all parameters step: what steps of single ones change in a group, by its id."""


@contextlib.contextmanager
def changes_once(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Collect what `note_changes` notes, and make these changes at the end."""
    changes: dict[int, dict[str, Any]] = {}
    around, vars(optimizer)[_CHANGES] = vars(optimizer).get(_CHANGES), changes
    groups = optimizer.param_groups
    try:
        yield
    finally:
        del vars(optimizer)[_CHANGES]
        if around is not None:
            vars(optimizer)[_CHANGES] = around
    for group in groups:
        group.update(changes.get(id(group), {}))


def note_changes(optimizer: torch.optim.Optimizer, group: dict[str, Any], alone: dict[str, Any]) -> None:
    """Note how `alone`, a copy of `group` with which some parameters have stepped, differs from it.

    Raises:
        ValueError: it differs in another way than for other parameters, or not all parameters step now.
    """
    changes = {key: value for key, value in alone.items() if key != "params" and not _same(value, group.get(key))}
    if not changes:
        return
    noted = vars(optimizer).get(_CHANGES)
    known = None if noted is None else noted.setdefault(id(group), changes)
    if known is None or known.keys() != changes.keys() or not all(_same(known[key], changes[key]) for key in known):
        raise setting_error(
            "optimizer",
            "must be one that steps each parameter by itself, here",
            f"{type(optimizer).__name__}, which changes `{next(iter(changes))}` of its parameter group",
            "Use another optimizer, or neither `precision` nor gradient release nor low-bit state.",
        )


def _same(one: Any, other: Any) -> bool:
    if one is other or not isinstance(other, type(one)):
        return one is other
    try:
        return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)
    except (RuntimeError, ValueError):  # arrays of several numbers
        return False
