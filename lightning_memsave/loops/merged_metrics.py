"""torchmetrics inside microbatches: a metric's value for the batch is that of all its microbatches together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric
from torchmetrics.metric import CompositionalMetric

from lightning_memsave.loops.metric_inputs import MetricInputs

_MERGEABLE = {"dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min"}


def is_mergeable(metric: Metric) -> bool:
    """Return whether two states of a metric can be merged as if one had seen all."""
    names = {getattr(reduction, "__name__", None) for reduction in metric._reductions.values()}
    return bool(names) and names <= _MERGEABLE and type(metric).reset is Metric.reset


@dataclass(frozen=True)
class _Saved:
    """A metric's private state before the batch (torchmetrics 1.x)."""

    metric: Metric
    state: dict[str, Any]
    update_count: int
    computed: Any
    forward_cache: Any

    @classmethod
    def of(cls, metric: Metric, starts_anew: bool) -> _Saved:
        """Note a state without copying gathered lists, which may be large, or tensors that `reset` leaves alone."""
        state = {name: getattr(metric, name) for name in metric._defaults}
        for name, value in state.items():
            if isinstance(value, list):
                state[name] = list(value)
                if starts_anew:
                    setattr(metric, name, [])  # `reset` empties the list in place
            elif not starts_anew:
                state[name] = value.detach().clone()
        return cls(metric, state, metric._update_count, metric._computed, metric._forward_cache)

    def restore(self) -> None:
        for name, value in self.state.items():
            setattr(self.metric, name, value)
        self.metric._update_count, self.metric._computed = self.update_count, self.computed
        self.metric._forward_cache = self.forward_cache


def _of_this_process(metric: Metric) -> Any:
    """The value for a batch, not reduced over processes unless the metric asks for that, as in `Metric.forward`."""
    before, metric._to_sync = metric._to_sync, metric.dist_sync_on_step
    try:
        return metric.compute()
    finally:
        metric._to_sync = before


def _composite_value(metric: CompositionalMetric) -> Any:
    """Return the value of a composite (`accuracy + recall`), which has no state.

    Its value for the batch is made from those of its parts.
    """
    parts = (part._forward_cache if isinstance(part, Metric) else part for part in (metric.metric_a, metric.metric_b))
    return metric.op(*(part for part in parts if part is not None))


class MergedMetrics:
    """Resets the metrics of a module for one batch and merges that batch into what they held before.

    A batch in one piece has nothing to merge: its metrics go on, and are only put back when it fails.

    Metrics whose states do not merge by sum, concatenation, minimum or maximum are left alone: totals over samples are
    right, their value for the step is the last microbatch's. A scalar that a `MeanMetric` gets without a weight counts
    as the mean over its microbatch: together these count as the one scalar of the batch. Of a loss that is a sum that
    is its mean over microbatches.

    Args:
        module: whose metrics.
        num_parts: of the batch.
        metrics: all that `module` has, where they have just been looked for (`BatchStart`).
    """

    weight = 1.0
    """Weight of the running microbatch in its batch; 0: its mean is over nothing, and is left out."""

    def __init__(self, module: nn.Module, num_parts: int = 1, metrics: Sequence[Metric] | None = None) -> None:
        self._merges = num_parts > 1
        self._metrics = [m for m in module.modules() if isinstance(m, Metric)] if metrics is None else metrics
        self._saved: list[_Saved] = []
        self._updates: list[tuple[MeanMetric, Any]] = []
        self.inputs = MetricInputs(m for m in self._metrics if self._merges and is_mergeable(m))
        """Tells whether metrics took parts of the batch for different things."""

    def set_aside(self) -> None:
        """Keep what every metric holds; those that can be merged start anew."""
        self._saved = [_Saved.of(m, self._merges and is_mergeable(m)) for m in self._metrics]
        for saved in self._mergeable():
            saved.metric.reset()

    def __enter__(self) -> MergedMetrics:
        self.set_aside()
        means = [m for m in self._metrics if type(m) is MeanMetric and self._merges]  # others may update otherwise
        self._updates = [(mean, mean.update) for mean in means]
        for mean, update in self._updates:
            mean.update = self._weighted(update)  # type: ignore[method-assign]
        self.inputs.__enter__()
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self.inputs.__exit__()
        for mean, update in self._updates:
            mean.update = update  # type: ignore[method-assign]
        if failed is not None:
            self.restore()
            return
        self.inputs.give_anew()
        mergeable = self._mergeable()
        for saved in mergeable:
            metric, num_updates = saved.metric, saved.metric._update_count
            if num_updates == 0:
                saved.restore()
                continue
            batch_value = _of_this_process(metric) if metric._forward_cache is not None else None
            metric._update_count = saved.update_count + num_updates
            if saved.update_count:
                metric._reduce_states(saved.state)
            metric._computed, metric._forward_cache = None, batch_value
        for saved in reversed(self._saved):  # inner ones first
            composite: Any = saved.metric if self._merges and isinstance(saved.metric, CompositionalMetric) else None
            if composite is not None and composite._forward_cache is not None:
                composite._forward_cache = _composite_value(composite)

    def restore(self) -> None:
        """Put every metric back to what it was before the batch."""
        for saved in self._saved:
            saved.restore()

    def _weighted(self, update: Callable[..., None]) -> Callable[..., None]:
        def update_by_part(value: object, weight: Any = None) -> None:
            if weight is None and not (isinstance(value, Tensor) and value.dim()):
                value, weight = (value if self.weight else 0.0), self.weight
            update(value, *([] if weight is None else [weight]))  # older ones have another default than `None`

        return update_by_part

    def _mergeable(self) -> list[_Saved]:
        return [saved for saved in self._saved if self._merges and is_mergeable(saved.metric)]
