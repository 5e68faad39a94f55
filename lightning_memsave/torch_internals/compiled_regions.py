"""`torch.compile`d modules in a scope: the function mode of the store must not be traced into them.

A compiled region runs as one custom function, whose tensors are handed over together when its forward ends and asked
for together when its backward begins. What it keeps is therefore coded inside of it, if at all
(`saved_tensors.compiled_partitioner`), and kept as it is outside.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_memsave.torch_internals.private_names import find, missing

_OptimizedModule = find("torch._dynamo.eval_frame.OptimizedModule")
_counters = find("torch._dynamo.utils.counters")
NAME = "compiled"
"""What a compiled region is called in the policy."""
Around = Callable[[], AbstractContextManager[None]]


def compiled_regions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the modules that were compiled with `module.compile()` or `torch.compile(module)`, with their names."""
    for name, module in model.named_modules():
        if _entrance(module) is not None:
            yield name, module


def compiled_functions(model: nn.Module) -> list[str]:
    """Return names of functions that were compiled: attributes of modules, and what the file of the model's class has.

    A function that is compiled elsewhere shows nowhere.
    """
    found = []
    for path, module in model.named_modules():
        owned = {**vars(type(module)), **vars(module)}
        entrance = _entrance(module)
        names = [name for name, value in owned.items() if name != entrance and _is_compiled_function(value)]
        found += [f"{path}.{name}".lstrip(".") for name in names]
    file = sys.modules.get(type(model).__module__)
    return found + [name for name, value in (vars(file) if file else {}).items() if _is_compiled_function(value)]


def _is_compiled_function(value: object) -> bool:
    return isinstance(value, types.FunctionType) and "get_compiler_config" in vars(value)


def num_compiled_graphs() -> int:
    """Return how many graphs this process has compiled; a function that is compiled shows no other way."""
    return 0 if missing("autograd") else int(_counters["stats"]["unique_graphs"])


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def call_at_end(owner: object, function: Callable[..., object], *args: Any) -> None:
    """Call `function` when `owner` dies, not when the process ends.

    As `weakref.finalize`, whose code torch 2.12 compiles, and fails, where it runs beside a compiled block.
    """
    weakref.finalize(owner, function, *args).atexit = False


def shield(model: nn.Module, around: Callable[[str], AbstractContextManager[None]]) -> list[Callable[[], None]]:
    """Call each compiled region of `model` within `around(its name)`; returns the ways back."""
    return [call_within(module, functools.partial(around, name)) for name, module in list(compiled_regions(model))]


def _entrance(module: nn.Module) -> str | None:
    """Return the attribute that holds the compiled callable."""
    if isinstance(module, _OptimizedModule):
        return "forward"
    return "_compiled_call_impl" if getattr(module, "_compiled_call_impl", None) is not None else None


def call_within(module: nn.Module, around: Around) -> Callable[[], None]:
    """Call a compiled module within `around()`, which the compiler does not see; returns the way back."""
    attribute = _entrance(module)
    assert attribute is not None
    compiled = getattr(module, attribute)

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        with around():
            return compiled(*args, **kwargs)

    setattr(module, attribute, call)
    return lambda: setattr(module, attribute, compiled)
