"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from lightning_memsave.core.report import CATEGORIES, MemoryReport
from lightning_memsave.core.units import format_bytes


def comparison_table(
    reports: Mapping[str, MemoryReport], extra: Mapping[str, Sequence[str]] | None = None, title: str = ""
) -> Table:
    """One column per run: its peak, what that consisted of, the factor, the loss class, and further rows.

    Args:
        reports: runs by name; `factor` is against each report's own baseline.
        extra: further rows by heading, one cell per run.
        title: the heading of the table.
    """
    extra = extra or {}
    table = Table(title=escape(title), title_justify="left")
    # As narrow as its longest word, so that five runs fit 80 columns and nothing is cut off.
    words = (word for heading in (*CATEGORIES, *extra) for word in heading.replace("_", " ").split())
    table.add_column("", width=max(map(len, words)))
    for name in reports:
        table.add_column(escape(name), justify="right")
    runs = reports.values()
    table.add_row("peak", *(format_bytes(run.peak_bytes) for run in runs), style="bold")
    table.add_row("factor", *("n/a" if run.factor is None else f"{run.factor:.2f}x" for run in runs), end_section=True)
    for category in CATEGORIES:
        table.add_row(category.replace("_", " "), *(format_bytes(run.by_category.get(category)) for run in runs))
    table.add_section()
    for heading, cells in extra.items():
        table.add_row(escape(heading), *map(escape, cells))
    table.add_row("loss class", *(run.loss_class for run in runs))
    return table
