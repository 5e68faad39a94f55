"""Modules in regions: which regions each belongs to, and what it remembers from call to call."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from lightning_memsave.saved_tensors.buffers import Spares
from lightning_memsave.saved_tensors.randomness import generators_in


class Group:
    """Calls that are one region when they follow each other: an identity that the modules called have in common.

    Args:
        num_members: how many modules there are.
    """

    def __init__(self, num_members: int) -> None:
        self.num_members = num_members


class Membership(NamedTuple):
    """The place of a module in a group."""

    group: Group
    position: int


class Member:
    """What a module in regions remembers: its groups, the outermost first, and which of its buffers its calls change.

    Args:
        name: of the module.
        memberships: its groups.
        previous_forward: an instance attribute that somebody else bound, or `None`.
    """

    def __init__(
        self, name: str, memberships: Sequence[Membership], previous_forward: Callable[..., Any] | None
    ) -> None:
        self.name, self.memberships, self.previous_forward = name, tuple(memberships), previous_forward
        self.changing: dict[bool, set[str]] = {}  # in training, and not: spectral norm iterates in training only
        self.spares = Spares()
        self.num_calls = 0
        self._generators: list[Any] = []

    @property
    def is_checked(self) -> bool:
        """Whether the next call is one of those that are compared with their repetitions: the first, some later."""
        return self.num_calls == 3 or not self.num_calls & (self.num_calls - 1)  # 0 to 4, and powers of 2

    def generators(self, module: nn.Module) -> list[Any]:
        """Return the random generators that `module` and those inside hold; looked for when a call is checked."""
        if self.is_checked:
            self._generators = generators_in(*module.modules())
        return self._generators

    def forward_of(self, module: nn.Module) -> Callable[..., Any]:
        """Return the forward that computes."""
        return self.previous_forward or types.MethodType(type(module).forward, module)


def bind(module: nn.Module, attribute: str, member: Member, forward: Callable[..., Any]) -> None:
    """Give a module a forward of its own, and keep what that remembers in an attribute."""
    module.__dict__[attribute] = member
    # A bound method, not a closure: deepcopy rebinds it to the copy, so that a copy computes with its own weights.
    module.forward = types.MethodType(forward, module)


def is_bound(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Return whether a module has this forward, or another one on top of it.

    A pickle has forgotten: its `forward`, if it has one of its own, is that of its class.
    """
    above = (each.previous_forward for each in vars(module).values() if isinstance(each, Member))
    forwards = (module.__dict__.get("forward"), *above)
    return "forward" in module.__dict__ and any(getattr(each, "__func__", None) is forward for each in forwards)


def unbind(module: nn.Module, attribute: str, forward: Callable[..., Any]) -> None:
    """Undo `bind`, also where another forward was bound since: that one goes on without this one."""
    member: Member = module.__dict__.pop(attribute)
    for above in [each for each in vars(module).values() if isinstance(each, Member)]:
        if getattr(above.previous_forward, "__func__", None) is forward:
            above.previous_forward = member.previous_forward
            return
    del module.forward
    if member.previous_forward is not None:
        module.forward = member.previous_forward
