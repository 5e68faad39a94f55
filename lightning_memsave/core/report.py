"""The vocabulary of a measurement: categories, loss classes, what each technique did, and the report of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, NamedTuple

from lightning_memsave.core.plain_data import from_data
from lightning_memsave.core.units import format_bytes

LossClass = Literal["exact", "unbiased", "approximate", "changed"]
LOSS_CLASSES: tuple[LossClass, ...] = ("exact", "unbiased", "approximate", "changed")
"""Loss classes, from harmless to not: equal up to rounding; noise that is zero on average; noise with a small bias,
whose size is written down; optimises something else."""

CATEGORIES = ("weights", "gradients", "optimizer_state", "activations", "temporary", "data")
"""What a byte can be. Buffers and masks are weights, DDP buckets are gradients; `data` is the batch and whatever else
was alive before the step; `temporary` is all that none of the others claims."""


def worst_loss_class(classes: Iterable[LossClass]) -> LossClass:
    """Return the most harmful of `classes`; `"exact"` for none.

    >>> worst_loss_class(["exact", "changed", "unbiased"])
    'changed'
    """
    return max(classes, key=LOSS_CLASSES.index, default="exact")


def _nothing(*_: object) -> None:
    """Do nothing: the way back of what need not be undone."""


@dataclass(kw_only=True)
class Applied:
    """What one technique did to one run, and the way back."""

    technique: str
    """The stem, for example `"checkpointing"`."""
    summary: str
    """One line for people: what was changed, and where."""
    loss_class: LossClass = "exact"
    reasons: tuple[str, ...] = ()
    """Why the loss class is what it is; empty for `"exact"`."""
    restore: Callable[[], None] = field(default=_nothing, repr=False)
    """The way back; called once, by `undo`."""
    renew: Callable[[Applied], None] = field(default=_nothing, repr=False)
    """Brings the text up to date when parameters have come to an optimizer since."""

    def undo(self) -> None:
        """Restore what was changed. Calling it twice is safe."""
        self.restore()
        self.keep()

    def keep(self) -> None:
        """Leave the change in place for good; frees what the way back holds."""
        self.restore = self.renew = _nothing


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Live bytes through one step, at no more than a few hundred of its allocations and frees, the peak among them."""

    events: tuple[int, ...]
    """Number of the allocation or free, counted from the step's start. That is an order, not a time."""
    by_category: Mapping[str, tuple[int, ...]]
    """Bytes alive after each of `events`; has every name of `CATEGORIES`."""

    def __post_init__(self) -> None:
        if any(len(sizes) != len(self.events) for sizes in self.by_category.values()):
            raise ValueError("a timeline has as many bytes of each category as it has events")

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """The sum over the categories at each of `events`."""
        return tuple(map(sum, zip(*self.by_category.values(), strict=True)))


