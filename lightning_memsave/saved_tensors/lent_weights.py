"""16-bit weights whose gradients several calls add up in float32, before they are rounded once.

Autograd adds up what calls contribute to the gradient of one weight in the weight's dtype. In bfloat16, with 8 bits of
significand, small contributions to a large sum are lost. Here each call computes with a tensor that shares the weight's
memory, and whose gradient is float32; these add up under a stand-in that has the weight's shape and no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.torch_internals.autograd_graph import LENT, WIDENED


class _Widened(torch.autograd.Function):
    """A stand-in of a weight, in float32 and without memory, of which gradients are asked."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return torch.zeros((), dtype=torch.float32, device=weight.device).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(ctx.dtype)


class _Lent(torch.autograd.Function):
    """The memory of a weight, with the gradient of its stand-in."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, weight: Tensor) -> Tensor:
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.float(), None


assert f"{_Widened.__name__}Backward" == WIDENED
assert f"{_Lent.__name__}Backward" == LENT


class LentWeights:
    """The 16-bit weights of a module, for several calls of it.

    Args:
        module: whose.

    Example:
        >>> module = nn.Linear(1, 1, bias=False).bfloat16()
        >>> weights, x = LentWeights(module), torch.full((1, 1), 2**-8, dtype=torch.bfloat16)
        >>> with weights.lent():
        ...     outputs = [module(x) for x in (torch.ones_like(x), *[x] * 4)]
        >>> sum(y.sum() for y in outputs).backward()
        >>> float(module.weight.grad)  # in bfloat16, 1 + 2**-8 is 1
        1.015625
    """

    def __init__(self, module: nn.Module) -> None:
        narrow = (p for p in module.parameters() if p.requires_grad and p.is_floating_point() and p.element_size() == 2)
        self._stand_ins: dict[int, Tensor] = {id(p): _Widened.apply(p) for p in narrow}  # type: ignore[no-untyped-call]
        self._places = [
            (owner, key, self._stand_ins[id(p)])
            for owner in (module.modules() if self._stand_ins else ())
            for key, p in owner._parameters.items()
            if id(p) in self._stand_ins
        ]

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Let the module compute with them inside."""
        before = [(owner, key, owner._parameters[key]) for owner, key, _ in self._places]
        with torch.no_grad():
            values = [p.detach() for _, _, p in before if p is not None]
        for (owner, key, stand_in), value in zip(self._places, values, strict=True):
            lent: Any = _Lent.apply(stand_in, value)  # type: ignore[no-untyped-call]
            owner._parameters[key] = lent
        try:
            yield
        finally:
            for owner, key, p in before:
                owner._parameters[key] = p
