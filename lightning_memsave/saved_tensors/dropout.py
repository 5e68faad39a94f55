"""Dropout whose noise is a mask: one byte per element while it is made, one bit in the store, one pass either way.

On the CPU torch keeps dropout's noise as floating point numbers, 0 or 1 / (1 - p), and multiplies by them in forward
and in backward. Here a call of `dropout` is answered by the same multiplication with the mask and the one number: the
same numbers are drawn from torch's generator, and results and gradients are equal to the bit.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.numerics import kernels
from lightning_memsave.saved_tensors.call_site import Call
from lightning_memsave.torch_internals.fake_tensors import is_plain


class _Dropped(torch.autograd.Function):
    """`x` where `mask`, times `scale`; 0 elsewhere. Linear in `x`, so its backward is itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return kernels.scale_where(mask, x, scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        result: Tensor = _Dropped.apply(gradient.contiguous(), mask, ctx.scale)  # type: ignore[no-untyped-call]
        # Laid out as torch's product with the gradient would be: sums of it are then in the same order.
        order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
        if not gradient.is_contiguous() and gradient.permute(order).is_contiguous():
            back = [order.index(dim) for dim in range(gradient.dim())]
            result = result.permute(order).contiguous().permute(back)
        return result, None, None


def dropout(call: Call) -> Tensor | None:
    """Return what `call` of `dropout` asks for; `None` for a call that is left to torch."""
    x, p = call.argument(0, "input"), call.argument(1, "p", 0.5)
    if (
        not isinstance(x, Tensor)
        or not is_plain(x)
        or x.device.type != "cpu"  # elsewhere torch keeps a mask itself
        or x.dtype != torch.float32
        or not (x.requires_grad and x.is_contiguous())
        or not 0 < p < 1
        or not torch.is_grad_enabled()
        or not call.argument(2, "training", call.kwargs.get("train", True))
        or call.argument(3, "inplace", False)
    ):
        return None
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return _Dropped.apply(x, mask, scale_of(p))  # type: ignore[no-any-return, no-untyped-call]


DROPOUT = torch.ops.aten.native_dropout.default
"""Draws a mask and multiplies by it, in one operation: `torch.native_dropout`, and `F.dropout` on CUDA but in place."""


def native_dropout(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return what `DROPOUT` gives with a mask that was drawn before, to the bit."""
    if p == 1:
        return torch.zeros_like(x)
    return x * mask * native_scale(x, p)


def native_scale(x: Tensor, p: float) -> float:
    """Return 1 / (1 - p) as `DROPOUT` multiplies by it: rounded to float32 twice on CUDA, to x's dtype elsewhere."""
    if x.is_cuda and x.dtype != torch.float64:
        return scale_of(p)
    return float(torch.tensor(1.0 / (1.0 - p), dtype=x.dtype, device="cpu"))


def scale_of(p: float) -> float:
    """Return 1 / (1 - p), rounded where torch rounds: to float32, twice."""
    return _rounded(1 / _rounded(1 - p))


def _rounded(value: float) -> float:
    return ctypes.c_float(value).value
