"""The settings of sparse training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lightning_memsave.core.errors import check_unused, setting_error
from lightning_memsave.techniques.sparsity.patterns import Modules, group_of

METHODS = ("static", "gradual", "set", "rigl", "dsr")
INITIALS = ("random", "magnitude", "snip")
DISTRIBUTIONS = ("uniform", "erk", "global")


@dataclass(frozen=True, kw_only=True)
class UpdateSchedule:
    """When the pattern changes, and by how much.

    Raises:
        ValueError: a number out of its range.
    """

    every: int = 100
    """Optimizer steps between two updates."""
    fraction: float = 0.3
    """How many of the live weights an update moves; `"rigl"` lets it fall to zero along a cosine."""
    until: int | float = 0.75
    """When updates end: a number of steps (an integer), or a fraction of the run (a float)."""

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise setting_error(
                "UpdateSchedule.every", "must be a positive integer", self.every, "Count optimizer steps."
            )
        if not 0 < self.fraction < 1:
            raise setting_error("UpdateSchedule.fraction", "must be between 0 and 1", self.fraction, "Try 0.3.")
        if not self.until > 0 or (isinstance(self.until, float) and self.until > 1):
            raise setting_error(
                "UpdateSchedule.until",
                "must be a positive number of steps, or a fraction of the run up to 1.0",
                self.until,
                "An integer counts steps.",
            )


@dataclass(frozen=True, kw_only=True)
class Sparsity:
    """Settings of sparse training.

    Raises:
        ValueError: a setting out of its range, or two that exclude each other; at the start of training, a selection
            that matches no layer, or that asks for tied weights.
    """

    sparsity: float | str = 0.9
    """The fraction of weights that are zero, or `"2:4"`: two live ones in each group of four along a row."""
    method: Literal["static", "gradual", "set", "rigl", "dsr"] = "static"
    """`"static"`: the pattern stays. `"gradual"`: starts dense, the smallest go along a cubic curve. `"set"`: the
    smallest go, random ones grow. `"rigl"`: those with the largest gradient grow. `"dsr"`: one threshold for all
    layers, and values move between layers."""
    initial: Literal["random", "magnitude", "snip"] = "random"
    """Choice of the weights that live at the start. `"snip"`: those with the largest |weight x gradient| in the first
    step, which is dense. A model that is as sparse already keeps its pattern."""
    distribution: Literal["uniform", "erk", "global"] = "uniform"
    """How density is shared between layers: the same for all, by Erdos-Renyi-Kernel, or one threshold for all."""
    schedule: UpdateSchedule = field(default_factory=UpdateSchedule)
    """When and how far the pattern changes; not for `"static"`."""
    modules: Modules = None
    """Layers: a class, a pattern (`*`, `?`) for class names or qualified names, a function of (name, module), or
    `None` for every Linear, Conv, Embedding and transformers' Conv1D."""
    min_size: int = 2048
    """Weights with fewer elements stay dense."""
    seed: int = 0
    """Seed of random patterns and growth; torch's generators are left alone."""

    def __post_init__(self) -> None:
        self._check_sparsity()
        for name, known in (("method", METHODS), ("initial", INITIALS), ("distribution", DISTRIBUTIONS)):
            if getattr(self, name) not in known:
                raise setting_error(
                    f"Sparsity.{name}",
                    f"must be one of {', '.join(map(repr, known))}",
                    getattr(self, name),
                    f"The default is {known[0]!r}.",
                )
        if self.method == "static":
            check_unused(self, "schedule", "a method by which weights move")
        if self.group is not None and (self.method, self.distribution) != ("static", "uniform"):
            raise setting_error(
                "Sparsity.sparsity",
                'is possible in groups with method="static" and distribution="uniform" only',
                (self.sparsity, self.method, self.distribution),
                "Use a fraction instead, for example `sparsity=0.5`.",
            )
        if self.initial == "snip" and (self.method != "static" or self.group is not None):
            raise setting_error(
                "Sparsity.initial",
                'may be "snip" with method="static" and a fraction only',
                (self.initial, self.method, self.sparsity),
                'Use `initial="magnitude"`.',
            )

    def _check_sparsity(self) -> None:
        group = self.group
        if isinstance(self.sparsity, str):
            is_right = group is not None and 0 < group[0] < group[1]
        else:
            is_right = isinstance(self.sparsity, (int, float)) and 0 <= self.sparsity < 1
        if not is_right or isinstance(self.sparsity, bool):
            raise setting_error(
                "sparsity",
                'must be a fraction from 0 to below 1, or groups such as "2:4"',
                self.sparsity,
                "`sparsity=0.9` keeps a tenth of the weights.",
            )

    @classmethod
    def from_shorthand(cls, value: object) -> Sparsity:
        """`sparsity=0.9` is `Sparsity(sparsity=0.9)`; `"2:4"` likewise."""
        return cls(sparsity=value)  # type: ignore[arg-type]  # checked in __post_init__

    @property
    def group(self) -> tuple[int, int] | None:
        """(2, 4) for `"2:4"`."""
        return group_of(self.sparsity)

    @property
    def density(self) -> float:
        """The fraction that lives in the end."""
        if self.group is not None:
            return self.group[0] / self.group[1]
        return 1 - float(self.sparsity)

    @property
    def starts_dense(self) -> bool:
        """Whether every weight lives until the first update."""
        return self.method == "gradual" or self.initial == "snip"

    @property
    def is_updated(self) -> bool:
        """Whether the pattern changes during training."""
        return self.method != "static" or self.initial == "snip"

    @property
    def rows(self) -> tuple[str, ...]:
        """Its settings with rows of their own in the compatibility table."""
        return ("changing patterns",) if self.is_updated else ()

    @property
    def resizes(self) -> bool:
        """Whether layers change their number of values during training."""
        return self.method in ("gradual", "dsr") or self.initial == "snip"
