"""Runs from disk: what the loggers of a training wrote, as one kind of object.

A run is read from a W&B run folder, from the folder of Lightning's CSV logger, or from the JSON that `Run.to_json`
writes; what W&B has resumed lies in several folders and is one run. Figures are taken as they were logged: the report
is the row with the highest peak, and every other figure is the last one that was logged, so that a killed run keeps
what it had.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.plain_data import from_data
from lightning_memsave.core.report import CATEGORIES, MemoryReport, Timeline
from lightning_memsave.reporting.foreign_files import DamagedFileError, printable, read_bytes, read_settings
from lightning_memsave.reporting.settings import name_of
from lightning_memsave.reporting.wandb_file import read_log
from lightning_memsave.reporting.wandb_run import TIMELINE

FORMAT = "lightning-memsave run 1"
_REMEDY = (
    "Name a W&B run folder or its `.wandb` file, a folder with Lightning's `metrics.csv`, a JSON file of "
    "`Run.to_json`, or a folder that holds such runs."
)
_STEP = ("step", "trainer/global_step")  # Lightning's x-axis in the CSV file and in W&B
_NUM_MEASURED = "memsave/num_steps_measured"  # only in the row that repeats the final figures
_TIMELINE_PATH = f"{TIMELINE}_table.path"
_MOST_OF_A_TABLE = 2**24  # bytes
_NOT_A_METRIC = re.compile(r"epoch|step|trainer/.*|_.*|memsave/.*|lr-.*")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training, as far as it can be compared with another.

    Example:
        >>> run = Run(name="small", report=MemoryReport(peak_bytes=3), metrics={"test/accuracy": 0.5})
        >>> Run.from_json(run.to_json()) == run
        True
    """

    name: str
    report: MemoryReport
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The user's own figures, the last value of each."""
    config: Mapping[str, Any] = field(default_factory=dict)
    peaks: tuple[tuple[int, int], ...] = ()
    """Step and peak bytes of each measured step."""
    loss_class: str | None = None
    """The worst loss class that happened; `None` where the logger cannot say (CSV)."""
    applied: tuple[str, ...] = ()
    """What the techniques did, one line each."""

    def to_json(self) -> str:
        """Return the run as a JSON document that `read_runs` and `from_json` read."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return json.dumps({"format": FORMAT, **values, "report": self.report.as_dict()}, indent=1, default=str)

    @classmethod
    def from_json(cls, text: str) -> Run:
        """Return the run that `to_json` wrote.

        Raises:
            ValueError: the text is something else.
        """
        remedy = "Write it with `Run.to_json`."
        try:
            values = printable(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise setting_error("text", f"must be a {FORMAT!r}", text[:40], remedy) from error
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise setting_error("text", f"must be a {FORMAT!r}", text[:40], remedy)
        report, config = MemoryReport.from_dict(values.pop("report", None)), values.pop("config", {})
        if not isinstance(config, dict):
            raise setting_error("run.config", "must be a dictionary", config, remedy)
        return from_data(cls, values, "run", remedy, report=report, config=config)


def run_of(
    name: str,
    report: MemoryReport,
    metrics: Mapping[str, float] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Run:
    """Return a run of this process."""
    return Run(
        name=name,
        report=report,
        metrics={name: float(value) for name, value in (metrics or {}).items()},
        config=config or {},
        loss_class=report.loss_class,
        applied=tuple(f"{a.technique}: {a.summary}" for a in report.applied),
    )


def read_runs(paths: Iterable[Path]) -> list[Run]:
    """Read every run that `paths` name, in their order; runs of one name are numbered.

    A path may say what its run is called: `NAME=PATH`. A run without a name is called by its settings. Of a folder of
    runs, those that cannot be read are left out with a warning, unless they are all there is.

    Raises:
        ValueError: a path holds no run that can be read, or there is none at all.
    """
    named = [_with_name(path) for path in paths]
    found = [replace(run, name=name or run.name) for name, path in named for run in _read_all(path)]
    if not found:
        raise setting_error("run", "must be given", [], _REMEDY)
    times: dict[str, int] = {}
    runs = []
    for run in found:
        times[run.name] = times.get(run.name, 0) + 1
        number = times[run.name]
        runs.append(run if number == 1 else replace(run, name=f"{run.name} ({number})"))
    return runs


def _with_name(path: Path) -> tuple[str, Path]:
    name, _, where = str(path).partition("=")
    return (name, Path(where)) if name and where and not path.exists() else ("", path)


def _read_all(path: Path) -> list[Run]:
    runs, errors = [], []
    for files in _sources(path):
        try:
            runs.append(_read(files))
        except (ValueError, OSError) as error:
            errors.append(error)
    if errors and not runs:
        raise errors[0]
    for each in errors:
        warnings.warn(f"Left out: {printable(str(each))}", stacklevel=3)
    return runs


def _sources(path: Path) -> list[list[Path]]:
    """Return the files behind a path, run by run: the file itself, or what is found in a folder."""
    if path.is_file():
        return [[path]]
    for pattern in ("run-*.wandb", "metrics.csv"):  # the folder of one run
        if here := sorted(path.glob(pattern)):
            return [[each] for each in here]
    written = filter(_is_ours, path.glob("**/*.json"))
    inside = sorted([*path.glob("**/*run-*/run-*.wandb"), *path.glob("**/metrics.csv"), *written])
    if not inside:
        raise setting_error("run", "must be a file or folder with a run", str(path), _REMEDY)
    runs: dict[Any, list[Path]] = {}
    for each in inside:  # W&B names logs by the run's id
        runs.setdefault((each.parent.parent, each.name) if each.suffix == ".wandb" else each, []).append(each)
    return [sorted(files, key=_time) for files in runs.values()]


def _time(path: Path) -> str:
    """Return the time in a folder's name, be it `run-20261101_120000-id` or `offline-run-20261101_120000-id`."""
    return path.parent.name.partition("run-")[2]


