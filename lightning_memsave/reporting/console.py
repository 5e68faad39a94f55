"""Tables for the terminal."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterator

from lightning_utilities.core import rank_zero
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lightning_memsave.core.report import CATEGORIES, MemoryReport
from lightning_memsave.core.units import format_bytes
from lightning_memsave.core.verification import Verification
from lightning_memsave.reporting.comparison import Comparison

_LONGEST_WORD = 16  # of a name; longer ones go on in the next line


def comparison_tables(comparison: Comparison, width: int = 80, title: str = "") -> Iterator[Table]:
    """Yield one column per run, one row per figure; as many tables as it takes for no figure to be cut off.

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


def show_summary(report: MemoryReport, why_no_baseline: str = "", console: Console | None = None) -> None:
    """Print a box with what a fit took, unless Lightning's log is silenced.

    Args:
        report: of the fit.
        why_no_baseline: why nothing is known of the plain step; empty where something is.
        console: where to, in any case; by default the standard output.
    """
    if console is None and not rank_zero.log.isEnabledFor(logging.INFO):
        return
    console = console or Console()
    width = min(console.width - 4, _WIDEST)
    text = Text("\n".join(folded for line in str(report).splitlines() for folded in _folded(line, width)))
    if why_no_baseline:
        text.append(f"\nno baseline: {why_no_baseline}")
    text.highlight_regex(r"[\d.]+x less|^next:.*", "bold")
    text.highlight_regex("█+", "green")
    text.highlight_regex("░+", "dim")
    console.print(Panel(text, title="lightning-memsave", title_align="left", expand=False))


_WIDEST, _MOST_LINES = 96, 3  # columns of a line, and lines of a sentence


def _folded(line: str, width: int) -> list[str]:
    """Return a line as several of this width, those after the first further in; of a long sentence the first ones."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.wrap(
        line, width, subsequent_indent=f"{indent}  ", max_lines=_MOST_LINES, placeholder=" ...", break_on_hyphens=False
    )


def print_comparison(comparison: Comparison, console: Console, title: str = "") -> None:
    """Print the tables and what their marks mean."""
    for table in comparison_tables(comparison, console.width, title):
        console.print(table)
    for line in (_legend(comparison), *comparison.notes):
        console.print(line, markup=False)


def print_settings(comparison: Comparison, console: Console) -> None:
    """Print where the settings of the runs differ, one run after the other."""
    for position, run in enumerate(comparison.runs if comparison.differences else ()):
        own = {name: values[position] for name, values in comparison.differences.items() if values[position]}
        settings = "; ".join(f"{name}={value}" for name, value in own.items()) or "nothing that another run has not"
        console.print(f"{run.name}: {settings}", markup=False, highlight=False)


def print_verification(result: Verification, console: Console, num_shown: int = 10) -> None:
    """Print where a step differs, by module, the largest difference first, and what it saves."""
    console.print("relative differences from a plain step")
    table = Table(pad_edge=False)
    table.add_column("module", overflow="fold")
    for heading in ("gradients", "buffers"):
        table.add_column(heading, justify="right")
    found, buffers = result.gradient_differences, result.buffer_differences
    largest_first = sorted({**buffers, **found}, key=lambda name: -max(found.get(name, 0.0), buffers.get(name, 0.0)))
    for name in largest_first[:num_shown]:
        cells = (f"{each[name]:.1e}" if name in each else "" for each in (found, buffers))
        table.add_row(escape(name or "(the module itself)"), *cells)
    console.print(table)
    if len(largest_first) > num_shown:
        console.print(f"and {len(largest_first) - num_shown} modules with smaller ones")
    plain, ours = result.plain, result.report
    seconds = ours.step_seconds, plain.step_seconds
    time = f", {seconds[0] / seconds[1]:.2f} times its seconds" if seconds[0] and seconds[1] else ""
    console.print(
        f"loss: {result.loss_difference:.1e}; peak: {format_bytes(ours.peak_bytes)} instead of "
        f"{format_bytes(plain.peak_bytes)}{time}",
        *_meaning(result),
        sep="\n",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _meaning(result: Verification) -> Iterator[str]:
    """Yield what differences mean in a setting of this loss class, and whether these are more than that."""
    verdict = "yes" if result.holds else "NO"
    if result.loss_class == "exact":
        yield f"exact, so differences must be at most {result.tolerance:.0e}: {verdict}"
        return
    noise, is_unbiased = result.noise, result.loss_class == "unbiased"
    if noise is not None:
        is_expected = not is_unbiased or noise.averages_to_zero(result.tolerance)
        verb, but = "expected" if is_expected else "more than expected", "" if is_unbiased else " but for a small bias"
        yield (
            f"difference: {_percent(noise.size)} of the gradient's size: {verb} of {', '.join(noise.codecs)}, whose "
            f"noise averages to zero{but}"
        )
        yield (
            f"  (the mean of {noise.num_draws} draws of the noise is {_percent(noise.mean_size)} off; noise alone "
            f"leaves about {_percent(noise.size / noise.num_draws**0.5)})"
        )
    rule = "are expected, but must be finite"
    if is_unbiased:
        rule = f"must average to zero, and that of the loss be at most {result.tolerance:.0e}"
    yield f"{result.loss_class}, so differences {rule}: {verdict}"
    yield from (f"  {reason}" for reason in result.report.loss_class_reasons)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"


def _legend(comparison: Comparison) -> str:
    quality = comparison.quality
    if quality is None:
        return "No metric is known to be quality by its name, so there is no Pareto front."
    return f"● no run has both a smaller peak and a better {quality.name} ({quality.direction})."
