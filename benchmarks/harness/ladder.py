"""Settings by size of microbatch, each a row as soon as it is measured: `bench_wrn.py` and `bench_dynamicconv.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.harness.measurement import environment, known_rows, on_this_device, put_row, ratio

BASELINE, SAME_SIZE = "baseline", "microbatch alone"


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """What is measured."""

    name: str
    """Of the file in `results/`."""
    model: str
    num_samples: int
    """In the whole batch."""
    sizes: tuple[int, ...]
    """Of microbatches."""
    combined: Mapping[str, dict[str, Any]]
    """Arguments of `MemSave`, for each size; `SAME_SIZE` among them."""
    alone: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """The same, for the whole batch."""
    microbatch: Callable[[int], Any] = int
    """The argument of `MemSave`."""
    measure: Callable[[dict[str, Any], int], dict[str, Any]]
    """(arguments, size) -> columns."""

    def rows(self, sizes: tuple[int, ...]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """(setting, size of microbatch, arguments); the baseline first, and each size's own first."""
        yield BASELINE, self.num_samples, {"recipe": "measure"}
        for name, arguments in self.alone.items():
            yield name, self.num_samples, {"recipe": "measure", **arguments}
        for size in sizes:
            for name, arguments in self.combined.items():
                yield name, size, {"microbatch": self.microbatch(size), **arguments}

    def run(self, sizes: tuple[int, ...], only: str, resume: bool) -> None:
        """Measure; bytes of rows that are there serve as baselines."""
        torch.set_num_threads(1)
        name_here = on_this_device(self.name)
        known = known_rows(name_here) if resume else {}
        baselines: dict[int, dict[str, Any]] = {}
        for name, size, arguments in self.rows(sizes):
            is_baseline = name in (BASELINE, SAME_SIZE)
            if is_baseline and (name, size) in known:
                baselines[size] = known[name, size]
            if (name, size) in known or (not is_baseline and only not in name):
                continue
            found = self.measure(arguments, size)
            if is_baseline:
                baselines[size] = found
            whole, same = baselines[self.num_samples], baselines[size]
            row = {
                "benchmark": name_here,
                "model": self.model,
                "setting": name,
                "microbatch": size,
                **found,
                "factor": whole["peak_bytes"] / found["peak_bytes"],
                "factor_same_microbatch": same["peak_bytes"] / found["peak_bytes"],
                "factor_allocated": ratio(whole["allocated_bytes"], found["allocated_bytes"]),
                "baseline": "measured",
                "quality": f"see {self.name}_quality.csv",
                "seed": 0,
                **environment(),
            }
            put_row(name_here, row, ("setting", "microbatch"))
            print(f"{name}, microbatch {size}: {found['peak_bytes'] / 1e6:.2f} MB, {row['factor']:.1f}x", flush=True)

    def main(self) -> None:
        """The command line."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--sizes", type=int, nargs="*", default=self.sizes)
        parser.add_argument("--only", default="", help="settings whose name holds this, and the baselines")
        parser.add_argument("--resume", action="store_true", help="leave rows that are there already")
        options = parser.parse_args()
        self.run(tuple(options.sizes), options.only, options.resume)
