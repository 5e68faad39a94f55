"""Selection of the modules that a setting means: a pattern, a class, or a callable that is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_memsave.core.errors import setting_error

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]
"""A pattern (`*`, `?`) for the module's name or that of its class, a class, or `callable(name, module)`."""


def is_selected(selector: Selector, name: str, module: nn.Module) -> bool:
    """Return whether a module of that name is meant.

    >>> is_selected("Lin*", "head", nn.Linear(1, 1)), is_selected("head", "head", nn.Linear(1, 1))
    (True, True)
    >>> is_selected(nn.Conv2d, "head", nn.Linear(1, 1)), is_selected(lambda name, module: True, "head", nn.ReLU())
    (False, True)
    """
    if isinstance(selector, str):
        return any(fnmatchcase(text, selector) for text in (name, *_class_names(module)))
    return isinstance(module, selector) if isinstance(selector, type) else bool(selector(name, module))


def _class_names(module: nn.Module) -> Iterator[str]:
    """Yield the name of a module's class, and of the class that it was before `fully_shard` changed it."""
    kind = type(module)
    yield kind.__name__
    if any(base.__name__ == "FSDPModule" for base in kind.__bases__):
        yield kind.__bases__[-1].__name__


def select(setting: str, selectors: tuple[Selector, ...], model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of `model` that any of the selectors means.

    Args:
        setting: what they are called in errors.
        selectors: each must mean something.
        model: is searched, itself included.

    Raises:
        ValueError: a selector that matches no module.
    """
    unused = list(selectors)
    for name, module in model.named_modules():
        matching = [selector for selector in selectors if is_selected(selector, name, module)]
        unused = [selector for selector in unused if selector not in matching]
        if matching:
            yield module
    if unused:
        known = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        raise setting_error(setting, "must match a module", unused[0], f"Classes in this model: {known}.")


_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def is_norm(module: nn.Module) -> bool:
    """Return whether it is a normalisation layer.

    Of a class of torch's, or one named so whose own parameters are vectors.

    >>> is_norm(nn.LayerNorm(2)), is_norm(nn.Linear(2, 2))
    (True, False)
    """
    own = list(module.parameters(recurse=False))
    says_so = isinstance(module, _NORMS) or "Norm" in type(module).__name__
    return says_so and not any(p.dim() > 1 for p in own if not is_lazy(p) and not isinstance(module, _NORMS))


def is_scripted(module: nn.Module) -> bool:
    """Return whether TorchScript runs `module`, scripted or traced: it takes no hooks.

    >>> is_scripted(nn.Linear(2, 2))
    False
    """
    return isinstance(module, torch.jit.ScriptModule)


def scripted_in(module: nn.Module) -> str | None:
    """Return the name of a TorchScript module in `module`, `""` for that itself, `None` without any.

    A checkpointed region cannot hold one: what such a module keeps for backward changes after its first calls, when
    TorchScript has compiled it, so that a repetition would keep something else.
    """
    return next((name for name, inner in module.named_modules() if is_scripted(inner)), None)


def as_selectors(setting: str, value: object) -> tuple[Selector, ...]:
    """Return the selectors of a setting that takes one or several.

    Raises:
        ValueError: something is no selector.

    >>> as_selectors("keep", "head"), as_selectors("keep", ["head", nn.Linear])
    (('head',), ('head', <class 'torch.nn.modules.linear.Linear'>))
    """
    is_one = isinstance(value, str) or callable(value) or not isinstance(value, Iterable)
    found = (value,) if is_one else tuple(value)  # type: ignore[arg-type]  # an iterable, then
    for each in found:
        is_pattern, is_module = isinstance(each, str) and bool(each), isinstance(each, nn.Module)
        is_class = isinstance(each, type) and issubclass(each, nn.Module)
        if not (is_pattern or is_class or (callable(each) and not is_module and not isinstance(each, type))):
            rule = "must be patterns, classes of modules, or `callable(name, module)`"
            raise setting_error(setting, rule, each, 'For example "head", or `nn.Linear`.')
    return found  # type: ignore[return-value]  # checked
