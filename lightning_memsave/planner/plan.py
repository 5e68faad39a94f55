"""A plan: settings that were chosen for a budget, with what each saves and costs, and what they come to; as data."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_memsave.core.errors import defaults_of, setting_error
from lightning_memsave.core.plain_data import from_data
from lightning_memsave.core.report import LossClass, worst_loss_class
from lightning_memsave.core.units import format_bytes
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.techniques.microbatching import LabelCount, Microbatching
from lightning_memsave.techniques.registry import TECHNIQUES, Config, technique_of
from lightning_memsave.techniques.sparsity import UpdateSchedule

_FORMAT = 1
_ALIKE = 1.005  # so close a factor is told as none
_PARTS = {part.__name__: part for part in (LabelCount, UpdateSchedule)}


@dataclass(frozen=True, kw_only=True)
class PlanStep:
    """One setting of a plan."""

    technique: str
    """The stem."""
    setting: str
    """The setting as a user would write it."""
    saves_bytes: int | None
    """What the predicted peak would be higher by without it, all others kept; `None` where that cannot be run."""
    time_factor: float
    """Modelled, against the same step without it."""
    loss_class: LossClass
    reason: str
    """Why it is there."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings for a budget. `print(plan)` explains it, `MemSave(plan)` trains with it.

    Example:
        >>> from lightning_memsave import EarlyZeroGrad
        >>> plan = Plan(recipe="lossless", techniques=(EarlyZeroGrad(),), budget="1GiB", budget_bytes=2**30,
        ...             baseline_bytes=2**20, peak_bytes=2**19)
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    recipe: str
    """What it may do: the name of the recipe that it was made under."""
    techniques: tuple[Config, ...]
    """What is switched on, in the order in which it is applied."""
    budget: int | str
    """The budget as it was asked for."""
    budget_bytes: int
    meaning: str = ""
    """What a byte of the budget is on this device."""
    baseline_bytes: int
    """Predicted peak of the plain step."""
    baseline_by_category: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: int
    """Predicted peak of tracked tensors with the plan."""
    by_category: Mapping[str, int] = field(default_factory=dict)
    workspace_bytes: int = 0
    """What kernels take on top of it, where that was measured, and what recovery notes of a batch's start."""
    steps: tuple[PlanStep, ...] = ()
    next_step: str = ""
    """What would have come next, and why it was not needed."""
    measured_time_factor: float | None = None
    """Time of the planned step over that of the plain one, of real steps on CPU where it was planned with such."""
    gradient_noise: float | None = None
    """Noise that codes of activations bring into a gradient: its root mean square over the gradient's norm, measured on
    a copy of the module with the first batch; `None` where there are no codes, or it was not measured."""
    source: str = "fake"
    """How it was predicted: `"fake"` for shapes alone, `"measured"` from real steps."""
    flags: tuple[str, ...] = ()
    """What makes its figures uncertain."""
    num_predictions: int = 0

    @property
    def needed_bytes(self) -> int:
        """What is held against the budget."""
        return self.peak_bytes + self.workspace_bytes

    @property
    def loss_class(self) -> LossClass:
        """The worst of its steps; what was on already (in `techniques`, and no step) is not in it."""
        return worst_loss_class(step.loss_class for step in self.steps)

    @property
    def time_factor(self) -> float:
        """Against the plain step: measured where that is known, else modelled from its steps alone."""
        if self.measured_time_factor is not None:
            return self.measured_time_factor
        return math.prod(step.time_factor for step in self.steps)

    @property
    def factor(self) -> float:
        """Predicted peak of the plain step over that of the planned one, of tracked tensors both."""
        return (sum(self.baseline_by_category.values()) or self.baseline_bytes) / max(1, self.peak_bytes)

    @property
    def _saving(self) -> str:
        return f"{self.factor:.2f}x below the plain step" if self.factor > _ALIKE else "as the plain step"

    @property
    def _nothing_yet(self) -> set[str]:
        """What neither changes nor costs anything unless memory runs out."""
        waits = any(isinstance(t, Microbatching) and t.size == "auto" for t in self.techniques)
        return {"early_zero_grad", *(["microbatching"] if waits else [])}

    def as_recipe(self) -> Recipe:
        """Return the settings, for `MemSave`.

        Recovery, for a step that takes more than the budget, is a default that may step aside.
        """
        own = next((t for t in self.techniques if isinstance(t, Microbatching) and t.size == "auto"), None)
        return Recipe(self.recipe, self.techniques, by_default=() if own is None else (Microbatching,))

    def __str__(self) -> str:
        """Return the plan for people."""
        how = "about" if self.measured_time_factor is None else "measured"
        chosen = {step.technique for step in self.steps}
        fixed = [stem for t in self.techniques if (stem := technique_of(t).stem) not in chosen]
        told = "changes and costs" if self.measured_time_factor is None else "changes"
        untold = ", ".join(stem for stem in fixed if stem not in self._nothing_yet)
        lines = [
            f'Plan for a budget of {format_bytes(self.budget_bytes)} ("{self.recipe}"'
            + (f"; {self.meaning})" if self.meaning else ")"),
            f"  plain step: {format_bytes(self.baseline_bytes)}{_split(self.baseline_by_category)}",
            *(line for step in self.steps for line in _step_lines(step)),
            *([f"  besides: {', '.join(fixed)}"] if fixed else []),
            f"  planned step: {format_bytes(self.needed_bytes)}{_split(self.by_category)}"
            + (f", of which kernels {format_bytes(self.workspace_bytes)}" if self.workspace_bytes else ""),
            f"  {self._saving}, {self.loss_class}, time "
            f"{how} x{self.time_factor:.2f}{f' (without what {untold} {told})' if untold else ''}; "
            f"{self.num_predictions} predictions ({self.source})",
        ]
        if self.gradient_noise is not None:
            lines.append(f"  noise of a gradient by codes of activations: {self.gradient_noise:.1%} of its norm")
        lines += [f"  next: {self.next_step}"] if self.next_step else []
        return "\n".join([*lines, *(f"  note: {flag}" for flag in self.flags)])

    # ------------------------------------------------------------------ data
    def as_dict(self) -> dict[str, Any]:
        """Return everything as data that JSON can hold.

        Raises:
            ValueError: a setting is a function or a class, which data cannot hold.
        """
        kept = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        kept["techniques"] = {technique_of(t).stem: _settings(t) for t in self.techniques}
        kept["steps"] = [dataclasses.asdict(step) for step in self.steps]
        kept |= {key: dict(kept[key]) for key in ("baseline_by_category", "by_category")}
        return {"format": _FORMAT, **kept, "flags": list(self.flags)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Return the plan that `as_dict` wrote.

        Raises:
            ValueError: the values are not those of a plan, or a setting in it is wrong.
        """
        remedy = "Write it with `to_json`."
        try:
            found = dict(values)
            version = found.pop("format")
            if version != _FORMAT:
                raise setting_error("plan", f"must have format {_FORMAT}", version, "Make it again.")
            kinds = {technique.stem: technique.config for technique in TECHNIQUES}
            techniques = tuple(
                kinds[stem](**{key: _value(value) for key, value in settings.items()})
                for stem, settings in found.pop("techniques").items()
            )
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise setting_error("plan", "must be a plan as `Plan.to_json` writes it", str(error), remedy) from error
        return from_data(cls, found, "plan", remedy, techniques=techniques)

    def to_json(self) -> str:
        """Return everything as JSON, to keep or to send.

        Raises:
            ValueError: as `as_dict`.
        """
        return json.dumps(self.as_dict())

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote.

        Raises:
            ValueError: it is no JSON; as `from_dict`.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise setting_error(
                "plan", "must be what `Plan.to_json` wrote", text[:40], f"JSON says: {error}."
            ) from error
        return cls.from_dict(data)


def _split(by_category: Mapping[str, int]) -> str:
    largest = sorted(by_category.items(), key=lambda item: -item[1])
    return f" ({', '.join(f'{name} {format_bytes(size)}' for name, size in largest if size)})" if by_category else ""


def _step_lines(step: PlanStep) -> list[str]:
    saved = "cannot be left out" if step.saves_bytes is None else f"saves {format_bytes(step.saves_bytes)}"
    return [
        f"  {step.setting}: {saved}, time about x{step.time_factor:.2f}, {step.loss_class}",
        f"    {step.reason}",
    ]


def _settings(config: Any) -> dict[str, Any]:
    """Return what of a Config is not as by default, as plain values."""
    return {
        name: _plain(f"{type(config).__name__}.{name}", getattr(config, name))
        for name, default in defaults_of(config).items()
        if getattr(config, name) != default
    }


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(name, each) for each in value]
    if isinstance(value, Mapping):
        return {"items": {key: _plain(name, each) for key, each in value.items()}}
    if type(value).__name__ in _PARTS:
        return {"part": type(value).__name__, "settings": _settings(value)}
    raise setting_error(
        name, "cannot be written into a plan", value, "Name modules by patterns, or keep this plan in the program."
    )


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_value, value))
    if isinstance(value, dict) and "part" in value:
        return _PARTS[value["part"]](**{key: _value(each) for key, each in value["settings"].items()})
    if isinstance(value, dict):
        return {key: _value(each) for key, each in value["items"].items()}
    return value
