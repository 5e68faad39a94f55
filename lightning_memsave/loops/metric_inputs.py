"""Predictions that torchmetrics takes for logits or for probabilities, by their values: alike in all parts of a batch.

Its classification metrics normalize what one `update` is given if a value of it lies outside of [0, 1]. A part of few
samples may have none where its batch has one. So a metric that was given logits once is given probabilities where it
would not see that they are logits. What comes too late, behind parts of the same batch that were taken for
probabilities, is told, and the batch can be run again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torchmetrics import Metric

_of_logits: weakref.WeakValueDictionary[int, Metric] = weakref.WeakValueDictionary()
"""Metrics that were given logits, by their `id`: their hash changes with their state."""


class LateLogitsError(Exception):
    """Parts of a batch were taken for probabilities before one showed that all are logits."""


class MetricInputs:
    """Makes what metrics are given alike while it is entered.

    Args:
        metrics: of which those for classification are watched.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = [metric for metric in metrics if _name(metric)]
        self._unclear: set[int] = set()
        self.are_late = False
        """Whether a metric was given logits behind predictions that it took for probabilities."""

    def __enter__(self) -> MetricInputs:
        self._updates = [(metric, metric.update) for metric in self._metrics]
        for metric, update in self._updates:
            metric.update = self._alike(metric, update)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for metric, update in self._updates:
            metric.update = update  # type: ignore[method-assign]

    def _alike(self, metric: Metric, update: Callable[..., None]) -> Callable[..., None]:
        def update_alike(*args: Any, **kwargs: Any) -> None:
            preds = args[0] if args else kwargs.get("preds")
            if isinstance(preds, Tensor) and preds.is_floating_point() and preds.numel():
                if bool(((preds < 0) | (preds > 1)).any()):
                    self.are_late |= id(metric) in self._unclear
                    _of_logits[id(metric)] = metric
                elif id(metric) in _of_logits:
                    preds = preds.softmax(1) if _name(metric).startswith("Multiclass") else preds.sigmoid()
                    args, kwargs = ((preds, *args[1:]), kwargs) if args else (args, {**kwargs, "preds": preds})
                else:
                    self._unclear.add(id(metric))
            update(*args, **kwargs)

        return update_alike


def _name(metric: Metric) -> str:
    """Return the name of torchmetrics' class, of which a user's may be derived; empty for another metric."""
    for kind in type(metric).__mro__:
        if kind.__module__.startswith("torchmetrics.classification") and kind.__name__.startswith(_NAMES):
            return kind.__name__
    return ""


_NAMES = ("Binary", "Multilabel", "Multiclass")