class Miss(NamedTuple):
    """How far a prediction was from what was measured."""

    fraction: float
    """Fraction of the predicted peak; above 0 where more was measured."""
    category: str
    """The one that was missed most."""
    category_bytes: int
    """Difference in bytes, with the same sign."""

    @classmethod
    def between(
        cls,
        predicted_bytes: int,
        predicted: Mapping[str, int],
        measured_bytes: int,
        measured: Mapping[str, int],
    ) -> Miss:
        """Return the miss of a predicted peak from a measured one, both with their categories."""
        misses = {name: size - predicted.get(name, 0) for name, size in measured.items()}
        category = max(misses, key=lambda name: abs(misses[name]), default="")
        return cls(measured_bytes / predicted_bytes - 1, category, misses.get(category, 0))

    @property
    def is_much(self) -> bool:
        """Whether people should be told of it: more than 3 %."""
        return abs(self.fraction) > 0.03

    def __str__(self) -> str:
        kind, size = self.category.replace("_", " "), format_bytes(abs(self.category_bytes))
        return f"{size} too {'little' if self.category_bytes > 0 else 'much'} {kind} predicted"


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Report of where the bytes of a training run went.

    `peak_bytes` is the highest total of any measured step and `by_category` its split at that moment, so the categories
    add up to `peak_bytes`. On CPU that is the sum of live tensor storages, each counted once; on CUDA it is the
    allocator's peak. A figure that was not measured is `None`.
    """

    peak_bytes: int | None = None
    by_category: Mapping[str, int] = field(default_factory=dict)
    workspace_bytes: int | None = None
    """Bytes that kernels took and gave back inside one operation, at the peak; `None` where not measured."""
    reserved_bytes: int | None = None
    """What the caching allocator held from the device; `None` on CPU."""
    evaluation_peak_bytes: int | None = None
    """The highest total in a validation batch that was measured; `None` without one."""
    budget_bytes: int | None = None
    """What a step was to fit into; `None` without a budget."""
    baseline_peak_bytes: int | None = None
    baseline_source: Literal["measured", "predicted"] | None = None
    """`None` also of a run that was read from a log which does not tell (CSV)."""
    baseline_by_category: Mapping[str, int] = field(default_factory=dict)
    baseline_step_seconds: float | None = None
    """Median wall time of the baseline's steps, where they were measured."""
    next_setting: str | None = None
    """The setting that would lower the peak most from here, as a user writes it; `None` where none is known."""
    next_peak_bytes: int | None = None
    """What is predicted for it."""
    predicted_peak_bytes: int | None = None
    """What was predicted for this run; `None` without a prediction."""
    predicted_by_category: Mapping[str, int] = field(default_factory=dict)
    gradient_noise: float | None = None
    """Noise that codes of activations bring into a gradient: its root mean square over the gradient's norm, measured on
    the first batch before training; `None` where it was not."""
    microbatch_size: int | None = None
    """Samples whose activations live at once; `None` when the batch is not split."""
    num_oom_recovered: int | None = None
    """How often a batch ran out of memory and was run again with less; `None` without recovery."""
    step_seconds: float | None = None
    """Median wall time of the steps that were not being measured."""
    samples_per_second: float | None = None
    """Median over the same steps; `None` where the size of a batch cannot be told."""
    num_steps_measured: int = 0
    applied: tuple[Applied, ...] = ()
    timeline: Timeline | None = field(default=None, repr=False)
    """The step with the highest peak, as the ledger saw it (on CUDA, without what only the allocator sees)."""

    @property
    def factor(self) -> float | None:
        """How many times smaller the peak is than the baseline's.

        >>> MemoryReport(peak_bytes=50, baseline_peak_bytes=400, baseline_source="measured").factor
        8.0
        """
        if not self.peak_bytes or self.baseline_peak_bytes is None:
            return None
        return self.baseline_peak_bytes / self.peak_bytes

    @property
    def step_ratio(self) -> float | None:
        """Time of a step, as a multiple of the baseline's; `None` where one of them was not measured."""
        if not self.step_seconds or not self.baseline_step_seconds:
            return None
        return self.step_seconds / self.baseline_step_seconds

    @property
    def miss(self) -> Miss | None:
        """How far the prediction was off; `None` without a measurement, or a prediction by category.

        >>> MemoryReport(peak_bytes=50, by_category={"weights": 20, "data": 30},
        ...              predicted_peak_bytes=40, predicted_by_category={"weights": 20, "data": 20}).miss
        Miss(fraction=0.25, category='data', category_bytes=10)
        """
        if not self.peak_bytes or not self.predicted_peak_bytes or not self.predicted_by_category:
            return None
        return Miss.between(self.predicted_peak_bytes, self.predicted_by_category, self.peak_bytes, self.by_category)

    @property
    def loss_class(self) -> LossClass:
        """The worst loss class that really happened."""
        return worst_loss_class(a.loss_class for a in self.applied)

    @property
    def loss_class_reasons(self) -> tuple[str, ...]:
        """Why, one line per technique that is not exact."""
        return tuple(reason for a in self.applied for reason in a.reasons)

    def __str__(self) -> str:
        """Return a table for people: the peak, what it was before, by category, and what was done about it."""
        return "\n".join(_lines(self))

    def metrics(self) -> dict[str, float]:
        """Return everything measured, under the names that every logger sees.

        >>> MemoryReport(peak_bytes=3, by_category={"weights": 3}).metrics()
        {'memsave/peak_bytes': 3, 'memsave/peak_weights_bytes': 3}
        """
        named: dict[str, float | None] = {"memsave/peak_bytes": self.peak_bytes}
        named |= {f"memsave/peak_{category}_bytes": size for category, size in self.by_category.items()}
        named |= {
            "memsave/workspace_bytes": self.workspace_bytes,
            "memsave/reserved_bytes": self.reserved_bytes,
            "memsave/evaluation_peak_bytes": self.evaluation_peak_bytes,
            "memsave/budget_bytes": self.budget_bytes,
            "memsave/predicted_peak_bytes": self.predicted_peak_bytes,
            "memsave/factor": self.factor,
            "memsave/gradient_noise": self.gradient_noise,
            "memsave/microbatch_size": self.microbatch_size,
            "memsave/num_oom_recovered": self.num_oom_recovered,
            "memsave/step_seconds": self.step_seconds,
            "memsave/samples_per_second": self.samples_per_second,
        }
        return {name: value for name, value in named.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """Return everything as data that JSON can hold; `from_dict` is the way back, but for the techniques' `undo`.

        >>> report = MemoryReport(peak_bytes=3, by_category={"weights": 3})
        >>> MemoryReport.from_dict(report.as_dict()) == report
        True
        """
        kept = {each.name: getattr(self, each.name) for each in fields(self)}
        applied = [{name: getattr(a, name) for name in _APPLIED} for a in self.applied]
        timeline = None if self.timeline is None else asdict(self.timeline)
        splits = {each: dict(getattr(self, each)) for each in _SPLITS}
        return {**kept, **splits, "applied": applied, "timeline": timeline}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MemoryReport:
        """Return the report that `as_dict` wrote.

        Raises:
            ValueError: the values are not those of a report.
        """
        return from_data(cls, values, "report", "Write it with `as_dict`.")


_APPLIED = ("technique", "summary", "loss_class", "reasons")
_SPLITS = ("by_category", "predicted_by_category", "baseline_by_category")
_IN_WORDS: Mapping[LossClass, str] = {
    "exact": "plain Lightning's result, but for rounding",
    "unbiased": "noise that averages to zero",
    "approximate": "noise with a small bias",
    "changed": "another result than plain Lightning",
}
_BAR = 24  # columns
_MUCH_TIME, _LITTLE_MEMORY, _SAME = 1.3, 1.2, 0.005


def _lines(report: MemoryReport) -> Iterator[str]:
    if report.peak_bytes is None:
        yield "no step was measured: measuring starts with the second step of the optimizer"
        return
    yield " | ".join(_headline(report))
    before, after = report.baseline_by_category, report.by_category
    largest = max([*before.values(), *after.values(), 1])
    for name in CATEGORIES:
        sizes = before.get(name, 0), after.get(name, 0)
        if any(sizes):
            then = f"{format_bytes(sizes[0]):>10} -> " if before else ""
            yield f"{name.replace('_', ' '):<16}{then}{format_bytes(sizes[1]):>10}  {_bar(*sizes, largest)}".rstrip()
    if report.evaluation_peak_bytes is not None and report.evaluation_peak_bytes > report.peak_bytes:
        yield f"validation takes more than training: {format_bytes(report.evaluation_peak_bytes)}"
    for applied in report.applied:
        yield f"{applied.technique.replace('_', ' ')}: {applied.summary}"
    reasons = report.loss_class_reasons
    yield f"{report.loss_class}: {_IN_WORDS[report.loss_class]}"
    yield from (f"  {reason}" for reason in reasons)
    if report.gradient_noise is not None:
        yield f"noise of a gradient: {report.gradient_noise:.1%} of its norm, measured on the first batch"
    yield from _verdicts(report.factor, report.step_ratio)
    if report.next_setting is not None:
        yield f"next: {report.next_setting} (predicted: {format_bytes(report.next_peak_bytes)})"


def _verdicts(factor: float | None, step_ratio: float | None) -> Iterator[str]:
    if factor is None:
        return
    if factor < 1 - _SAME:
        yield "these settings take more memory than plain Lightning here"
    elif factor < _LITTLE_MEMORY and step_ratio is not None and step_ratio > _MUCH_TIME:
        yield f"not worth it here: {factor:.2f}x less memory for {step_ratio:.2f}x the time of a step"


def _headline(report: MemoryReport) -> Iterator[str]:
    peak = f"peak {format_bytes(report.peak_bytes)}"
    if report.factor is None:
        yield peak
    else:
        source = f" (baseline {report.baseline_source})" if report.baseline_source else ""
        is_less = f"{report.factor:.2f}x less" if report.factor > 1 else f"{1 / report.factor:.2f}x more"
        is_less = "as plain Lightning" if abs(report.factor - 1) < _SAME else is_less
        yield f"{peak} instead of {format_bytes(report.baseline_peak_bytes)}, {is_less}{source}"
    yield report.loss_class
    if report.step_ratio is not None:
        yield f"step {report.step_ratio - 1:+.0%}"


def _bar(before: int, after: int, largest: int) -> str:
    """Draw what is left as full blocks, and what was saved as light ones."""
    full, all_of_it = (round(_BAR * size / largest) for size in (after, max(before, after)))
    return "█" * full + "░" * (all_of_it - full)
