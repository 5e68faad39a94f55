"""Run benchmarks, and hold their rows against the committed ones.

    python -m benchmarks.run bench --jobs 2       # memory and time of each technique, on the CPU; --turns 2: faster
    python -m benchmarks.run all --jobs 2         # the same, with every size, depth and paper: some hours
    python -m benchmarks.run quality              # the next part of each study that trains in parts
    python -m benchmarks.run gpu                  # what says something new on CUDA; rows in results/*_cuda.csv

Afterwards tracked bytes must be those of the commit, and the allocator's within half a per cent; exit status 1
otherwise. Where the CPU has other instructions, tracked bytes may be 2 % off, as another kernel may not give the bits
that a recomputation needs, and the allocator's are not compared: they hold the workspace of kernels.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness.measurement import TURNS

HERE = Path(__file__).parent
FOLDERS = {"bench": "memory_time", "cuda": "memory_time", "quality": "quality"}
"""Folders of scripts, by the first word of their name."""
FIRST = (
    *("bench_dynamicconv", "bench_activation_compression", "bench_wrn", "bench_checkpointing"),
    *("bench_checkpointing_budget", "bench_papers"),
)
"""Long scripts, which start first. DynamicConv, checkpointing and papers hold many gigabytes: others lie between."""
PARTS = {
    "bench_checkpointing": ("blocks", "resnet1000", "codecs"),
    "bench_dynamicconv": ("--sizes", "8"),
    "bench_papers": ("chen-lstm", "mesa-deit-ti"),
    "bench_wrn": ("--sizes", "4"),
}
"""What `bench` runs of those that take longest."""
STUDIES = {"quality_wrn": ("--size", "large"), "quality_dynamicconv": ()}
"""In parts; the other `quality_*.py`, and other sizes, are run by name, from minutes to an hour each."""
GPU = ("cuda_kernels", "cuda_steps", "bench_wrn", "bench_dynamicconv")
KEY = (
    *("case", "model", "setting", "implementation", "sparsity", "microbatch", "seed"),
    *("n", "budget", "budget_bytes", "pixels", "num_train", "epochs", "num_checkpoints"),
    *("package", "version", "selection", "room"),
)
OF_ALLOCATOR = ("allocated_bytes", "workspace_bytes", "allocation_bytes", "reserved_bytes")
MOST_OFF = 0.005
MOST_OFF_ELSEWHERE = 0.02
"""Of tracked bytes, on a CPU with other instructions."""
Row = dict[str, str]


def scripts(what: str) -> list[str]:
    """Names of scripts in the order they are started."""
    if what == "gpu":
        return list(GPU)
    if what == "quality":
        return list(STUDIES)
    return [*FIRST, *sorted(path.stem for path in (HERE / "memory_time").glob("bench_*.py") if path.stem not in FIRST)]


def run(name: str, arguments: Sequence[str] = ()) -> bool:
    start = time.monotonic()
    module = f"benchmarks.{FOLDERS[name.partition('_')[0]]}.{name}"
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=HERE.parent)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    minutes, cpu_minutes = (time.monotonic() - start) / 60, (used.ru_utime + used.ru_stime) / 60
    print(f"{name}: {minutes:.1f} minutes, {cpu_minutes:.1f} of CPU, exit status {process.returncode}", flush=True)
    return process.returncode == 0


def committed(path: Path) -> list[Row]:
    """The rows of a file in HEAD; none where there is no such file."""
    shown = subprocess.run(
        ["git", "show", f"HEAD:{path.relative_to(HERE.parent).as_posix()}"],
        check=False,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
    )
    return list(csv.DictReader(io.StringIO(shown.stdout)))


def differences(before: list[Row], after: list[Row]) -> list[str]:
    """Bytes that are not reproduced, row by row, and rows that are gone.

    Plans for a budget follow the machine's speeds; they have to keep it. A row that is new has nothing to differ from.

    >>> differences([{"setting": "a", "peak_bytes": "5"}], [{"setting": "a", "peak_bytes": "6"}])
    ['a: peak_bytes 6, committed 5']
    >>> differences([{"setting": "a", "allocated_bytes": "1000"}], [{"setting": "a", "allocated_bytes": "1004"}])
    []
    >>> before = {"setting": "a", "peak_bytes": "5", "allocated_bytes": "8", "device": "CPU x, AVX2"}
    >>> differences([before], [{**before, "allocated_bytes": "6", "device": "CPU y, AVX512 avx512_bf16"}])
    []
    >>> before = {"setting": "a", "peak_bytes": "500", "device": "CPU x, AVX2"}
    >>> differences([before], [{**before, "peak_bytes": "505", "device": "CPU y, AVX512"}])
    []
    >>> differences([before], [{**before, "peak_bytes": "515", "device": "CPU y, AVX512"}])
    ['a: peak_bytes 515, committed 500']
    >>> differences([], [{"setting": "budget 2 MiB", "budget_bytes": "9", "allocation_bytes": "10"}])
    ['budget 2 MiB 9: allocation_bytes 10 is over the budget']
    >>> differences([{"setting": "a"}, {"setting": "b"}], [{"setting": "b"}])
    ['a: no row any more']
    """
    known = {_key(row): row for row in before if not _is_plan(row)}
    found = [f"{_name(row)}: no row any more" for key, row in known.items() if key not in {_key(row) for row in after}]
    for row in after:
        if _is_plan(row):
            column = next((name for name in ("allocation_bytes", "peak_bytes") if row.get(name)), None)
            if column and float(row[column]) > float(row["budget_bytes"]):
                found.append(f"{_name(row)}: {column} {row[column]} is over the budget")
            continue
        other = known.get(_key(row), {})
        for column, value in row.items():
            expected = other.get(column)
            if not column.endswith("_bytes") or not value or not expected or column in KEY:
                continue
            is_elsewhere = _has_other_instructions(row, other)
            if column in OF_ALLOCATOR:
                if is_elsewhere:
                    continue
                most_off = MOST_OFF
            else:
                most_off = MOST_OFF_ELSEWHERE if is_elsewhere else 0
            whole = max(float(row.get("peak_bytes") or expected), float(expected))
            if abs(float(value) - float(expected)) > most_off * whole:
                found.append(f"{_name(row)}: {column} {value}, committed {expected}")
    return found


def _key(row: Row) -> tuple[str, ...]:
    python = row["python"] if row.get("package") else ""  # elsewhere it is no other benchmark
    return (*(row.get(column, "") for column in KEY), python)


def _name(row: Row) -> str:
    return " ".join(filter(None, _key(row)))


def _has_other_instructions(row: Row, other: Row) -> bool:
    """Whether both rows tell those of their CPU, behind its name, and they differ."""
    told = [each.get("device", "").partition(", ")[2] for each in (row, other)]
    return all(told) and told[0] != told[1]


def _is_plan(row: Row) -> bool:
    return bool(row.get("budget_bytes"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bench", "all", "quality", "gpu", "check"))
    parser.add_argument("--jobs", type=int, default=1, help="scripts at the same time")
    parser.add_argument("--turns", type=int, help="steps of a setting that are timed, at most; 2 or more")
    options = parser.parse_args()
    if options.turns is not None:
        if options.turns < 2:
            parser.error("--turns: times have quantiles, which take two or more")
        os.environ[TURNS] = str(options.turns)
    if options.what == "gpu":
        import torch

        if not torch.cuda.is_available():
            parser.error("needs a CUDA device; `bench` runs everything on the CPU")
        # torch's allocator holds cuBLAS' workspace, up to 32 MiB, which would hide what is left of a small model.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    names = [] if options.what == "check" else scripts(options.what)
    with ThreadPoolExecutor(options.jobs) as pool:
        parts = {"bench": PARTS, "quality": STUDIES}.get(options.what, {})
        arguments = [parts.get(name, ()) for name in names]
        outcomes = dict(zip(names, pool.map(run, names, arguments), strict=True))
    failed = [name for name, went_well in outcomes.items() if not went_well]
    found, num_new, num_elsewhere = [], 0, 0
    for path in sorted((HERE / "results").glob("*.csv")):
        with path.open() as file:
            rows = list(csv.DictReader(file))
        before = committed(path)
        num_new += len({_key(row) for row in rows} - {_key(row) for row in before})
        known = {_key(row): row for row in before}
        num_elsewhere += sum(_has_other_instructions(row, known.get(_key(row), {})) for row in rows)
        found += [f"{path.name}: {text}" for text in differences(before, rows)]
    print(*[f"failed: {name}" for name in failed], *found, sep="\n")
    print("bytes are those of the commit" if not found else f"{len(found)} figures differ from the commit", end="; ")
    print(f"{num_new} rows are new", end="; " if num_elsewhere else "\n")
    if num_elsewhere:
        print(f"{num_elsewhere} are of a CPU with other instructions, where bytes may be 2 % off")
    return int(bool(failed or found))


if __name__ == "__main__":
    sys.exit(main())
