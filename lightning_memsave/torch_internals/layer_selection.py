"""Layers that get another parameter than their weight, and why others that match stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.selection import is_selected
from lightning_memsave.torch_internals.fake_tensors import is_plain


class Wanted(NamedTuple):
    """The layers that a technique can change."""

    technique: str
    """Its argument of `MemSave`."""
    becomes: str
    """What a layer can be then, in words."""
    kinds: tuple[type[nn.Module], ...]
    """Classes of layers, besides transformers' Conv1D."""
    names: str
    """Names of these classes, in words."""


def select_layers(
    model: nn.Module, config: Any, wanted: Wanted, why_dense: Callable[[nn.Module, nn.Parameter], str | None]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the layers to change, and for those that match but stay dense, why.

    Args:
        model: is searched, itself included.
        config: has `modules`: a selector, or `None` for all layers that can be changed.
        wanted: what can be changed.
        why_dense: what about a layer and its weight, which is plain and trained, keeps it as it is; `None` for nothing.

    Raises:
        ValueError: nothing can be changed, or what would be is tied, or needs its dense weight.
    """
    chosen: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    owners, modules = _owners(model), config.modules
    for name, module in model.named_modules():
        if not (_is_wanted(module, wanted) and (modules is None or is_selected(modules, name, module))):
            continue
        reason = _why_fixed(module) or why_dense(module, module.get_parameter("weight"))
        if reason is None and (needed := _why_needed(module, name, owners)) is not None:
            if modules is not None:
                remedy = (
                    f"Leave the layer out: `{type(config).__name__}(modules=lambda name, module: name != {name!r})`."
                )
                raise setting_error(wanted.technique, f"cannot take {needed[0]}", needed[1], remedy)
            reason = needed[0]
        if reason is None:
            chosen[name] = module
        else:
            left[name] = reason
    if not chosen:
        dense = "; ".join(f"{name} ({reason})" for name, reason in left.items()) or f"no {wanted.names}"
        raise setting_error(
            wanted.technique if modules is None else f"{type(config).__name__}.modules",
            f"must match at least one layer that can be {wanted.becomes}",
            modules,
            f"Matching, but dense: {dense}.",
        )
    return chosen, left


def is_conv1d_of_transformers(module: nn.Module) -> bool:
    """Return whether it is the Linear of GPT-2 in transformers, whose weight has its inputs first: [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _is_wanted(module: nn.Module, wanted: Wanted) -> bool:
    return isinstance(module, wanted.kinds) or is_conv1d_of_transformers(module)


def _why_fixed(module: nn.Module) -> str | None:
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or not is_plain(weight, nn.Parameter):
        return "its weight is computed"
    return None if weight.requires_grad else "frozen"


_Owners = Mapping[nn.Parameter, Mapping[nn.Module, str]]


def _owners(model: nn.Module) -> _Owners:
    """Return the modules that have each parameter, and what it is called there."""
    names: dict[nn.Parameter, dict[nn.Module, str]] = {}
    for name, module in model.named_modules():
        for own, p in module.named_parameters(recurse=False):
            names.setdefault(p, {})[module] = f"{name}.{own}"
    return names


def _why_needed(module: nn.Module, name: str, owners: _Owners) -> tuple[str, str] | None:
    """Return what about a layer needs its dense weight, and where that is said; `None` if nothing does."""
    tied = owners[module.get_parameter("weight")]
    if len(tied) > 1:
        return "tied weights", " and ".join(tied.values())
    for setting in ("max_norm", "sparse"):
        if value := getattr(module, setting, None):
            return f"an embedding with `{setting}`", f"{name}.{setting}={value}"
    return None
