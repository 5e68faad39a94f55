"""Copies of modules with what is bound to them."""

from __future__ import annotations

import copy
import functools
import types
from typing import Any, TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def copied(module: M, memo: dict[int, Any] | None = None) -> M:
    """`copy.deepcopy`, for methods with fixed arguments as well, which it leaves as they are.

    LightningCLI binds `configure_optimizers` to a module with an optimizer of its parameters; the copy needs one of
    its own.

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
    return twin
