"""`self.log` inside microbatches: collect the calls, then log once what the full batch would have logged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor

from lightning_memsave.lightning_compat import Batch


@dataclass(frozen=True, kw_only=True)
class _Call:
    value: Any
    num_samples: float
    weight: float
    microbatch: int
    options: dict[str, Any]


class DeferredLogs:
    """Stands in for the result collection's `log` while active; `flush` replays one merged call per name.

    Args:
        results: Lightning's result collection (`trainer._results`).
        log: the collection's own `log` function, unbound.
    """

    def __init__(self, results: Any, log: Callable[..., None]) -> None:
        self._results, self._log = results, log
        self._calls: dict[tuple[str, str], list[_Call]] = {}
        self._microbatch, self._num_samples, self._weight = -1, 0.0, 0.0

    def __enter__(self) -> DeferredLogs:
        self._results.log = self._collect
        return self

    def __exit__(self, *_: object) -> None:
        del self._results.log

    def begin(self, microbatch: Any, num_samples: float, weight: float) -> None:
        """Begin a microbatch, whose loss has this weight in its batch."""
        self._microbatch += 1
        self._num_samples, self._weight = num_samples, weight
        self._results.batch, self._results.batch_size = microbatch, None

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as Lightning's own `log`
    def _collect(self, fx: str, name: str, value: Any, **options: Any) -> None:
        if isinstance(value, Tensor) and not options.get("enable_graph"):
            value = value.detach()
        call = _Call(
            value=value,
            num_samples=self._num_samples,
            weight=self._weight,
            microbatch=self._microbatch,
            options=options,
        )
        self._calls.setdefault((fx, name), []).append(call)

    def flush(
        self, batch: Batch, losses: list[Tensor | None], reduction: Literal["mean", "sum"], num_accumulated: int = 1
    ) -> None:
        """Log the merged values, with the full batch as the one they belong to.

        Args:
            batch: the full batch.
            losses: each microbatch's loss, of which a step sums `num_accumulated`: `training_step` returned it before
                it was divided by that. A logged value that equals it is the loss.
            reduction: how the loss depends on the batch.
            num_accumulated: batches for each step.
        """
        self._results.batch, self._results.batch_size = batch, None
        for (fx, name), calls in self._calls.items():
            if self._microbatch == 0:  # a batch in one piece; it may log a name twice
                for call in calls:
                    self._log(self._results, fx, name, call.value, **call.options)
                continue
            value, options = _merge(calls, losses, reduction, num_accumulated)
            self._log(self._results, fx, name, value, **options)


class LogsInsideError(Exception):
    """A module that would be called several times logs."""


@contextlib.contextmanager
def refusing_logs(trainer: L.Trainer) -> Iterator[None]:
    """Let `self.log` raise while entered.

    Raises:
        LogsInsideError: somebody logs.
    """

    def refuse(*_: object, **__: object) -> None:
        raise LogsInsideError("`self.log` in it would log each tile")

    results: Any = trainer._results
    if results is None:
        yield
        return
    before = vars(results).get("log")
    results.log = refuse
    try:
        yield
    finally:
        del results.log
        if before is not None:
            results.log = before


class KeptLogs:
    """Logs of a batch in one piece: they go straight through, and are taken back when the batch fails.

    Args:
        results: Lightning's result collection.
    """

    def __init__(self, results: Any) -> None:
        self._results = results
        # Lightning replaces values and never edits them, so references are enough.
        self._before = {key: dict(vars(item)) for key, item in results.items()}

    def __enter__(self) -> KeptLogs:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None:
            return
        for key in self._results.keys() - self._before.keys():
            del self._results[key]
        for key, attributes in self._before.items():
            vars(self._results[key]).clear()
            vars(self._results[key]).update(attributes)


def _merge(
    calls: list[_Call], losses: list[Tensor | None], reduction: Literal["mean", "sum"], num_accumulated: int
) -> tuple[Any, dict[str, Any]]:
    last, options = calls[-1].value, dict(calls[-1].options)
    if not isinstance(last, Tensor) or len(calls) == 1:
        return last, options  # a torchmetrics object holds its own merged state
    dtype = torch.promote_types(last.dtype, torch.float32)
    values = torch.stack([call.value.reshape(()).to(dtype) for call in calls])
    samples = [call.num_samples for call in calls]
    sizes = [call.options.get("batch_size") for call in calls]
    reduce_fx = options.get("reduce_fx", "mean")
    reduce_name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    is_loss = all(_is_loss(call, losses, num_accumulated) for call in calls)
    if is_loss:
        reduce_name = reduction  # of the batches' losses, of which this is one
    if sizes[0] is None:
        weights = samples
    elif len(set(sizes)) == 1 and sizes != samples:
        weights = samples  # a constant that the user wrote down: it stays
    else:
        weights = [float(size or 0) for size in sizes]  # derived from the microbatch: it adds up
        options["batch_size"] = int(sum(weights))
    if reduce_name == "sum":
        return values.sum(), options
    if reduce_name in ("min", "max"):
        return (values.min() if reduce_name == "min" else values.max()), options
    shares = values.new_tensor([call.weight for call in calls] if is_loss else weights)
    return torch.where(shares > 0, values * shares, 0).sum() / shares.sum(), options


def _is_loss(call: _Call, losses: list[Tensor | None], num_accumulated: int) -> bool:
    loss = losses[call.microbatch]
    if loss is None:
        return False
    # Divided as Lightning divides it: the way back would not always be the number that it was. It may be logged from
    # another device than the loss is on.
    return torch.equal(_comparable(call.value.to(loss.device) / num_accumulated), _comparable(loss))


def _comparable(value: Tensor) -> Tensor:
    """Return a value that can be compared: a number in place of NaN, the loss of a microbatch without labels."""
    return value.reshape(()).float().nan_to_num(nan=-1.2345e-12)