def _is_ours(path: Path) -> bool:
    if not path.is_file():  # a pipe is none
        return False
    with contextlib.suppress(OSError), path.open("rb") as file:
        return FORMAT.encode() in file.read(100)
    return False


def _read(files: Sequence[Path]) -> Run:
    path = files[-1]
    if path.suffix not in (".wandb", ".csv", ".json"):
        raise setting_error("run", "must be a `.wandb`, `.csv` or `.json` file", str(path), _REMEDY)
    try:
        if path.suffix == ".json":
            return Run.from_json(read_bytes(path).decode())
        run = _read_wandb(files) if path.suffix == ".wandb" else _read_csv(path)
        return Run.from_json(run.to_json())  # which says what of it is no figure
    except OSError:
        raise
    except (DamagedFileError, UnicodeDecodeError, csv.Error, yaml.YAMLError) as error:
        raise setting_error("run", "must be complete and readable", f"{path} ({error})", _REMEDY) from error
    except Exception as error:  # files hold anything, and one of them must not end the comparison
        what = f"{error}" if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise setting_error("run", "must be a run", str(path), what) from error


def _read_wandb(paths: Sequence[Path]) -> Run:
    parts = []
    for path in paths:
        try:
            parts.append((path.parent / "files", read_log(path)))
        except (DamagedFileError, OSError) as error:
            if len(paths) == 1:
                raise
            warnings.warn(f"Left out of a run that was resumed: {path} ({error})", stacklevel=5)
    if not parts:
        raise DamagedFileError("none of its parts can be read")
    logs = [log for _, log in parts]
    name = logs[-1].name or paths[-1].stem
    is_named = name not in (paths[-1].stem, paths[-1].stem.removeprefix("run-"))  # else it is the run's id
    run = _from_rows(name, is_named, [row for log in logs for row in log.history], logs[-1].config)
    summary = {name: value for log in logs for name, value in log.summary.items()}
    tables = [(files, str(row[_TIMELINE_PATH])) for files, log in parts for row in log.history if _TIMELINE_PATH in row]
    return replace(
        run,
        report=replace(
            run.report,
            timeline=_timeline(*tables[-1]) if tables else None,
            baseline_source=summary.get("memsave/baseline_source"),
        ),
        loss_class=summary.get("memsave/loss_class"),
        applied=summary.get("memsave/applied", ()),
    )


