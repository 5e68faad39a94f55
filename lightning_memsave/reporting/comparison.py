"""What is said about several runs: the rows of a table, the Pareto front, and where their settings differ.

Terminal and page show the same rows, so they show the same numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.core.units import format_bytes
from lightning_memsave.reporting.runs import Run
from lightning_memsave.reporting.settings import changes_nothing, differences, without_seeds

_BETTER_WHEN_LOWER = {
    "loss",
    "logloss",
    "entropy",
    "ce",
    "nll",
    "bce",
    "ece",
    "bpb",
    "bpc",
    "mape",
    "fvd",
    "lpips",
    "error",
    "err",
    "perplexity",
    "ppl",
    "mse",
    "mae",
    "rmse",
    "wer",
    "cer",
    "fid",
}
_NUMBER = re.compile(r" \(\d+\)$")  # of runs that have one name
_STAGES = ("test", "val", "valid", "validation")
_QUALITY = ("acc", "accuracy", "f1", "auroc", "auc", "iou", "miou", "map", "bleu", "rouge", "psnr", "r2")


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """One figure of every run."""

    key: str
    """Name for programs, with the unit."""
    heading: str
    """Name for people."""
    values: tuple[float | str | None, ...]
    """Values as measured, nothing rounded; `None` where a run has none."""
    texts: tuple[str, ...]
    """Rounded."""


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The metric that memory is held against."""

    name: str
    lower_is_better: bool

    def of(self, run: Run) -> float | None:
        """Return its last value in a run; `None` where it is no number."""
        value = run.metrics.get(self.name)
        return value if value is not None and math.isfinite(value) else None

    @property
    def direction(self) -> str:
        """Direction that is better, in words."""
        return "lower is better" if self.lower_is_better else "higher is better"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs side by side; those without a baseline of their own are held against the first."""

    runs: tuple[Run, ...]
    quality: Quality | None
    rows: tuple[ComparisonRow, ...]
    front: tuple[int, ...]
    """Positions of the runs that no other beats in both peak and quality, from the smallest peak up."""
    differences: Mapping[str, tuple[str, ...]]
    """Settings that are not the same in all runs; of techniques, those that a run has set."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What has to be known to read the figures, a sentence each."""
        notes = []
        if all(run.report.factor is None for run in self.runs):
            notes.append('No baseline: add one by training once with `MemSave("measure")` and naming that run first.')
        if self.quality is not None and sum(self.quality.of(run) is not None for run in self.runs) > 1:
            settings = {(without_seeds(run.config) or _NUMBER.sub("", run.name), run.applied) for run in self.runs}
            if len(settings) == len(self.runs):
                what = f"differences in {self.quality.name} are more than noise"
                notes.append(f"Each setting was run once, with one seed, so whether {what} is not known.")
        return tuple(notes)

    def to_json(self) -> str:
        """Return every figure as measured, for programs."""
        runs = [
            {
                "name": run.name,
                **{row.key: row.values[position] for row in self.rows},
                "on_front": position in self.front,
                "settings": {name: values[position] for name, values in self.differences.items()},
            }
            for position, run in enumerate(self.runs)
        ]
        quality = None if self.quality is None else {"metric": self.quality.name, "better": self.quality.direction}
        return json.dumps({"quality": quality, "runs": runs}, indent=1)


def compare(runs: Sequence[Run], metric: str | None = None, better: str | None = None) -> Comparison:
    """Hold runs against each other.

    Args:
        runs: at least one; the baseline of those that have none is the first that changes nothing, else the first.
        metric: what quality is; by default the first of the usual names that most runs have logged.
        better: `"higher"` or `"lower"`; by default, what the metric's name says (a loss is better when lower).

    Raises:
        ValueError: no run has logged `metric`.
    """
    plain = [run for run in runs if run.report.peak_bytes is not None and changes_nothing(run.config)]
    baselines = plain or (runs[:1] if len(runs) > 1 else [])
    if baselines:
        runs = [_against(run, run if run in plain else baselines[0]) for run in runs]
    name = _choose(runs, metric)
    quality = None
    if name is not None:
        lower = is_better_when_lower(name) if better is None else better == "lower"
        quality = Quality(name=name, lower_is_better=lower)
    return Comparison(
        runs=tuple(runs),
        quality=quality,
        rows=tuple(_rows(runs, quality, baselines[0] if baselines else runs[0])),
        front=_front(runs, quality),
        differences=differences([run.config for run in runs]),
    )


