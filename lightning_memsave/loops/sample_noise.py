"""Noise in an evaluation of parts of a batch: each sample's own, whatever part it is in."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.saved_tensors.dropout import DROPOUT, native_dropout
from lightning_memsave.saved_tensors.kept_noise import is_draw
from lightning_memsave.torch_internals.dispatch_mode import DispatchMode

_INTEGERS = frozenset(("randperm", "randint", "multinomial", "bernoulli"))


class SampleNoise(DispatchMode):
    """Noise of each sample's own, which is the same when the sample is in a part of the batch.

    So a loss that draws noise (dropout, diffusion, variational autoencoders) can be compared between a batch and its
    parts. What is drawn with one entry per sample, or a multiple of that, is drawn for the whole batch, of which a part
    takes its own. Noise whose distribution is in tensors (`torch.bernoulli(p)`) is drawn as it is. Generators start
    anew, so that what is drawn once for all samples is equal, too.

    Args:
        start: the place of the first sample in the whole batch.
        num_samples: of the part.
        num_all: of the whole batch.

    Example:
        >>> with SampleNoise(0, 5, 5):
        ...     whole = torch.randn(5, 3)
        >>> with SampleNoise(2, 3, 5):
        ...     part = torch.randn(3, 3)
        >>> torch.equal(whole[2:], part), torch.equal(part[0], part[1])
        (True, False)
    """

    supports_higher_order_operators = True

    def __init__(self, start: int, num_samples: int, num_all: int) -> None:
        super().__init__()
        self._start, self._num_samples, self._num_all = start, num_samples, num_all
        self.num_drawn = 0
        """Number of draws so far."""
        self.is_sure = True
        """Whether everything that was drawn was told to be a sample's own, or equal in all parts."""

    def __enter__(self) -> SampleNoise:
        random.seed(0)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_draw(func, args, kwargs):
            return func(*args, **kwargs)
        self.num_drawn += 1
        torch.manual_seed(self.num_drawn)
        if func is DROPOUT and (times := self._times(args[0])):
            return self._dropped(times, *args)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        gives_shape = func._schema.is_mutable or func._schema.name.endswith("_like")
        times = next((n for value in args if (n := self._times(value))), 0)
        if len(tensors) > gives_shape or not times:  # values count, or none is a sample's own
            self.is_sure &= self._is_equal_in_parts(func, args, tensors)
            return func(*args, **kwargs)
        of_all = [self._of_all(value, times) for value in args]
        drawn = self._own_of(func(*of_all, **kwargs), times)
        return args[0].copy_(drawn) if func._schema.is_mutable else drawn.clone()

    def _own_of(self, drawn: Tensor, times: int) -> Tensor:
        """Return what was drawn for the samples of the part; note whether it is theirs for sure."""
        self.is_sure &= times == 1 and self._num_samples > 1
        return drawn[times * self._start : times * (self._start + self._num_samples)]

    def _dropped(self, times: int, values: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """Return what dropout gives, and its mask, for which the values do not count."""
        mask = self._own_of(DROPOUT(self._of_all(values, times), p, train)[1], times)
        return native_dropout(values, mask, p), mask

    def _is_equal_in_parts(self, func: Any, args: Any, tensors: list[Tensor]) -> bool:
        """Return whether a draw that is no sample's own is equal in every part: at most one number, no integer."""
        name = func._schema.name.partition("::")[2]
        sizes = [tensor.numel() for tensor in tensors] or [_num_elements(args)]
        return name not in _INTEGERS and max(sizes) <= 1

    def _times(self, value: Any) -> int:
        """Return how many entries each sample has in a size, or in a tensor that gives one.

        0 if samples have no share.
        """
        if isinstance(value, Tensor):
            first = len(value) if value.dim() else 0
        else:
            is_size = isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], int)
            first = value[0] if is_size else 0
        return int(first // self._num_samples) if first % self._num_samples == 0 else 0

    def _of_all(self, value: Any, times: int) -> Any:
        """Return a size, or a tensor that gives one, of the whole batch instead of the part."""
        if self._times(value) != times:
            return value
        first = times * self._num_all
        if isinstance(value, Tensor):
            return value.new_empty(first, *value.shape[1:])
        return type(value)([first, *value[1:]])


def _num_elements(args: Any) -> int:
    size = next((value for value in args if isinstance(value, (list, tuple))), [])
    return int(torch.Size(size).numel())
