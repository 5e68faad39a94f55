"""The gradient of a loss by what the layer that is called last is given, which tells more than the loss itself.

A ratio of sums over a batch (Dice over all pixels, a mean weighted by classes) is nearly the mean of those of its parts
where the parts are nearly alike: it is off by the square of what they differ by. The gradient of each sample is off by
the first power. And a term may have a gradient and no value. Before that layer nothing is kept: the graph begins there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_SAME_INPUT = 1e-3
"""Fraction of the input by which that of a sample may differ between a batch and its part, by rounding."""


class Given(NamedTuple):
    """What a call of the layer was given."""

    values: Tensor
    gradient: Tensor
    """Gradient of the loss by them."""


class LastLayer:
    """The last of the layers with weights of their own that a step calls.

    Args:
        module: whose layers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._found: nn.Module | None = None
        self._given: list[Tensor] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note which layer is called last inside."""
        with contextlib.ExitStack() as stack:
            for layer in self._module.modules():
                if any(True for _ in layer.parameters(recurse=False)):
                    stack.callback(layer.register_forward_pre_hook(self._note).remove)
            yield

    def _note(self, layer: nn.Module, args: Any) -> None:
        self._found = layer

    @contextlib.contextmanager
    def differentiated(self) -> Iterator[None]:
        """Record a graph inside, from the first call of that layer on; the block is run without gradients."""
        self._given.clear()
        if self._found is None:
            yield
            return
        handle = self._found.register_forward_pre_hook(self._record)
        try:
            yield
        finally:
            handle.remove()

    def _record(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        torch.set_grad_enabled(True)
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return None
        self._given.append(args[0].detach().requires_grad_())
        return self._given[-1], *args[1:]

    def given(self, loss: Tensor) -> list[Given]:
        """Return what its calls were given, with gradients; none where the loss does not depend on that."""
        given, self._given = self._given, []
        if not given or not loss.requires_grad:
            return []
        gradients = torch.autograd.grad(loss, given, allow_unused=True)
        pairs = zip(given, gradients, strict=True)
        return [Given(values.detach(), gradient) for values, gradient in pairs if gradient is not None]


class Comparison(NamedTuple):
    """A batch beside its parts, both as fractions."""

    of_inputs: float
    """Difference of what the layer is given, by rounding."""
    of_gradients: float
    """Difference of the gradients, those of parts weighted."""


def compare(whole: Sequence[Given], parts: Sequence[Sequence[Given]], weights: Sequence[float]) -> Comparison | None:
    """Compare the gradients of a batch with those of its parts.

    `None` where calls of the layer were not given the same samples in the same order, or nothing has a gradient.
    """
    if not whole or any(len(part) != len(whole) for part in parts):
        return None
    of_inputs, of_gradients = _Distance(), _Distance()
    for number, (values, gradient) in enumerate(whole):
        each = [part[number] for part in parts]
        dim = _dimension_of_samples(values, [part.values for part in each])
        if dim is None:
            return None
        of_inputs.add(torch.cat([part.values for part in each], dim), values)
        weighted = [weight * part.gradient for weight, part in zip(weights, each, strict=True)]
        of_gradients.add(torch.cat(weighted, dim), gradient)
    found = Comparison(of_inputs.fraction, of_gradients.fraction)
    return found if found.of_inputs <= _SAME_INPUT and math.isfinite(found.of_gradients) else None


class _Distance:
    def __init__(self) -> None:
        self._off = self._size = 0.0

    def add(self, found: Tensor, expected: Tensor) -> None:
        self._off += float((found - expected).double().square().sum())
        self._size += float(expected.double().square().sum())

    @property
    def fraction(self) -> float:
        """Norm of all differences over that of all that was expected."""
        return math.sqrt(self._off / self._size) if self._size else math.nan


def _dimension_of_samples(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    for dim in range(whole.dim()):
        rest = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in (whole, *parts)}
        if len(rest) == 1 and sum(part.shape[dim] for part in parts) == whole.shape[dim]:
            return dim
    return None
