"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.reporting.comparison import Comparison

_LONGEST_WORD = 16  # of a name; longer ones go on in the next line


def comparison_tables(comparison: Comparison, width: int = 80, title: str = "") -> Iterator[Table]:
    """One column per run, one row per figure; as many tables as it takes for no figure to be cut off.

    Args:
        comparison: the runs.
        width: columns of the terminal.
        title: the heading of the first table.
    """
    # As narrow as its longest word, so that five runs fit 80 columns.
    heading = max(len(word) for row in comparison.rows for word in row.heading.split())
    words = [min(len(word), _LONGEST_WORD) for run in comparison.runs for word in run.name.split()]
    cell = max(words + [len(text) for row in comparison.rows for text in row.texts])
    num_fitting = max(1, (width - heading - 2) // (cell + 3))
    for first in range(0, len(comparison.runs), num_fitting):
        shown = slice(first, first + num_fitting)
        table = Table(title=escape(title) if first == 0 else None, title_justify="left", pad_edge=False)
        table.add_column("", width=heading)
        for position, run in list(enumerate(comparison.runs))[shown]:
            mark = " ●" * (position in comparison.front)
            table.add_column(escape(run.name) + mark, justify="right", min_width=cell, overflow="fold")
        for row in comparison.rows:
            style = "bold" if row.heading == "peak" else None
            table.add_row(escape(row.heading), *map(escape, row.texts[shown]), style=style)
            if row.heading in ("factor", "loss class", CATEGORIES[-1]):
                table.add_section()
        yield table


def print_comparison(comparison: Comparison, console: Console, title: str = "") -> None:
    """Print the tables and what their marks mean."""
    for table in comparison_tables(comparison, console.width, title):
        console.print(table)
    console.print(_legend(comparison), markup=False)


def print_settings(comparison: Comparison, console: Console) -> None:
    """Print where the settings of the runs differ, one run after the other."""
    for position, run in enumerate(comparison.runs if comparison.differences else ()):
        own = {name: values[position] for name, values in comparison.differences.items() if values[position]}
        settings = ", ".join(f"{name}={value}" for name, value in own.items()) or "nothing that another run has not"
        console.print(f"{run.name}: {settings}", markup=False, highlight=False)


def _legend(comparison: Comparison) -> str:
    quality = comparison.quality
    if quality is None:
        return "No metric is known to be quality by its name, so there is no Pareto front."
    return f"● no run has both a smaller peak and a better {quality.name} ({quality.direction})."
