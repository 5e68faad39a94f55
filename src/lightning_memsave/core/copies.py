"""Copies of modules with what is bound to them."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def copied(module: M, memo: dict[int, Any] | None = None) -> M:
    """`copy.deepcopy`, with what it leaves as it is: methods with fixed arguments, and functions that know the module.

    LightningCLI binds `configure_optimizers` to a module with an optimizer of its parameters; the copy needs one of
    its own. A `forward` that was replaced (`module.forward = torch.compile(module.forward)`) and hooks hold the module
    in their closures or defaults; the copy's hold the copy.

    Args:
        module: is not changed.
        memo: as for `copy.deepcopy`: what stands for objects by their id.
    """
    memo = {} if memo is None else memo
    twin = copy.deepcopy(module, memo)
    for name, method in vars(module).items():
        if isinstance(method, types.MethodType) and isinstance(method.__func__, functools.partial):
            fixed = method.__func__
            args, keywords = copy.deepcopy((fixed.args, fixed.keywords), memo)
            function = functools.update_wrapper(functools.partial(fixed.func, *args, **keywords), fixed)
            vars(twin)[name] = types.MethodType(function, twin)
    for each in twin.modules():
        for space in (vars(each), *(hooks for hooks in vars(each).values() if isinstance(hooks, dict))):
            for key, value in space.items():
                if isinstance(value, types.FunctionType):
                    space[key] = _of_twins(value, memo)
    return twin


def _of_twins(value: Any, memo: dict[int, Any]) -> Any:
    """`value` with copies in place of what was copied; itself where it knows none of it."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType):
        owner = _of_twins(value.__self__, memo)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if not isinstance(value, types.FunctionType):
        return value
    memo[id(value)] = value  # of a function that calls itself
    cells = value.__closure__ or ()
    known = [cell.cell_contents for cell in cells if _is_filled(cell)]
    known += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    if all(_of_twins(each, memo) is each for each in known):
        return value
    closure = tuple(types.CellType(_of_twins(cell.cell_contents, memo)) if _is_filled(cell) else cell for cell in cells)
    twin = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, closure)
    memo[id(value)] = twin
    twin.__defaults__ = value.__defaults__ and tuple(_of_twins(each, memo) for each in value.__defaults__)
    twin.__kwdefaults__ = {name: _of_twins(each, memo) for name, each in (value.__kwdefaults__ or {}).items()} or None
    twin.__qualname__, twin.__doc__, twin.__module__ = value.__qualname__, value.__doc__, value.__module__
    vars(twin).update({name: _of_twins(each, memo) for name, each in vars(value).items()})
    return twin


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # its variable has no value yet
        return False
