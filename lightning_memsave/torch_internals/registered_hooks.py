"""Hooks that a call of a module registers: where the call is undone, they go, as it registers them once more."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.utils.hooks import RemovableHandle


def number_of_next_hook() -> int:
    """Return the number that torch gives to the next hook: it counts those of all modules and tensors."""
    return RemovableHandle.next_id


def remove_hooks_since(number: int, modules: Iterable[nn.Module]) -> None:
    """Remove the hooks of modules that were registered since.

    Args:
        number: of the first of them, from `number_of_next_hook`.
        modules: whose.

    Example:
        >>> layer, number = nn.Linear(1, 1), number_of_next_hook()
        >>> handle = layer.register_forward_hook(print)
        >>> remove_hooks_since(number, [layer])
        >>> len(layer._forward_hooks)
        0
    """
    if RemovableHandle.next_id == number:
        return
    for module in modules:
        for hooks in [part for name, part in vars(module).items() if "_hooks" in name and isinstance(part, dict)]:
            for key in [key for key in hooks if key >= number]:
                del hooks[key]
