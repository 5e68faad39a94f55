"""Predictions that torchmetrics takes for logits or for probabilities, by their values: alike in all parts of a batch.

Its classification metrics normalize what one `update` is given if a value of it lies outside of [0, 1]. A part of few
samples may have none where its batch has one. So what parts have been given is kept, as far as it is small; where they
were not told apart alike, the metric starts the batch anew and is given all of it at once.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

_MOST_ELEMENTS = 2**18
"""Elements of the tensors that a metric is given in the parts of a batch, up to which they are kept."""
_NAMES = ("Binary", "Multilabel", "Multiclass")


class MetricInputs:
    """Watches what metrics are given in the parts of a batch while it is entered.

    Args:
        metrics: that have started the batch anew; of these, the ones for classification.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._kept = [_Kept(metric) for metric in metrics if _normalizes(metric)]
        self.are_mixed = False
        """Whether a metric took some parts for logits and others for probabilities, and could not be given all anew."""

    def __enter__(self) -> MetricInputs:
        for kept in self._kept:
            kept.metric.update = kept.watching()  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for kept in self._kept:
            kept.metric.update = kept.update  # type: ignore[method-assign]

    def give_anew(self) -> None:
        """Give metrics that took parts of one batch for different things all of it at once; behind the batch."""
        for kept in self._kept:
            if len(kept.kinds) > 1:
                self.are_mixed |= not kept.give_anew()


_trials: list[None] = []
"""One entry for each trial of a step that is running."""


@contextlib.contextmanager
def not_kept() -> Iterator[None]:
    """Keep nothing that metrics are given inside: a step is tried there, in the middle of a batch."""
    _trials.append(None)
    try:
        yield
    finally:
        _trials.pop()


class _Kept:
    """What one metric was given in the parts of a batch."""

    def __init__(self, metric: Metric) -> None:
        self.metric, self.update = metric, metric.update
        self.kinds: set[bool] = set()
        """Whether predictions lay in [0, 1], of the parts so far."""
        self._given: list[dict[str, Any]] = []  # arguments by name
        self._num_left = _MOST_ELEMENTS

    def watching(self) -> Callable[..., None]:
        """Return an `update` that keeps what it is given."""
        signature = inspect.signature(self.update)

        def update_and_keep(*args: Any, **kwargs: Any) -> None:
            if _trials:
                self.update(*args, **kwargs)
                return
            given = signature.bind(*args, **kwargs).arguments
            preds = next(iter(given.values()), None)
            if isinstance(preds, Tensor) and preds.is_floating_point() and preds.numel():
                self.kinds.add(bool(((preds >= 0) & (preds <= 1)).all()))
            self._num_left -= sum(each.numel() for each in given.values() if isinstance(each, Tensor))
            self._given = [*self._given, given] if self._num_left >= 0 else []
            self.update(*args, **kwargs)

        return update_and_keep

    def give_anew(self) -> bool:
        """Start the batch anew with all of it; return whether that could be done."""
        if self._num_left < 0 or any(given.keys() != self._given[0].keys() for given in self._given):
            return False
        with torch.no_grad():
            joined = {name: _joined([given[name] for given in self._given]) for name in self._given[0]}
            self.metric.reset()
            self.update(**joined)
        return True


def _joined(values: Sequence[Any]) -> Any:
    """Return what parts were given as a batch is: tensors one behind the other, anything else as it was first."""
    first = values[0]
    return torch.cat([*values]).detach() if isinstance(first, Tensor) and first.dim() else first


def _normalizes(metric: Metric) -> bool:
    """Return whether a metric is one of torchmetrics' for classification, or derived from one."""
    return any(
        kind.__module__.startswith("torchmetrics.classification") and kind.__name__.startswith(_NAMES)
        for kind in type(metric).__mro__
    )
