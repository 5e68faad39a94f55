"""Write the README's table from the rows in `results/demo.csv`: python benchmarks/readme_table.py."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
START, END = "<!-- demo:start -->", "<!-- demo:end -->"
MIB = 2**20


def table() -> str:
    with (HERE / "results" / "demo.csv").open() as file:
        rows = list(csv.DictReader(file))
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    lines = [
        "| run | peak | factor | activations | optimizer state | test accuracy (min to max) |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for setting in settings:
        runs = [row for row in rows if row["setting"] == setting]

        def mean(column: str, runs: list[dict[str, str]] = runs) -> float:
            return statistics.mean(float(row[column]) for row in runs)

        accuracies = [float(row["quality_value"]) for row in runs]
        lines.append(
            f"| {setting} | {mean('peak_bytes') / MIB:.1f} MiB | {mean('factor'):.2f}x "
            f"| {mean('activations_bytes') / MIB:.1f} MiB | {mean('optimizer_state_bytes') / MIB:.1f} MiB "
            f"| {statistics.mean(accuracies):.1%} ({min(accuracies):.1%} to {max(accuracies):.1%}) |"
        )
    return "\n".join(lines)


def readme_with_table(readme: str) -> str:
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(readme_with_table(README.read_text()))
    print(table())
