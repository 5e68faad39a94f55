"""torchmetrics inside microbatches: a metric's value for the batch is that of all its microbatches together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchmetrics import Metric
from torchmetrics.metric import CompositionalMetric

_MERGEABLE = {"dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min"}


def is_mergeable(metric: Metric) -> bool:
    """Whether two states of a metric can be merged as if one had seen all."""
    names = {getattr(reduction, "__name__", None) for reduction in metric._reductions.values()}
    return bool(names) and names <= _MERGEABLE


@dataclass(frozen=True)
class _Saved:
    """A metric's private state before the batch (torchmetrics 1.x)."""

    metric: Metric
    state: dict[str, Any]
    update_count: int
    computed: Any
    forward_cache: Any

    @classmethod
    def of(cls, metric: Metric) -> _Saved:
        """Without a copy where `reset` leaves the tensors of the state alone: what is gathered may be large."""
        if not is_mergeable(metric):
            state: dict[str, Any] = metric._copy_state_dict()
        else:
            state = {name: getattr(metric, name) for name in metric._defaults}
            for name, value in state.items():
                if isinstance(value, list):
                    setattr(metric, name, [])  # `reset` empties the list in place
        return cls(metric, state, metric._update_count, metric._computed, metric._forward_cache)

    def restore(self) -> None:
        for name, value in self.state.items():
            setattr(self.metric, name, value)
        self.metric._update_count, self.metric._computed = self.update_count, self.computed
        self.metric._forward_cache = self.forward_cache


def _composite_value(metric: CompositionalMetric) -> Any:
    """A composite (`accuracy + recall`) has no state: its value for the batch is made from those of its parts."""
    parts = (part._forward_cache if isinstance(part, Metric) else part for part in (metric.metric_a, metric.metric_b))
    return metric.op(*(part for part in parts if part is not None))


class MergedMetrics:
    """Resets the metrics of a module for one batch and merges that batch into what they held before.

    Metrics whose states do not merge by sum, concatenation, minimum or maximum are left alone: their totals are right,
    their value for the step is the last microbatch's.
    """

    def __init__(self, module: nn.Module) -> None:
        self._metrics = [m for m in module.modules() if isinstance(m, Metric)]
        self._saved: list[_Saved] = []

    def set_aside(self) -> None:
        """Keep what every metric holds; those that can be merged start anew."""
        self._saved = [_Saved.of(m) for m in self._metrics]
        for saved in self._mergeable():
            saved.metric.reset()

    def __enter__(self) -> MergedMetrics:
        self.set_aside()
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is not None:
            self.restore()
            return
        mergeable = self._mergeable()
        for saved in mergeable:
            metric, num_updates = saved.metric, saved.metric._update_count
            if num_updates == 0:
                saved.restore()
                continue
            batch_value = metric.compute() if metric._forward_cache is not None else None
            metric._update_count = saved.update_count + num_updates
            if saved.update_count:
                metric._reduce_states(saved.state)
            metric._computed, metric._forward_cache = None, batch_value
        for saved in reversed(self._saved):  # inner ones first
            composite: Any = saved.metric if isinstance(saved.metric, CompositionalMetric) else None
            if composite is not None and composite._forward_cache is not None:
                composite._forward_cache = _composite_value(composite)

    def restore(self) -> None:
        """Put every metric back to what it was before the batch."""
        for saved in self._saved:
            saved.restore()

    def _mergeable(self) -> list[_Saved]:
        return [saved for saved in self._saved if is_mergeable(saved.metric)]
