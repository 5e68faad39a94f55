"""Write the tables of README and docs from the rows in `results/`: python benchmarks/tables.py.

A page marks the place of a table: `<!-- name:start -->`, `<!-- name:end -->`.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
MIB, MB = 2**20, 1e6
Row = dict[str, str]


def rows(name: str) -> list[Row]:
    with (HERE / "results" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def by_setting(all_rows: list[Row]) -> Iterator[tuple[str, list[Row]]]:
    for setting in dict.fromkeys(row["setting"] for row in all_rows):
        yield setting, [row for row in all_rows if row["setting"] == setting]


def mean(some_rows: list[Row], column: str) -> float:
    return statistics.mean(float(row[column]) for row in some_rows)


def markdown(head: Sequence[str], lines: list[Sequence[str]], num_text: int = 1) -> str:
    rule = ["---"] * num_text + ["---:"] * (len(head) - num_text)
    return "\n".join("|".join(["", *(f" {cell} " for cell in line), ""]) for line in (head, *lines)).replace(
        "\n", "\n|" + "|".join(rule) + "|\n", 1
    )


def demo() -> str:
    head = ("run", "peak", "factor", "activations", "optimizer state", "test accuracy (min to max)")
    lines = []
    for setting, runs in by_setting(rows("demo")):
        accuracies = [float(row["quality_value"]) for row in runs]
        lines.append(
            (
                setting,
                f"{mean(runs, 'peak_bytes') / MIB:.1f} MiB",
                f"{mean(runs, 'factor'):.2f}x",
                f"{mean(runs, 'activations_bytes') / MIB:.1f} MiB",
                f"{mean(runs, 'optimizer_state_bytes') / MIB:.1f} MiB",
                f"{statistics.mean(accuracies):.1%} ({min(accuracies):.1%} to {max(accuracies):.1%})",
            )
        )
    return markdown(head, lines)


def activations() -> str:
    """Kept bytes, peak, time and noise, for each model."""
    head = ("model", "setting", "kept MB", "factor", "peak MB", "factor", "CPU time", "noise")
    lines = []
    for name in ("wrn", "gpt", "llama", "vocabulary", "vit"):
        for i, row in enumerate(rows(f"activation_compression_{name}")):
            noise = float(row["quality_value"])
            lines.append(
                (
                    row["model"] if i == 0 else "",
                    row["setting"],
                    f"{float(row['kept_bytes']) / MB:.1f}",
                    f"{float(row['kept_factor']):.2f}x" if float(row["kept_factor"]) < 1000 else "all",
                    f"{float(row['peak_bytes']) / MB:.1f}",
                    f"{float(row['factor']):.2f}x",
                    f"{float(row['cpu_time_ratio']):.2f}x",
                    f"{noise:.2g}" if noise else "0",
                )
            )
    return markdown(head, lines, num_text=2)


def codecs() -> str:
    head = ("codec", "implementation", "B/element", "encode GB/s", "decode GB/s", "error on N(0, 1)")
    lines = [
        (
            row["setting"],
            row["implementation"],
            f"{float(row['bytes_per_element']):.3f}",
            f"{float(row['encode_gb_per_s']):.2f}",
            f"{float(row['decode_gb_per_s']):.2f}",
            f"{float(row['quality_value']):.4f}",
        )
        for row in rows("codecs")
    ]
    return markdown(head, lines, num_text=2)


def quality() -> str:
    """Accuracy of three seeds, and validation loss, after equal steps."""
    head = ("training", "setting", "quality", "against the baseline")
    lines = []
    runs_of_digits = [row for row in rows("activation_compression_digits") if row["seed"] != "mean"]
    digits = list(by_setting(runs_of_digits))
    base = [float(row["test_accuracy"]) for row in digits[0][1]]
    for i, (setting, runs) in enumerate(digits):
        values = [float(row["test_accuracy"]) for row in runs]
        error = ((statistics.variance(values) + statistics.variance(base)) / len(values)) ** 0.5
        difference = statistics.mean(values) - statistics.mean(base)
        lines.append(
            (
                "WideResNet-28-2, digits, test accuracy" if i == 0 else "",
                setting,
                f"{statistics.mean(values):.1%} ({min(values):.1%} to {max(values):.1%})",
                f"{difference * 100:+.1f} points ± {error * 100:.1f}" if i else "",
            )
        )
    loss = rows("activation_compression_bytes")
    for i, row in enumerate(loss):
        ratio = float(row["quality_value"]) / float(loss[0]["quality_value"])
        lines.append(
            (
                "GPT on Python's source text, validation loss" if i == 0 else "",
                row["setting"],
                f"{float(row['quality_value']):.4f}",
                f"{(ratio - 1) * 100:+.2f} %" if i else "",
            )
        )
    return markdown(head, lines, num_text=2)


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"demo": demo},
    "docs/techniques/activation_compression.md": {"measured": activations, "codecs": codecs, "quality": quality},
}


def with_tables(page: str) -> str:
    """The text of a page with its tables written anew."""
    text = (ROOT / page).read_text()
    for name, table in TABLES[page].items():
        start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
        before, _, rest = text.partition(start)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"{page} has no place for the table {name!r}")
        text = f"{before}{start}\n{table()}\n{end}{after}"
    return text


if __name__ == "__main__":
    for page in TABLES:
        (ROOT / page).write_text(with_tables(page))
        print(page)
