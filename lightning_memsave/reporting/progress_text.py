"""What a running training says of its memory: a bar for a terminal, a line for a log."""

from __future__ import annotations

from collections.abc import Mapping

from rich.text import Text

from lightning_memsave.core.report import CATEGORIES, MemoryReport
from lightning_memsave.core.units import format_bytes

# Okabe and Ito's palette. The letter of each category stands in the bar as well, for terminals and eyes without colour.
_STYLES = dict(
    zip(
        CATEGORIES,
        (
            "white on #0072B2",
            "black on #E69F00",
            "black on #009E73",
            "black on #D55E00",
            "black on #CC79A7",
            "black on #999999",
        ),
        strict=True,
    )
)
_BAR_COLUMNS = 16


def memory_text(report: MemoryReport, current: Mapping[str, int]) -> Text:
    """Return two lines: the highest peak, and the step that was measured last, each with its split.

    Args:
        report: the run so far.
        current: bytes by category at the peak of the last measured step.

    >>> report = MemoryReport(peak_bytes=8, by_category={"weights": 2, "data": 6}, microbatch_size=4,
    ...                       baseline_peak_bytes=16)
    >>> print(memory_text(report, {"weights": 2, "data": 2}))
    peak      8 B wwwwdddddddddddd microbatch 4
    now       4 B wwwwdddd         2.00x below the baseline
    """
    if report.peak_bytes is None:
        return Text("not measured yet")
    text = Text(f"peak {format_bytes(report.peak_bytes):>8} ")
    text.append(_bar(report.by_category, report.peak_bytes))
    microbatch, factor = _microbatch(report), _factor(report)
    text.append(f" {microbatch}\nnow  {format_bytes(sum(current.values())):>8} ")
    now = _bar(current, report.peak_bytes)
    now.append(" " * (_BAR_COLUMNS - len(now)))
    return text.append(now).append(f" {factor}")


def memory_line(report: MemoryReport, current: Mapping[str, int]) -> str:
    """Return the same in one line without colours.

    >>> memory_line(MemoryReport(peak_bytes=8, by_category={"weights": 2, "data": 6}), {"weights": 2, "data": 2})
    'peak 8 B (data 6 B, weights 2 B), now 4 B'
    """
    if report.peak_bytes is None:
        return "memory not measured yet"
    largest = sorted(report.by_category.items(), key=lambda item: -item[1])
    split = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in largest if size)
    now = f"now {format_bytes(sum(current.values()))}"
    return ", ".join(
        filter(None, [f"peak {format_bytes(report.peak_bytes)} ({split})", now, _microbatch(report), _factor(report)])
    )


def _microbatch(report: MemoryReport) -> str:
    return "" if report.microbatch_size is None else f"microbatch {report.microbatch_size}"


def _factor(report: MemoryReport) -> str:
    return "" if report.factor is None else f"{report.factor:.2f}x below the baseline"


def _bar(by_category: Mapping[str, int], full: int) -> Text:
    """Draw each category as wide as its bytes, to half a letter; `full` bytes fill the bar."""
    bar, end = Text(), 0
    for name, size in by_category.items():
        start, end = end, end + size
        columns = round(_BAR_COLUMNS * end / full) - round(_BAR_COLUMNS * start / full)
        bar.append(name[0] * columns, _STYLES.get(name))
    return bar
