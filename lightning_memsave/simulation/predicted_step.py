"""What is known of a step before it is run: its peak, what that is made of, and how sure that is."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lightning_memsave.core.plain_data import from_data
from lightning_memsave.core.report import Timeline
from lightning_memsave.measuring.allocation_trace import Allocations
from lightning_memsave.measuring.module_attribution import TopTensor
from lightning_memsave.simulation.caching_allocator import CONTEXT_BYTES, cublas_workspaces, replay


@dataclass(frozen=True, kw_only=True)
class CudaBytes:
    """What a CUDA device would hold, as far as a replay tells."""

    allocated_bytes: int
    """The allocator's peak of what tensors take."""
    reserved_bytes: int
    """What the allocator would have taken from the device for that."""
    context_bytes: tuple[int, int] = CONTEXT_BYTES
    """What comes on top: a range."""

    @property
    def fragmentation(self) -> float:
        """Reserved over allocated bytes: how much more is held than tensors take, as what is free lies in pieces."""
        return self.reserved_bytes / self.allocated_bytes if self.allocated_bytes else 1.0


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The peak of a whole training step: forward, backward, the optimizer's update, and what is held between steps.

    `by_category` has every name of `CATEGORIES` and adds up to `peak_bytes`; so does `by_module`.
    """

    peak_bytes: int
    """Peak as the ledger counts it: live tensor storages, each once."""
    workspace_bytes: int = 0
    """What kernels take and give back inside of operations, on top of the peak; 0 where it was not measured."""
    by_category: Mapping[str, int] = field(default_factory=dict)
    by_module: Mapping[str, int] = field(default_factory=dict)
    """Bytes by the innermost module that made or owns what is alive at the peak; largest first."""
    by_place: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """The same bytes by module and category; modules that repeat each other are counted together (`layers.*.mlp`)."""
    timeline: Timeline | None = None
    top: tuple[TopTensor, ...] = ()
    """The fifty largest kinds of tensors at the peak; empty where the step was extended from smaller ones."""
    source: Literal["fake", "measured"] = "fake"
    """`"fake"`: the step was run for its shapes alone. `"measured"`: it reads values, so real ones were run."""
    flags: tuple[str, ...] = ()
    """What makes the figure uncertain, one line each; empty where nothing is known to."""
    seconds: float | None = None
    """A modelled time of the step (roofline, one thread), good for comparing predictions, not as a promise; of a trial
    on CPU, the time that it took."""
    is_timed: bool = False
    """Whether it took these seconds."""
    num_operations: int | None = None
    """Number of operations of modules and of backward, without views."""
    cuda: CudaBytes | None = None
    """Allocator's figures for a CUDA target."""

    @property
    def measured_seconds(self) -> float:
        """What the step took; infinite where that was not measured."""
        return self.seconds if self.is_timed and self.seconds is not None else math.inf

    @property
    def needed_bytes(self) -> tuple[int, int]:
        """What the device must have: a lower and an upper bound; equal on CPU."""
        if self.cuda is None:
            return self.peak_bytes, self.peak_bytes
        low, high = self.cuda.context_bytes
        return self.cuda.reserved_bytes + low, self.cuda.reserved_bytes + high

    def with_bytes(self, category: str, num_bytes: int) -> Prediction:
        """Return the prediction with more bytes of one category at its peak."""
        split = {**self.by_category, category: self.by_category.get(category, 0) + num_bytes}
        return replace(self, peak_bytes=self.peak_bytes + num_bytes, by_category=split)

    def fits(self, device_bytes: int) -> bool | None:
        """Return whether that is enough; `None` where it lies between the bounds."""
        low, high = self.needed_bytes
        return True if high <= device_bytes else False if low > device_bytes else None

    def as_dict(self) -> dict[str, Any]:
        """Return everything as data that JSON can hold."""
        return asdict(self)

    def to_json(self) -> str:
        """Return everything as JSON.

        >>> Prediction.from_dict(json.loads(Prediction(peak_bytes=3).to_json())).peak_bytes
        3
        """
        return json.dumps(self.as_dict())

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Prediction:
        """Return what `as_dict` wrote.

        Raises:
            ValueError: the values are not those of a prediction.
        """
        return from_data(cls, values, "prediction", "Write it with `as_dict`.")


Predict = Callable[[Sequence[Any]], Prediction]
"""Predicts a step of one model and batch under technique Configs (`Microbatching(size=4)`, `Checkpointing()`, ...).

A `prediction.predictor.Predictor(module, batch, **trainer)` is one. It raises `ValueError` where settings cannot be
combined, or a technique refuses the model.
"""


def on_cuda(step: Allocations) -> CudaBytes:
    """Return what a CUDA device would hold in such steps."""
    found = replay(step, lasting=cublas_workspaces())
    return CudaBytes(allocated_bytes=found.allocated_bytes, reserved_bytes=found.reserved_bytes)


def prediction_of(
    step: Allocations, shared_names: Mapping[str, str], *, has_cuda: bool = False, **details: Any
) -> Prediction:
    """Return what a step amounts to.

    Args:
        step: all of it.
        shared_names: the names that modules share with their repetitions.
        has_cuda: whether to say what a CUDA device would hold.
        details: the fields of `Prediction` that the allocations do not tell.
    """
    peak = step.peak()
    by_place: dict[str, Counter[str]] = {}
    for module, by_category in peak.by_place.items():
        by_place.setdefault(shared_names.get(module, module), Counter()).update(by_category)
    return Prediction(
        peak_bytes=peak.peak_bytes,
        by_category=peak.by_category,
        by_module=peak.by_module,
        by_place={name: dict(split) for name, split in by_place.items()},
        timeline=step.timeline(),
        cuda=on_cuda(step) if has_cuda else None,
        **details,
    )
