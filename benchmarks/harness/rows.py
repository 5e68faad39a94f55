"""Rows of results, and tables made of them."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MIB, MB = 2**20, 1e6
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    """Read the rows of a file of results; none where there is no such file yet."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def by_setting(all_rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for setting in dict.fromkeys(row["setting"] for row in all_rows):
        yield setting, [row for row in all_rows if row["setting"] == setting]


def mean(some_rows: list[Row], column: str) -> float:
    return statistics.mean(float(row[column]) for row in some_rows)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of `values`; 0 for a single one, whose error is not known."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def markdown(head: Sequence[str], lines: list[Sequence[str]], num_text: int = 1) -> str:
    rule = ["---"] * num_text + ["---:"] * (len(head) - num_text)
    return "\n".join("|".join(["", *(f" {cell} " for cell in line), ""]) for line in (head, *lines)).replace(
        "\n", "\n|" + "|".join(rule) + "|\n", 1
    )


def factor_and_time(row: Row) -> tuple[str, str]:
    return f"{float(row['factor']):.2f}x", f"{float(row['cpu_time_ratio']):.2f}x"
