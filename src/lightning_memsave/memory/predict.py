"""What is known of a step before it is run: its peak, what that is made of, and how sure that is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lightning_memsave.core.report import Timeline


@dataclass(frozen=True, kw_only=True)
class TopTensor:
    """Tensors of one kind that are alive at the peak."""

    num_bytes: int
    """Of all of them."""
    count: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    """One of `CATEGORIES`."""
    line: str
    """The line of code that made them; empty for what was there before the step."""
    module: str = ""
    """The innermost module that ran, or that owns them; empty for none."""


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
