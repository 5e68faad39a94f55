"""Copies of modules with what is bound to them."""

from __future__ import annotations

import copy
import functools
import gc
import types
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_memsave.core.selection import is_scripted

M = TypeVar("M", bound=nn.Module)
_SMALL_BYTES = 2**20  # of weights, that may wait for Python's own collection


def copied(module: M, memo: dict[int, Any] | None = None) -> M:
    """Copy as `copy.deepcopy` does, and also methods with fixed arguments and functions that know the module.

    LightningCLI binds `configure_optimizers` to a module with an optimizer of its parameters; the copy needs one of
    its own. A `forward` that was replaced (`module.forward = torch.compile(module.forward)`) and hooks hold the module
    in their closures or defaults; the copy's hold the copy. A plain attribute that is an output of autograd (the weight
    that `torch.nn.utils.weight_norm` computes, a hidden state) is copied without its graph.

    Args:
        module: is not changed.
        memo: as for `copy.deepcopy`: what stands for objects by their id.
    """
    memo = {} if memo is None else memo
    twin = _deep_copied(module, memo)
    for name, method in vars(module).items():
        if isinstance(method, types.MethodType) and isinstance(method.__func__, functools.partial):
            fixed = method.__func__
            args, keywords = copy.deepcopy((fixed.args, fixed.keywords), memo)
            function = functools.update_wrapper(functools.partial(fixed.func, *args, **keywords), fixed)
            vars(twin)[name] = types.MethodType(function, twin)
    for _ in range(2):  # the second time for functions that share variables with those of the first
        for each in twin.modules():
            for space in (vars(each), *(value for value in vars(each).values() if type(value) in (dict, OrderedDict))):
                for key, value in space.items():
                    if isinstance(value, _CALLABLES) and (new := _of_twins(value, memo)) is not value:
                        space[key] = new
    return twin


def _deep_copied(module: M, memo: dict[int, Any]) -> M:
    """Copy as `copy.deepcopy` does, and also what TorchScript runs and what autograd has computed."""
    for value in (value for each in module.modules() for value in vars(each).values()):
        if isinstance(value, torch.jit.ScriptFunction):  # has no state, and refuses to be copied
            memo[id(value)] = value
    with torch.no_grad(), _WithoutGraphs():  # autograd would record how TorchScript copies parameters
        twin = copy.deepcopy(module, memo)
    for each in filter(is_scripted, module.modules()):
        other = memo.get(id(each), each)  # itself where it was not copied
        for p, copy_of_p in zip(each.parameters(), other.parameters(), strict=True):
            copy_of_p.requires_grad_(p.requires_grad)
    return twin


class _WithoutGraphs(TorchFunctionMode):
    """`copy.deepcopy` of a tensor that autograd has computed, which torch refuses, copies its values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy the values of a tensor that autograd has computed; run any other function as it is."""
        if func is Tensor.__deepcopy__ and args[0].grad_fn is not None:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = copy.deepcopy(tensor.detach(), memo)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def collect_copies(module: nn.Module) -> None:
    """Give back the memory of copies that nobody needs, of a large module: a trainer and its module know each other."""
    if sum(p.nbytes for p in module.parameters()) > _SMALL_BYTES:
        gc.collect()


_CALLABLES = (types.FunctionType, types.MethodType, functools.partial)


def _of_twins(value: Any, memo: dict[int, Any]) -> Any:
    """Return `value` with copies in place of what was copied; itself where it knows none of that."""
    if id(value) in memo:
        return memo[id(value)]
    if not _knows(value, memo, set()):
        return value

    def new(part: Any) -> Any:
        return _of_twins(part, memo)

    if isinstance(value, types.FunctionType):
        return _function_of_twins(value, memo)
    if isinstance(value, types.MethodType):
        return types.MethodType(new(value.__func__), new(value.__self__))
    if isinstance(value, functools.partial):
        named = {name: new(part) for name, part in value.keywords.items()}
        twin = functools.partial(new(value.func), *map(new, value.args), **named)
        vars(twin).update({name: new(part) for name, part in vars(value).items()})
        return twin
    if type(value) is tuple:
        return tuple(map(new, value))
    memo[id(value)] = container = type(value)()  # before it is filled: it may hold itself
    if isinstance(container, dict):
        container.update({key: new(part) for key, part in value.items()})
    else:
        (container.extend if isinstance(container, list) else container.update)(map(new, value))
    return container


def _function_of_twins(value: types.FunctionType, memo: dict[int, Any]) -> types.FunctionType:
    cells = [types.CellType() if _is_filled(cell) else cell for cell in value.__closure__ or ()]
    cells = [memo.setdefault(id(old), cell) for old, cell in zip(value.__closure__ or (), cells, strict=True)]
    twin = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
    memo[id(value)] = twin  # before its variables are filled: they may know it
    for old, cell in zip(value.__closure__ or (), cells, strict=True):
        if _is_filled(old) and not _is_filled(cell):
            cell.cell_contents = _of_twins(old.cell_contents, memo)
    twin.__defaults__ = _of_twins(value.__defaults__, memo)
    twin.__kwdefaults__ = _of_twins(value.__kwdefaults__, memo)
    twin.__qualname__, twin.__doc__, twin.__module__ = value.__qualname__, value.__doc__, value.__module__
    vars(twin).update({name: _of_twins(part, memo) for name, part in vars(value).items()})
    return twin


def _knows(value: Any, memo: dict[int, Any], seen: set[int]) -> bool:
    """Return whether what was copied can be reached through functions and plain containers."""
    if id(value) in memo:
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    return any(_knows(part, memo, seen) for part in _parts(value))


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, types.FunctionType):
        return [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, *vars(value).values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.CellType):
        return [value.cell_contents] if _is_filled(value) else []
    return value.values() if type(value) is dict else value if type(value) in (list, tuple, set) else []


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # reading it tells
    except ValueError:  # its variable has no value yet
        return False
    return True
