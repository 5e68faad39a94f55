"""How logits that nobody has computed follow from a Linear's input, and their place in the graph once they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_EVERY_CLASS = slice(None)


class Map(NamedTuple):
    """A function of each logit alone, or a cast."""

    func: Callable[..., Tensor]
    args: tuple[Any, ...]
    """Numbers, a dtype, and constants: [], [1], or [C]."""

    def of(self, logits: Tensor, some: slice) -> Tensor:
        """Return the function of `some` classes' logits, [..., c]."""
        return self.func(
            logits, *(each[some] if isinstance(each, Tensor) and each.numel() > 1 else each for each in self.args)
        )


class Form(NamedTuple):
    """How logits follow from the rows of a Linear's input."""

    class_dim: int
    dtype: torch.dtype
    maps: tuple[Map, ...] = ()
    """What is done to the Linear's output, in this order."""
    is_log: bool = False
    """Whether they are log-probabilities, of what the maps return."""

    def then(self, last: Map, dtype: torch.dtype) -> Form:
        """Return the form after another function, whose results are of `dtype`."""
        return self._replace(maps=(*self.maps, last), dtype=dtype)

    @property
    def changes_gradient(self) -> bool:
        """Whether the Linear's output has another gradient than the logits."""
        return any(each.func is not Tensor.to for each in self.maps)

    def mapped(self, logits: Tensor, some: slice = _EVERY_CLASS) -> Tensor:
        """Return the logits of `some` classes, [..., c], given the Linear's output of these."""
        for each in self.maps:
            logits = each.of(logits, some)
        return logits

    def of(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of `rows`, whose features are in `class_dim`."""
        rows = rows.movedim(self.class_dim, -1)  # [..., D]
        output = F.linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype))
        logits = self.mapped(output).movedim(-1, self.class_dim)
        return logits.log_softmax(self.class_dim) if self.is_log else logits


class LogitsAskedError(RuntimeError):
    """A gradient of logits is asked for, of which a loss was computed without them."""

    def __init__(self) -> None:
        super().__init__(
            'activations: "linear-cross-entropy" computes a loss without its logits, so their gradient is not found. '
            "Leave the codec out where `torch.autograd.grad` asks for it."
        )


def refuse_stale(ctx: Any) -> None:
    """Raise an error where a function was given logits after an edit that their place in the graph does not show."""
    if getattr(ctx, "is_stale", False):
        raise RuntimeError(
            'activations: "linear-cross-entropy" cannot tell an autograd function of your own how logits were edited '
            'through a view. Pass it `logits.view_as(logits)`, or leave "linear-cross-entropy" out.'
        )


class Follow(torch.autograd.Function):
    """Logits whose plain tensor exists: their gradient goes to it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, found: Tensor) -> Tensor:
        """Return the logits, now with the place of `found`."""
        ctx.mark_dirty(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Return the gradient of `found`."""
        refuse_stale(ctx)
        return None, gradient
