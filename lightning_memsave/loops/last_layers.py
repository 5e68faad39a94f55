"""Gradients of a loss with respect to the inputs of the last layers, which tell more than the loss itself.

A ratio of sums over a batch (Dice over all pixels, a mean weighted by classes) is nearly the mean of those of its parts
where the parts are nearly alike: it is off by the square of what they differ by. The gradient of each sample is off by
the first power. And a term may have a gradient and no value.

The last layers are those with weights between which and the loss there is no other one. Each layer gets its input
without the graph behind it, so that what is kept is what lies between them and the loss.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

_SAME_INPUT = 1e-3
"""Fraction of the input by which that of a sample may differ between a batch and its part, by rounding."""
_DTYPES = (torch.float32, torch.float64)


class InputGradient(NamedTuple):
    """An input of a layer."""

    values: Tensor
    gradient: Tensor
    """Gradient of the loss with respect to them."""


class LastLayers:
    """The layers of a module whose inputs reach a loss without another layer in between.

    Args:
        module: whose layers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._layers = [
            layer
            for layer in module.modules()
            if any(True for _ in layer.parameters(recurse=False)) and not isinstance(layer, torch.jit.ScriptModule)
        ]
        # Backward hooks are the user's, and would run.
        self.are_hooked = any(each._backward_hooks or each._backward_pre_hooks for each in module.modules())
        self._inputs: list[weakref.ref[Tensor]] = []

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Give each layer its input without the graph behind it, inside."""
        self._inputs.clear()
        with contextlib.ExitStack() as stack:
            for layer in self._layers:
                stack.callback(layer.register_forward_pre_hook(self._detach, with_kwargs=True).remove)
            yield

    def _detach(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # the user's own block
            return None
        detached = functools.cache(self._detached)  # attention asks whether query and key are one tensor
        return tree_map_only(Tensor, detached, (args, kwargs))

    def _detached(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _DTYPES:
            return tensor
        found = tensor.detach().requires_grad_()
        self._inputs.append(weakref.ref(found))  # those that do not reach the loss are freed
        return found

    def gradients(self, loss: Tensor) -> list[InputGradient]:
        """Return the inputs that the loss depends on, with gradients, in the order of calls."""
        there = [tensor for reference in self._inputs if (tensor := reference()) is not None]
        self._inputs.clear()
        if not there or not loss.requires_grad:
            return []
        gradients = torch.autograd.grad(loss, there, allow_unused=True)
        pairs = zip(there, gradients, strict=True)
        return [InputGradient(values.detach(), gradient) for values, gradient in pairs if gradient is not None]


# ---------------------------------------------------------------------------------------------------- comparison
class Comparison(NamedTuple):
    """A batch beside its parts, both as fractions."""

    of_inputs: float
    """Difference of the inputs, by rounding."""
    of_gradients: float
    """Difference of the gradients, those of parts weighted."""


def compare(
    whole: Sequence[InputGradient],
    parts: Sequence[Sequence[InputGradient]],
    sizes: Sequence[int],
    weights: Sequence[float],
) -> Comparison | None:
    """Compare the gradients of a batch with those of its parts.

    Args:
        whole: of the batch.
        parts: of each part.
        sizes: samples of each part.
        weights: of each part.

    Returns:
        `None` where layers were not given the same samples in the same order, or nothing has a gradient.
    """
    if not whole or any(len(part) != len(whole) for part in parts):
        return None
    of_inputs, of_gradients = _Distance(), _Distance()
    for number, (values, gradient) in enumerate(whole):
        each = [part[number] for part in parts]
        for dim, times in _places_of_samples(values, [part.values for part in each], sizes):
            inputs = _Distance()
            inputs.add(values, [part.values for part in each], [1.0] * len(each), dim, times)
            if inputs.fraction <= _SAME_INPUT:
                of_inputs += inputs
                of_gradients.add(gradient, [part.gradient for part in each], weights, dim, times)
                break
        else:
            return None
    found = Comparison(of_inputs.fraction, of_gradients.fraction)
    return found if math.isfinite(found.of_gradients) else None


class _Distance:
    def __init__(self) -> None:
        self._off = self._size = 0.0

    def add(self, whole: Tensor, parts: Sequence[Tensor], weights: Sequence[float], dim: int, times: int) -> None:
        """Add what weighted parts differ by from the entries of the whole that are theirs."""
        start = 0
        for number in range(times):
            for part, weight in zip(parts, weights, strict=True):
                some = part.chunk(times, dim)[number]
                expected = whole.narrow(dim, start, some.shape[dim])
                start += some.shape[dim]
                self._off += _square(torch.sub(expected, some, alpha=weight))
                self._size += _square(expected)

    def __iadd__(self, other: _Distance) -> _Distance:
        self._off, self._size = self._off + other._off, self._size + other._size
        return self

    @property
    def fraction(self) -> float:
        """Norm of all differences over that of all that was expected."""
        return math.sqrt(self._off / self._size) if self._size else math.nan


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2


def _places_of_samples(whole: Tensor, parts: Sequence[Tensor], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield dimensions that samples may lie along, and how often all of them may lie there one after the other."""
    for dim in range(whole.dim()):
        rest = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in (whole, *parts)}
        if len(rest) > 1 or sum(part.shape[dim] for part in parts) != whole.shape[dim]:
            continue
        yield dim, 1
        times = whole.shape[dim] // sum(sizes)  # views of each sample
        if times > 1 and all(part.shape[dim] == times * size for part, size in zip(parts, sizes, strict=True)):
            yield dim, times
