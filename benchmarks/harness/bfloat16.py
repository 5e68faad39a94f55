"""bfloat16 at a bearable speed on CPUs without its instructions, for benchmarks that train.

There torch's own kernels emulate bfloat16 about twenty times slower than float32. Inside `faster_bfloat16`,
convolutions and matrix products of bfloat16 tensors take float32 copies, multiply and add in float32 as the
instructions do, and round the result: the same numbers up to the order of additions. Tensors that a training step
sees, and so tracked bytes, are those without; the float32 copies are workspace and make the allocator's peak an upper
bound.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_PRODUCTS = ("convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm")


def has_bfloat16_instructions() -> bool:
    info = Path("/proc/cpuinfo")
    return not info.exists() or not {"avx512_bf16", "bf16"}.isdisjoint(info.read_text().split())


@contextlib.contextmanager
def faster_bfloat16() -> Iterator[None]:
    """Compute products of bfloat16 tensors on the CPU in float32 inside the scope, where that is faster."""
    if has_bfloat16_instructions():
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*other operators may also be overridden")
        for name in _PRODUCTS:
            library.impl(name, _in_float32(getattr(torch.ops.aten, name).default), "CPU")
    try:
        yield
    finally:
        library._destroy()


def _in_float32(operation: Any) -> Callable[..., Any]:
    plain = _plain(operation)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(a, Tensor) and a.dtype is torch.bfloat16 for a in args):
            return plain(*args, **kwargs)
        out = plain(*(a.float() if isinstance(a, Tensor) and a.dtype is torch.bfloat16 else a for a in args), **kwargs)
        if isinstance(out, Tensor):
            return out.bfloat16()
        return tuple(None if part is None else part.bfloat16() for part in out)

    return run


def _plain(operation: Any) -> Callable[..., Any]:
    """torch's own kernel, which the one that is put in front of it must still reach (private names, seen in 2.13)."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    if operation._schema.name.startswith("aten::convolution"):
        return lambda *args, **kwargs: operation._op_dk(key, *args, **kwargs)
    # Products have kernels of their own for the CPU, which an override replaces; `out=` reaches them by another name.
    into = getattr(torch.ops.aten, operation._schema.name.removeprefix("aten::")).out

    def run(*args: Any, **kwargs: Any) -> Any:
        return into(*args, **kwargs, out=args[0].new_empty(0))

    return run
