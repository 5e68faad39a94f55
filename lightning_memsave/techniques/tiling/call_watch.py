"""What a call does besides computing: it reads values, it draws numbers, and autograd keeps tensors of it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_memsave.saved_tensors.kept_noise import NoiseError, is_draw, shape_drawn
from lightning_memsave.saved_tensors.tiles import memory_order
from lightning_memsave.torch_internals.autograd_graph import storage_key
from lightning_memsave.torch_internals.dispatch_mode import DispatchMode

_READS = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "is_nonzero", "equal"),
        *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"),  # whose shape tells values
    )
)
_READS_IN_PYTHON = frozenset(("item", "tolist", "numpy", "__array__"))


class Drawn(NamedTuple):
    """What an operation drew."""

    shape: tuple[int, ...] | None
    """Shape of the numbers; `None` where they cannot be drawn for all slices together."""
    order: tuple[int, ...]
    """The order of its dimensions in memory."""


def _drawn(func: Any, args: Sequence[Any]) -> Drawn:
    try:
        shape = shape_drawn(func, args)
    except NoiseError:
        return Drawn(None, ())
    return Drawn(shape, memory_order(args[0]) if isinstance(args[0], Tensor) else tuple(range(len(shape))))


class CallWatch(DispatchMode):
    """Notes what a call reads, draws, and keeps."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.draws: list[Drawn] = []
        self._kept: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _READS or (name == "aten::index" and any(_is_mask(index) for index in args[1])):
            self.reads.append(name)
        if is_draw(func, args, kwargs):
            self.draws.append(_drawn(func, args))
        return func(*args, **kwargs)

    def keep(self, tensor: Tensor) -> Tensor:
        """Note a tensor that autograd keeps."""
        if tensor.layout is torch.strided:
            self._kept[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    def kept_bytes(self, but: set[int]) -> int:
        """Return bytes that autograd keeps, without those of some storages."""
        return sum(size for key, size in self._kept.items() if key not in but)


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


class ReadsInPython(TorchFunctionMode):
    """Notes methods of tensors that hand values to Python without an operation."""

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(func, "__name__", "")) in _READS_IN_PYTHON:
            self._reads.append(name)
        return func(*args, **(kwargs or {}))


_NOISE = frozenset(f"aten::{name}" for name in ("bernoulli", "rand", "randn", "rand_like", "randn_like", "normal"))


class Still(DispatchMode):
    """Draws give the same number everywhere, so that slices can be compared with the whole without their noise."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not is_draw(func, args, kwargs):
            return func(*args, **kwargs)
        args = list(args)
        for place, argument in enumerate(func._schema.arguments):
            if argument.name in ("p", "dropout_p") and place < len(args) and not func._schema.is_mutable:
                args[place] = 0.0
            elif argument.name in ("p", "dropout_p") and argument.name in kwargs:
                kwargs[argument.name] = 0.0
        found = func(*args, **kwargs)
        if func._schema.is_mutable:
            return found.fill_(1)
        return found.fill_(1) if func._schema.name in _NOISE else found


def hooked_inside(module: nn.Module) -> str | None:
    """Return the name of a module inside that somebody has hooked: the hook would see slices; `None` for none.

    Hooks of torch's own, as of `weight_norm`, and ours do not mind.
    """
    inside = [(name, each) for name, each in module.named_modules() if each is not module]
    if inside and any(map(_is_foreign, _of_all_modules())):
        name, _ = inside[0]
        return str(name)
    return next((name for name, each in inside if is_hooked(each)), None)


def is_hooked(module: nn.Module) -> bool:
    """Return whether somebody's hook runs when a module is called, or in its backward."""
    of_forward, of_backward = (module._forward_hooks, module._forward_pre_hooks), module._backward_hooks
    called = (*of_forward, of_backward, module._backward_pre_hooks)
    return any(_is_foreign(hook) for hooks in called if hooks for hook in hooks.values())


def _of_all_modules() -> list[Any]:
    """Return the hooks that torch runs for every module."""
    found = (value for name, value in vars(nn.modules.module).items() if name in _GLOBAL)
    return [hook for hooks in found for hook in hooks.values()]


_GLOBAL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")


def _is_foreign(hook: Any) -> bool:
    return not _home(hook).startswith(_KNOWN)


_KNOWN = ("torch.", "lightning_memsave.")


def _home(hook: Any) -> str:
    """Return the name of the file that a hook is from."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    return getattr(function, "__module__", None) or type(function).__module__
