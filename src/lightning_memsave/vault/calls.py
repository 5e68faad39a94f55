"""Who is calling: a function mode that tells the vault which function keeps a tensor, and what the graph leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_memsave.vault.forms import WindowIndex, covers_its_storage
from lightning_memsave.vault.graph import is_innermost, sequence_nr_of
from lightning_memsave.vault.policy import NO_CALL, Call


class Calls(TorchFunctionMode):
    """Follows the calls of torch's functions inside a scope.

    Args:
        answer: asked before each call of `cross_entropy`; what it returns, unless `None`, is the result.
    """

    def __init__(self, answer: Callable[[Call], Tensor | None]) -> None:
        super().__init__()
        self._answer = answer
        self.current = NO_CALL
        """The outermost function that is running."""
        self.operands: dict[int, Any] = {}
        """What a recipe needs and no node keeps, by the number of the node."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled function that is met breaks its graph here
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, known by its name to whoever keeps tensors meanwhile."""
        kwargs = kwargs or {}
        before, name = self.current, getattr(func, "__name__", "")
        call = self.current = Call(name, args, kwargs)
        try:
            answer = self._answer(call) if name == "cross_entropy" else None
            result = func(*args, **kwargs) if answer is None else answer
        finally:
            self.current = before
        if name in _NOTED and isinstance(result, Tensor) and result.grad_fn is not None:
            self.operands[sequence_nr_of(result.grad_fn)] = _NOTED[name](call)
        return result

    @contextmanager
    def unseen(self, name: str) -> Iterator[None]:
        """Calls inside are not looked at: what they keep is kept for one function of that `name`."""
        if not is_innermost(self):
            yield
            return
        before, self.current = self.current, Call(name, (), {})
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            self.__enter__()  # type: ignore[no-untyped-call]
            self.current = before


def _scalar(call: Call) -> Any:
    """The number in `tensor + number`, on either side."""
    return next((a for a in call.args[:2] if isinstance(a, (int, float))), None)


_NOTED: dict[str, Callable[[Call], Any]] = {
    "batch_norm": lambda call: call.argument(4, "bias"),
    "group_norm": lambda call: call.argument(3, "bias"),
    "layer_norm": lambda call: call.argument(4, "eps", 1e-5),
    "add": _scalar,
    "__add__": _scalar,
    "__radd__": _scalar,
    "sub": _scalar,
    "__sub__": _scalar,
}
"""What a recipe needs and no node keeps: a normalisation's bias or epsilon, a number that is added."""

_POOLS = {"max_pool1d": 1, "max_pool2d": 2, "max_pool3d": 3}


def window_index(index: Tensor, call: Call) -> WindowIndex | None:
    """The small form of a max-pool's argmax; `None` for any other integers."""
    dims = _POOLS.get(call.name.removesuffix("_with_indices"))
    if dims is None or not covers_its_storage(index) or not index.is_contiguous():
        return None
    source, kernel = call.argument(0, "input"), call.argument(1, "kernel_size")
    settings = (
        kernel,
        call.argument(2, "stride") or kernel,
        call.argument(3, "padding", 0),
        call.argument(4, "dilation", 1),
    )
    window = [[s] * dims if isinstance(s, int) else list(s) * (dims if len(s) == 1 else 1) for s in settings]
    if not WindowIndex.fits(window):
        return None
    return WindowIndex(index, source.shape[-dims:], window)
