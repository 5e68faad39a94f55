"""How logits that nobody has computed follow from a Linear's input, and their place in the graph once they were."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Form(NamedTuple):
    """How logits follow from the rows of a Linear's input."""

    class_dim: int
    dtype: torch.dtype
    is_log: bool
    """Whether they are log-probabilities."""

    def of(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits of `rows`, whose features are in `class_dim`."""
        rows = rows.movedim(self.class_dim, -1)  # [..., D]
        logits = F.linear(rows, weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)).to(self.dtype)
        logits = logits.movedim(-1, self.class_dim)
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
