"""Selection of the modules that become regions: by class, by name, by a function, or as explicit groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.selection import Selector, as_selectors, is_scripted, is_selected, scripted_in

Region = tuple[str, ...]
"""Names of modules that are called one after the other."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def select_regions(
    model: nn.Module,
    wanted: Selector | Sequence[Selector] | None,
    explicit: Sequence[Region] | None = None,
) -> list[Region]:
    """Return the regions of `model`.

    Args:
        model: the model.
        wanted: what selects modules; the outermost that match are taken, of a `ModuleList` its members. `None`: the
            model's own repeated blocks.
        explicit: regions, as names.

    Raises:
        ValueError: nothing matches (the message lists what there is), explicit regions overlap without nesting, or what
            was named holds a TorchScript module.
    """
    if explicit is not None:
        _check_explicit(model, explicit)
        _refuse_scripted(model, "Checkpointing.regions", [name for region in explicit for name in region])
        return list(explicit)
    if wanted is None:
        repeated = repeated_blocks(model)
        found = [(name, block) for name, block in repeated if scripted_in(block) is None]
        if not found:
            _refuse_scripted(model, "checkpointing", [name for name, _ in repeated])
    else:
        selectors = as_selectors("Checkpointing.modules", wanted)
        matching = [
            (name, module)
            for name, module in model.named_modules()
            if name and any(is_selected(each, name, module) for each in selectors)
        ]
        unused = [each for each in selectors if not any(is_selected(each, name, module) for name, module in matching)]
        wanted = unused[0] if unused else wanted
        found = [] if unused else _outermost([each for name, module in matching for each in _called(name, module)])
        _refuse_scripted(model, "Checkpointing.modules", [name for name, _ in found])
    if not found:
        called = (m for n, m in model.named_modules() if n and any(m.children()) and _is_called(m))
        there_is = Counter(type(m).__name__ for m in called)
        blocks = ", ".join(f"{kind} ({count})" for kind, count in there_is.items()) or "no module with children"
        remedy = f"This model has: {blocks}. Name one of them: `Checkpointing(modules=...)`."
        if wanted is None:
            rule, remedy = "needs blocks: modules of one class that repeat", f"{remedy} `microbatch=` needs none."
            raise setting_error("checkpointing", rule, "none", remedy)
        raise setting_error("Checkpointing.modules", "must match at least one module", wanted, remedy)
    return [(name,) for name, _ in found]


def _refuse_scripted(model: nn.Module, setting: str, names: Sequence[str]) -> None:
    for name in names:
        if (inside := scripted_in(model.get_submodule(name))) is not None:
            rule = "must not name what is or holds a TorchScript module, which keeps other tensors when it is run again"
            where = f"{name}.{inside}".removesuffix(".")
            raise setting_error(setting, rule, where, "Leave it out, or use the module that was scripted or traced.")


def _is_called(module: nn.Module) -> bool:
    """Return whether a module has a `forward`: a `ModuleList` has none, and cannot be a region."""
    if is_scripted(module):  # whose class has none to look at
        return True
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _called(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module, or what is in it where it is never called itself."""
    if _is_called(module):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _called(f"{name}.{child_name}", child)


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the model's own blocks.

    These are modules with children whose class occurs at least twice among the members of the model's containers
    (`Sequential`, `ModuleList`, `ModuleDict`); containers themselves only when there are no others. Classes that a
    function makes anew each time, of one name and with the same kinds of modules in them, count as one.

    Of blocks inside of others the outermost are taken, but for stages, such as those of a pyramid of resolutions: no
    two modules of their class have the same parameter shapes, and blocks inside, of a class of which two have, hold at
    least half of their parameters.
    """
    members = [
        (f"{name}.{child_name}" if name else child_name, child)
        for name, container in model.named_modules()
        if isinstance(container, _CONTAINERS)
        for child_name, child in container.named_children()
        if any(child.children()) and _is_called(child)
    ]
    repeated = {kind for kind, count in Counter(_kind(child) for _, child in members).items() if count >= 2}
    members = [(name, child) for name, child in members if _kind(child) in repeated]
    blocks = [(name, child) for name, child in members if not isinstance(child, _CONTAINERS)]
    same = Counter((_kind(child), _shapes(child)) for _, child in blocks)
    alike = {kind for (kind, _), count in same.items() if count >= 2}
    inner = [(name, child) for name, child in blocks if _kind(child) in alike]
    return _outermost([(name, child) for name, child in blocks if not _is_stage(name, child, alike, inner)] or members)


def _is_stage(name: str, module: nn.Module, alike: set[Any], inner: list[tuple[str, nn.Module]]) -> bool:
    """Return whether a module is of a kind that does not repeat with its shapes, around blocks of a kind that does."""
    inside = [(other, child) for other, child in inner if other.startswith(f"{name}.")]
    return (
        _kind(module) not in alike and bool(inside) and 2 * _num_parameters(inside) >= _num_parameters([(name, module)])
    )


def _shapes(module: nn.Module) -> tuple[torch.Size, ...]:
    return tuple(p.shape for p in module.parameters() if not is_lazy(p))


def _num_parameters(found: list[tuple[str, nn.Module]]) -> int:
    parameters = {p for _, module in found for p in module.parameters() if not is_lazy(p)}
    return sum(p.numel() for p in parameters)


def _kind(module: nn.Module) -> Any:
    kind = type(module)
    if "<locals>" not in kind.__qualname__:
        return kind
    return kind.__module__, kind.__qualname__, tuple(type(child).__qualname__ for child in module.modules())


def _outermost(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    chosen: list[tuple[str, nn.Module]] = []
    inside: set[nn.Module] = set()
    for name, module in found:
        if module not in inside:
            chosen.append((name, module))
            inside.update(module.modules())
    return chosen


def _check_explicit(model: nn.Module, regions: Sequence[Region]) -> None:
    """Raise `ValueError` unless each region names distinct modules and any two nest or are apart."""
    names = {name for name, module in model.named_modules(remove_duplicate=False) if _is_called(module)}
    for region in regions:
        if not region or len(set(region)) < len(region) or not set(region) <= names:
            raise _explicit_error("must name different modules of the model that are called", region)
    for first in regions:
        for second in regions:
            common = set(first) & set(second)
            if common and common not in (set(first), set(second)):
                raise _explicit_error("must lie inside of each other or apart", (*first, "and", *second))
    if len(set(map(frozenset, regions))) < len(regions):
        raise _explicit_error("must differ", regions[0])


def _explicit_error(rule: str, value: Any) -> ValueError:
    return setting_error(
        "Checkpointing.regions", rule, value, 'For example `regions=[["blocks.0", "blocks.1"], ["blocks.2"]]`.'
    )
