"""Shared by all benchmarks: paired measurement, and rows that carry what they were measured on.

A row has memory, time and quality together. Times are CPU seconds on one thread, interleaved with the baseline's, so
that ratios mean something on a shared machine; peaks are the ledger's, with the kernels' workspace beside.
"""

from __future__ import annotations

import csv
import datetime
import functools
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn

from benchmarks.harness.rows import RESULTS
from lightning_memsave import Ledger, allocation_peak
from lightning_memsave.core.report import CATEGORIES

TURNS = "MEMSAVE_BENCH_TURNS"
"""Environment variable: the most turns that are timed of a setting, where a run has to be short."""


@dataclass
class Subject:
    """A model with everything that one training step needs, under one setting."""

    setting: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    step: Callable[[], object]
    loss: Callable[[], torch.Tensor] | None = None
    """The forward half of a step on the whole batch, where that is measured by itself."""


def environment() -> dict[str, str]:
    cpu = "unknown"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    # On instructions depend oneDNN's workspace, and times.
    found = torch.cpu.get_capabilities()
    special = [name for name in ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16") if found.get(name)]
    cpu = f"CPU {cpu}, {' '.join([torch.backends.cpu.get_cpu_capability(), *special])}"
    return {
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "python": platform.python_version(),
    }


@functools.cache
def _commit() -> str:
    """Return the commit of the checkout; a plus says that files differ from it, rows of benchmarks aside."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, check=False, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)benchmarks/results")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


def measure_memory(subject: Subject, warm_up: bool = True, workspace: bool = True) -> dict[str, int]:
    """Tracked peak by category, and the workspace inside kernels, of one step after a warm-up."""
    if warm_up:
        subject.step()
    with Ledger().watching(subject.model, [subject.optimizer], subject.batch) as ledger:
        subject.step()
    measured = ledger.measurement
    assert measured is not None
    sizes = {
        "peak_bytes": measured.peak_bytes,
        **{f"{category}_bytes": measured.by_category[category] for category in CATEGORIES},
    }
    if workspace:
        sizes["workspace_bytes"] = allocation_peak(subject.step, measured.held_bytes) - measured.peak_bytes
    return sizes


def measure_kept_bytes(subject: Subject) -> int:
    """Bytes that are alive after the forward pass and were not before: what waits for backward."""
    assert subject.loss is not None
    with Ledger().watching(subject.model, [subject.optimizer], subject.batch) as ledger:
        before = ledger.live_bytes
        loss = subject.loss()
        kept = ledger.live_bytes - before
    loss.backward()
    return kept


def turns(most: int) -> int:
    """How many steps of a setting are timed."""
    return min(most, int(os.environ.get(TURNS, most)))


def measure_cpu_seconds(subjects: list[Subject], repeats: int = 9, warm_up: bool = True) -> list[list[float]]:
    """CPU seconds of `repeats` steps of each subject, or of `TURNS` if that is less, taking turns."""
    repeats = turns(repeats)
    seconds: list[list[float]] = [[] for _ in subjects]
    for turn in range(0 if warm_up else 1, repeats + 1):
        for subject, taken in zip(subjects, seconds, strict=True):
            start = time.process_time()
            subject.step()
            if turn:  # the first is a warm-up
                taken.append(time.process_time() - start)
    return seconds


def compare(
    name: str,
    model_name: str,
    subjects: list[Subject],
    quality: Callable[[Subject], tuple[str, float]],
    details: Callable[[Subject], dict[str, Any]] = lambda _: {},
    repeats: int = 9,
) -> None:
    """Measure `subjects`, the first being the baseline, and write `results/<name>.csv`, with columns of `details`."""
    write_rows(name, measured_rows(name, model_name, subjects, quality, details, repeats))


def measured_rows(
    name: str,
    model_name: str,
    subjects: list[Subject],
    quality: Callable[[Subject], tuple[str, float]],
    details: Callable[[Subject], dict[str, Any]] = lambda _: {},
    repeats: int = 9,
) -> list[dict[str, Any]]:
    """The rows of `compare`."""
    torch.set_num_threads(1)
    memory = [measure_memory(subject) for subject in subjects]
    seconds = measure_cpu_seconds(subjects, repeats)
    rows = []
    for subject, sizes, taken in zip(subjects, memory, seconds, strict=True):
        quality_name, value = quality(subject)
        rows.append(
            {
                "benchmark": name,
                "model": model_name,
                "setting": subject.setting,
                **sizes,
                "factor": memory[0]["peak_bytes"] / sizes["peak_bytes"],
                **time_columns(taken, seconds[0]),
                "quality": quality_name,
                "quality_value": value,
                **details(subject),
                **environment(),
            }
        )
    return rows


def time_columns(taken: list[float], baseline: list[float]) -> dict[str, float]:
    """CPU seconds, and their ratio to the baseline's in the same turn."""
    p20, p50, p80 = _p20_p50_p80(taken)
    ratio20, ratio50, ratio80 = _p20_p50_p80([t / base for t, base in zip(taken, baseline, strict=True)])
    return {
        "cpu_seconds_p20": p20,
        "cpu_seconds_p50": p50,
        "cpu_seconds_p80": p80,
        "cpu_time_ratio_p20": ratio20,
        "cpu_time_ratio": ratio50,
        "cpu_time_ratio_p80": ratio80,
    }


def _p20_p50_p80(values: list[float]) -> list[float]:
    deciles = statistics.quantiles(values, n=10)
    return [deciles[1], statistics.median(values), deciles[7]]


def save_rows(name: str, rows: list[dict[str, Any]]) -> Path:
    """Write `results/<name>.csv`; a cell that a row lacks stays empty."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def on_this_device(name: str) -> str:
    """A name of results for the device at hand: rows of CUDA stand beside those of the CPU, not among them."""
    return f"{name}_cuda" if torch.cuda.is_available() else name


def ratio(whole: float | None, part: float | None) -> float | None:
    """How many times smaller; `None` where one of the two was not measured."""
    return None if whole is None or part is None else whole / part


def read_rows(name: str) -> list[dict[str, Any]]:
    """Rows of `results/<name>.csv`, as text; none where there is no such file yet."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def known_rows(name: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Bytes of `results/<name>.csv` as numbers, by setting and size of microbatch."""
    return {
        (row["setting"], int(row["microbatch"])): {
            key: float(value) if value else None for key, value in row.items() if key.endswith("_bytes")
        }
        for row in read_rows(name)
    }


def put_row(name: str, row: dict[str, Any], key: Iterable[str]) -> None:
    """Write one row of `results/<name>.csv`, in place of the one that is equal in the columns of `key`.

    A benchmark that writes each row when it is known can be stopped, and goes on where it was.
    """
    columns = tuple(key)
    rows = read_rows(name)
    same = [i for i, other in enumerate(rows) if all(str(row[c]) == other.get(c) for c in columns)]
    rows[same[0] if same else len(rows) :] = [row, *rows[same[0] + 1 :]] if same else [row]
    save_rows(name, rows)


def write_rows(name: str, rows: list[dict[str, Any]]) -> None:
    path = save_rows(name, rows)
    shown = ("setting", "peak_bytes", "factor", "cpu_time_ratio", "quality", "quality_value")
    for row in rows:
        print(name, *(f"{key}={row[key]}" for key in shown if key in row))
    print(f"-> {path}")