def _against(run: Run, baseline: Run) -> Run:
    peak_bytes = baseline.report.peak_bytes
    if None in (peak_bytes, run.report.peak_bytes) or run.report.baseline_peak_bytes is not None:
        return run
    return replace(run, report=replace(run.report, baseline_peak_bytes=peak_bytes, baseline_source="measured"))


# ------------------------------------------------------------------ quality
def is_better_when_lower(metric: str) -> bool:
    """Return whether a metric's name says that less of it is better.

    >>> [is_better_when_lower(name) for name in ("val/loss", "valLoss", "val/cross_entropy", "val/accuracy")]
    [True, True, True, False]
    """
    return not _BETTER_WHEN_LOWER.isdisjoint(_words(metric))


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def _choose(runs: Sequence[Run], wanted: str | None) -> str | None:
    times: dict[str, int] = {}
    for run in runs:
        for name in run.metrics:
            times[name] = times.get(name, 0) + 1
    if wanted is not None:
        if wanted not in times:
            raise setting_error("metric", "must be one that a run has logged", wanted, f"There are {sorted(times)}.")
        return wanted

    def rank(name: str) -> tuple[bool, bool, bool, bool, int]:
        words, is_rare = set(_words(name)), 2 * times[name] <= len(runs)
        return is_rare, words.isdisjoint(_STAGES), words.isdisjoint(_QUALITY), "test" not in words, -times[name]

    usual = [name for name in times if not {*_words(name)}.isdisjoint({*_QUALITY, *_BETTER_WHEN_LOWER})]
    return min(usual, key=rank, default=None)


def _front(runs: Sequence[Run], quality: Quality | None) -> tuple[int, ...]:
    """Return the positions of the runs that no other beats in both peak and quality, the smallest peak first."""
    if quality is None:
        return ()
    points = []
    for position, run in enumerate(runs):
        value = quality.of(run)
        if value is not None and run.report.peak_bytes is not None:
            points.append((run.report.peak_bytes, value if quality.lower_is_better else -value, position))
    front: list[int] = []
    best: tuple[float, float] | None = None
    for peak, value, position in sorted(points):
        if best is None or value < best[1] or (peak, value) == best:
            front.append(position)
            best = peak, value
    return tuple(front)


# ------------------------------------------------------------------ rows
def _rows(runs: Sequence[Run], quality: Quality | None, baseline: Run) -> Iterable[ComparisonRow]:
    def row(key: str, heading: str, value: Callable[[Run], Any], text: Callable[[Any], str] = str) -> ComparisonRow:
        values = tuple(map(value, runs))
        texts = tuple("n/a" if v is None else text(v) for v in values)
        return ComparisonRow(key=key, heading=heading, values=values, texts=texts)

    def figure(name: str, heading: str, text: Callable[[Any], str] = str) -> ComparisonRow:
        return row(name, heading, lambda run: getattr(run.report, name), text)

    def category(name: str) -> ComparisonRow:
        heading = name.replace("_", " ")
        return row(f"{name}_bytes", heading, lambda run: run.report.by_category.get(name), format_bytes)

    seconds = baseline.report.step_seconds
    yield figure("peak_bytes", "peak", format_bytes)
    yield figure("peak_bytes", "peak bytes")
    optional = [
        figure("factor", "factor", "{:.2f}x".format),
        *([] if quality is None else [row(quality.name, quality.name, quality.of, _short)]),
        row("step_time_ratio", "step time", lambda run: _ratio(run.report.step_seconds, seconds), "{:.2f}x".format),
        row("loss_class", "loss class", lambda run: run.loss_class),
        *map(category, CATEGORIES),
        figure("baseline_source", "baseline"),
        figure("budget_bytes", "budget", format_bytes),
        figure("predicted_peak_bytes", "predicted peak", format_bytes),
        figure("workspace_bytes", "workspace", format_bytes),
        figure("reserved_bytes", "reserved", format_bytes),
        figure("evaluation_peak_bytes", "validation peak", format_bytes),
        figure("microbatch_size", "microbatch"),
        figure("num_oom_recovered", "recoveries"),
        figure("step_seconds", "seconds per step", _short),
        figure("samples_per_second", "samples per second", _short),
    ]
    yield from (each for each in optional if any(value is not None for value in each.values))


def _ratio(value: float | None, baseline: float | None) -> float | None:
    return None if value is None or not baseline else value / baseline


def _short(value: float) -> str:
    return f"{value:.4g}"
