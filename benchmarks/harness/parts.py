"""Quality in parts: one run per seed and setting, a row for each that has ended, and where it stops it goes on.

python -m benchmarks.quality.quality_wrn --parts 3        # three runs, then stop
python -m benchmarks.quality.quality_wrn --minutes 60     # as many as end within an hour, by the longest so far
python -m benchmarks.quality.quality_wrn --again 1        # a run that has a row once more, held against it
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from benchmarks.harness.measurement import environment, put_row, read_rows
from benchmarks.harness.paired import MARGINS, Comparison, compare_pairs

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs that save memory beside a baseline; seeds are pairs."""

    name: str
    """Of the file in `results/`."""
    model: str
    settings: Mapping[str, dict[str, Any]]
    """Arguments of `MemSave`; the baseline first."""
    size: Mapping[str, int]
    """How long and on how much is trained: rows of other sizes are not compared."""
    train: Callable[[int, dict[str, Any]], dict[str, Any]]
    """(seed, arguments) -> columns; `quality_value` is better when it is higher."""
    num_seeds: int | None = None
    """How many are planned; `None`: as many as somebody has time for."""

    @property
    def key(self) -> tuple[str, ...]:
        """What tells rows apart."""
        return ("setting", "seed", *self.size)

    def rows(self) -> list[dict[str, Any]]:
        """Those of this size."""
        return [row for row in read_rows(self.name) if all(row[c] == str(v) for c, v in self.size.items())]

    def missing(self, settings: Collection[str]) -> Iterator[tuple[int, str]]:
        """Seed after seed, which of these settings has no row yet; without end where no number of seeds is planned."""
        done = {(row["seed"], row["setting"]) for row in self.rows()}
        for seed in count() if self.num_seeds is None else range(self.num_seeds):
            yield from ((seed, setting) for setting in settings if (str(seed), setting) not in done)

    def run(self, seed: int, setting: str) -> None:
        """One part."""
        found = self.train(seed, self.settings[setting])
        about = {"benchmark": self.name, "model": self.model, "setting": setting, "seed": seed, **self.size}
        planned = {} if self.num_seeds is None else {"runs_planned": self.num_seeds * len(self.settings)}
        put_row(self.name, {**about, **found, **planned, **environment()}, self.key)
        print(f"{self.name}: seed {seed}, {setting}: {found['quality_value']:.2f}, {found['cpu_seconds_run']:.0f} s")

    def again(self, row: Row) -> str | None:
        """Make a run that has a row once more.

        Returns:
            What differs: the peak; or the quality by more than two standard errors, which are those of a single run:
            the scatter of the baseline over its seeds.
        """
        baseline = [float(r["quality_value"]) for r in self.rows() if r["setting"] == next(iter(self.settings))]
        if len(baseline) < 2:
            return f"{self.name}: two seeds of the baseline are needed to tell how they scatter"
        found = self.train(int(row["seed"]), self.settings[row["setting"]])
        difference, error = found["quality_value"] - float(row["quality_value"]), statistics.stdev(baseline)
        about = f"{self.name}: seed {row['seed']}, {row['setting']}: {difference:+.3g} of {2 * error:.2g}"
        print(f"{about}, peak {found['peak_bytes']} of {row['peak_bytes']} bytes")
        return about if abs(difference) > 2 * error or found["peak_bytes"] != int(row["peak_bytes"]) else None

    def summary(self) -> Iterator[str]:
        """A line for each setting."""
        for setting, c in compared(self.rows(), next(iter(self.settings))).items():
            verdict = c.verdict(*MARGINS[self.name])
            yield f"{setting}: {c.mean:+.2f}, half-width {c.half_width:.2f}, {c.num_pairs} pairs: {verdict}"

    def main(self) -> None:
        """The command line."""
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--parts", type=int, default=len(self.settings), help="runs to make")
        parser.add_argument("--minutes", type=float, help="instead: the time to fill")
        parser.add_argument("--again", type=int, help="instead: how many runs to make once more")
        parser.add_argument("--only", nargs="*", default=self.settings, choices=self.settings, help="settings")
        options = parser.parse_args()
        torch.set_num_threads(1)
        if options.again is not None:
            rows = [row for row in self.rows() if row["setting"] in options.only][: options.again]
            sys.exit("\n".join(filter(None, map(self.again, rows))) or (None if rows else "there is no such row"))
        start, longest = time.monotonic(), 0.0
        for number, (seed, setting) in enumerate(self.missing(options.only)):
            passed = time.monotonic() - start
            if number >= options.parts if options.minutes is None else passed + longest > 60 * options.minutes:
                break
            self.run(seed, setting)
            longest = max(longest, time.monotonic() - start - passed)
        print("\n".join(self.summary()))


def compared(rows: list[dict[str, Any]], baseline: str) -> dict[str, Comparison]:
    """Each setting against the baseline, over the seeds that both have."""
    values = {(row["setting"], row["seed"]): float(row["quality_value"]) for row in rows}
    found = {}
    for setting in dict.fromkeys(row["setting"] for row in rows):
        seeds = [seed for name, seed in values if name == setting and (baseline, seed) in values]
        if setting != baseline and seeds:
            pairs = [(values[setting, seed], values[baseline, seed]) for seed in seeds]
            found[setting] = compare_pairs(*zip(*pairs, strict=True))
    return found