def _timeline(folder: Path, name: str) -> Timeline | None:
    """Read the chart's table from a file beside the log, where it still is."""
    lines: dict[str, dict[int, int]] = {category: {} for category in CATEGORIES}
    try:
        for event, category, num_bytes in json.loads(read_bytes(folder / name, _MOST_OF_A_TABLE, folder))["data"]:
            lines[category][event] = num_bytes
        by_category = {category: list(line.values()) for category, line in lines.items()}
        values = {"events": list(lines[CATEGORIES[0]]), "by_category": by_category}
        return from_data(Timeline, values, "timeline", _REMEDY)
    except (OSError, KeyError, TypeError, ValueError, RecursionError):  # a chart more or less
        return None


def _read_csv(path: Path) -> Run:
    lines = csv.DictReader(io.StringIO(read_bytes(path).decode(), newline=""), restkey="")
    rows = [{name: _number(text) for name, text in row.items() if name and text} for row in lines]
    if not any("step" in row for row in rows):
        raise DamagedFileError("no column `step` with figures, as Lightning's CSV logger writes it")
    folder = path.parent.resolve()
    name = f"{folder.parent.name}/{folder.name}"
    is_named = re.fullmatch(r"lightning_logs/version_\d+", name) is None  # else it is Lightning's
    return _from_rows(name, is_named, rows, read_settings(path.with_name("hparams.yaml")))


def _number(text: object) -> Any:
    """Return a number; whole ones stay whole, as a float holds only 53 bits."""
    try:
        return int(str(text)) if re.fullmatch(r"-?\d+", str(text)) else float(str(text))
    except ValueError:
        return text


def _without_prefix(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return rows as of a logger without the `prefix` that Lightning's put before each name, and a hyphen."""
    ours = (name for row in rows for name in row if name.endswith("-memsave/peak_bytes"))
    if (found := next(ours, None)) is None:
        return rows
    prefix = found.removesuffix("memsave/peak_bytes")
    return [{name.removeprefix(prefix): value for name, value in row.items()} for row in rows]


def _from_rows(name: str, is_named: bool, rows: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> Run:
    rows = _without_prefix(rows)
    last: dict[str, Any] = {}
    for row in rows:
        last.update((key, value) for key, value in row.items() if _is_figure(value))
    measured = [row for row in rows if _is_measured(row)]
    steps = [row for row in measured if _NUM_MEASURED not in row]
    report = MemoryReport(
        workspace_bytes=last.get("memsave/workspace_bytes"),
        reserved_bytes=last.get("memsave/reserved_bytes"),
        evaluation_peak_bytes=last.get("memsave/evaluation_peak_bytes"),
        budget_bytes=last.get("memsave/budget_bytes"),
        predicted_peak_bytes=last.get("memsave/predicted_peak_bytes"),
        microbatch_size=last.get("memsave/microbatch_size"),
        num_oom_recovered=last.get("memsave/num_oom_recovered"),
        step_seconds=last.get("memsave/step_seconds"),
        samples_per_second=last.get("memsave/samples_per_second"),
        num_steps_measured=last.get(_NUM_MEASURED, len(steps)),
    )
    if measured:
        highest = max(measured, key=lambda row: int(row["memsave/peak_bytes"]))
        held = [row for row in measured if "memsave/factor" in row]  # a baseline may be known at the end only
        report = replace(
            report,
            peak_bytes=int(highest["memsave/peak_bytes"]),
            by_category={c: int(highest[f"memsave/peak_{c}_bytes"]) for c in CATEGORIES},
            # Exact: both are whole numbers.
            baseline_peak_bytes=round(held[-1]["memsave/factor"] * held[-1]["memsave/peak_bytes"]) if held else None,
        )
    metrics = {key: value for key, value in last.items() if not _NOT_A_METRIC.fullmatch(key) and math.isfinite(value)}
    if not is_named:
        name = name_of(config, any(key.startswith("memsave/") for key in last)) or name
    return Run(name=name, report=report, metrics=metrics, config=config, peaks=tuple(map(_peak, steps)))


def _is_figure(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def _is_measured(row: Mapping[str, Any]) -> bool:
    return all(f"memsave/peak_{category}_bytes" in row for category in CATEGORIES)


def _peak(row: Mapping[str, Any]) -> tuple[int, int]:
    return int(next((row[name] for name in _STEP if name in row), 0)), int(row["memsave/peak_bytes"])
