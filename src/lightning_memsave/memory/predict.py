"""What is known of a step before it is run: its peak, what that is made of, and how sure that is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_memsave.core.report import CATEGORIES, Timeline
from lightning_memsave.memory.breakdown import TopTensor


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The peak of a whole training step: forward, backward, the optimizer's update, and what is held between steps.

    `by_category` has every name of `CATEGORIES` and adds up to `peak_bytes`; `by_module` does as well.
    """

    peak_bytes: int
    """As the ledger counts it on CPU: live tensor storages, each once."""
    workspace_bytes: int = 0
    """What kernels take and give back inside of operations, on top of the peak; 0 where it was not measured."""
    by_category: Mapping[str, int] = field(default_factory=dict)
    by_module: Mapping[str, int] = field(default_factory=dict)
    """By the innermost module that made or owns what is alive at the peak; largest first."""
    timeline: Timeline | None = None
    top: tuple[TopTensor, ...] = ()
    """The largest kinds of tensors at the peak."""
    source: Literal["fake", "measured"] = "fake"
    """`"fake"`: the step was run for its shapes alone. `"measured"`: it reads values, so small ones were run."""
    flags: tuple[str, ...] = ()
    """What makes the figure uncertain, one line each; empty where nothing is known to."""
    seconds: float | None = None
    """A modelled time of the step (roofline, one thread); good for comparing predictions, not as a promise."""

    def as_dict(self) -> dict[str, Any]:
        """Everything as data that JSON can hold."""
        return asdict(self)

    def to_json(self) -> str:
        """Everything as JSON."""
        return json.dumps(self.as_dict())


Predictor = Callable[[Sequence[Any]], Prediction]
"""Predicts a step of one model and batch under technique Configs (`Microbatching(size=4)`, `Checkpointing()`, ...).

`strategies.predicting.predictor(module, batch, ...)` makes one. It raises `ValueError` where settings cannot be
combined, or a technique refuses the model.
"""


def extended(first: Prediction, second: Prediction, sizes: tuple[int, int], wanted: int, why: str) -> Prediction:
    """What `wanted` samples take, on the line through two measurements.

    Args:
        first: with `sizes[0]` samples.
        second: with `sizes[1]` samples, more.
        sizes: of the two.
        wanted: samples.
        why: the flag.
    """

    def at(one: int, two: int) -> int:
        return max(0, round(one + (two - one) * (wanted - sizes[0]) / (sizes[1] - sizes[0])))

    split = {name: at(first.by_category[name], second.by_category[name]) for name in CATEGORIES}
    names = {**second.by_module, **first.by_module}
    modules = {name: at(first.by_module.get(name, 0), second.by_module.get(name, 0)) for name in names}
    return Prediction(
        peak_bytes=sum(split.values()),
        by_category=split,
        by_module=dict(sorted(modules.items(), key=lambda item: -item[1])),
        timeline=second.timeline if wanted == sizes[1] else None,
        top=second.top if wanted == sizes[1] else (),
        source="measured",
        flags=(*second.flags, why),
        seconds=None,
    )
