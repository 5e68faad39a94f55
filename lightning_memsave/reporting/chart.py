"""Pictures of reports (needs matplotlib, in the extra `demo`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lightning_memsave.core.report import CATEGORIES, MemoryReport
from lightning_memsave.core.units import MIB

# Okabe and Ito's palette: told apart by colour-blind readers as well.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#999999")


def draw_comparison(reports: Mapping[str, MemoryReport], path: Path, title: str) -> Path:
    """Draw stacked bars, one per run: where the bytes of its peak were.

    Args:
        reports: measured runs by name.
        path: where to write; the suffix (`.png`, `.svg`) chooses the format.
        title: the heading.

    Returns:
        `path`.
    """
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=(9, 0.7 * len(reports) + 1.8), layout="constrained")
    axes = figure.subplots()
    rows = range(len(reports))
    left = [0.0] * len(reports)
    for category, colour in zip(CATEGORIES, _COLOURS, strict=True):
        widths = [report.by_category.get(category, 0) / MIB for report in reports.values()]
        axes.barh(rows, widths, left=left, color=colour, label=category.replace("_", " "))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, end, report in zip(rows, left, reports.values(), strict=True):
        size = "n/a" if report.peak_bytes is None else f"{end:.1f} MiB"
        factor = f"  {report.factor:.1f}x less" if report.factor is not None and report.factor > 1 else ""
        axes.annotate(f" {size}{factor}", (end, row), va="center", fontsize=9)
    axes.set_yticks(rows, list(reports), parse_math=False)  # a `$` in a name is a `$`
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.22 or 1.0)
    axes.set_xlabel("peak of live tensor bytes in a training step, MiB")
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=3, fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    return path
