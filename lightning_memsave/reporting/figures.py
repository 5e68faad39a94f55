"""Interactive pictures of compared runs (needs plotly, in the extra `compare`).

Colours and grids belong to the page, which has a light and a dark face. Each trace says in `meta` whose it is, so that
the page can leave out a run: `run` for a trace of one run, `runs` for one whose points belong to several.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_memsave.core.report import CATEGORIES, MemoryReport
from lightning_memsave.core.units import MIB, format_bytes
from lightning_memsave.reporting.comparison import Comparison, Quality

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Categories in Okabe and Ito's palette, runs in Tol's: both told apart by colour-blind readers as well.
CATEGORY_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#999999")
RUN_COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB")
# With the colour, so that no run is told by its colour alone.
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")
DASHES = ("solid", "dash", "dot", "dashdot")
_LABELS = ("top center", "bottom center", "middle right", "middle left")  # so that equal points can be read
_NAME_COLUMNS = 20


def draw(comparison: Comparison) -> Mapping[str, Figure]:
    """Return every picture that the runs have the figures for, by its name in the page."""
    figures = {
        "tradeoff": _tradeoff(comparison, comparison.quality) if comparison.front and comparison.quality else None,
        "breakdown": _breakdown(comparison) if any(run.report.by_category for run in comparison.runs) else None,
        "timeline": _timelines(comparison) if any(run.report.timeline for run in comparison.runs) else None,
        "drift": _drift(comparison) if any(len(run.peaks) > 1 for run in comparison.runs) else None,
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def _text(name: str, columns: int = 10_000) -> str:
    """Return a user's text for plotly, which reads tags: as it is, in lines of at most so many columns."""
    return "<br>".join(map(html.escape, textwrap.wrap(name, columns) or [""]))


def new_figure(x: str, y: str, **layout: Any) -> Figure:
    """Return an empty figure with the titles of its axes."""
    from plotly.graph_objects import Figure

    figure = Figure()
    figure.update_layout(
        template="none",
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        xaxis={"title": {"text": x}, "automargin": True},
        yaxis={"title": {"text": y}, "automargin": True},
        hovermode="closest",
        showlegend=False,
        **layout,
    )
    return figure


def _of_run(position: int) -> dict[str, Any]:
    return {
        "meta": {"run": position},
        "marker": {
            "color": RUN_COLOURS[position % len(RUN_COLOURS)],
            "symbol": SYMBOLS[position % len(SYMBOLS)],
            "size": 10,
        },
        "line": {"color": RUN_COLOURS[position % len(RUN_COLOURS)], "dash": DASHES[position % len(DASHES)]},
        "hovertemplate": "%{text}<extra></extra>",
    }


def _tradeoff(comparison: Comparison, quality: Quality) -> Figure:
    """Peak against quality, the front as a line."""
    figure = new_figure("peak, MiB", f"{_text(quality.name)} ({quality.direction})")
    points = {}
    for position, run in enumerate(comparison.runs):
        value = quality.of(run)
        if value is not None and run.report.peak_bytes is not None:
            points[position] = (run.report.peak_bytes / MIB, value)
    figure.add_scatter(
        x=[points[position][0] for position in comparison.front],
        y=[points[position][1] for position in comparison.front],
        mode="lines",
        line={"shape": "hv", "width": 1, "color": "#888888"},
        hoverinfo="skip",
        meta={"runs": list(comparison.front)},
    )
    for position, (peak, value) in points.items():
        run = comparison.runs[position]
        figure.add_scatter(
            x=[peak],
            y=[value],
            mode="markers+text",
            **{**_of_run(position), "hovertemplate": "%{customdata}<extra></extra>"},
            text=[_number(position)],
            textposition=_LABELS[position % len(_LABELS)],
            cliponaxis=False,
            customdata=[
                f"{_text(run.name)}<br>{run.report.peak_bytes} bytes<br>{_text(quality.name)} {value!r}"
                + "<br>on the front" * (position in comparison.front)
            ],
        )
    return figure


def _breakdown(comparison: Comparison) -> Figure:
    """Stacked bars: what the bytes of each peak were."""
    figure = new_figure("peak, MiB", "", barmode="stack", bargap=0.35)
    measured = [(p, run) for p, run in enumerate(comparison.runs) if run.report.peak_bytes is not None]
    names = [f"{_number(position)} {_text(run.name, _NAME_COLUMNS)}" for position, run in measured]
    for category, colour in zip(CATEGORIES, CATEGORY_COLOURS, strict=True):
        sizes = [run.report.by_category.get(category, 0) for _, run in measured]
        figure.add_bar(
            x=[size / MIB for size in sizes],
            y=names,
            orientation="h",
            name=category.replace("_", " "),
            marker={"color": colour},
            meta={"runs": [position for position, _ in measured]},
            customdata=[f"{category.replace('_', ' ')}<br>{format_bytes(size)}<br>{size} bytes" for size in sizes],
            hovertemplate="%{y}<br>%{customdata}<extra></extra>",
        )
    peaks = [(run.report.peak_bytes or 0) / MIB for _, run in measured]
    figure.add_scatter(
        x=peaks,
        y=names,
        mode="text",
        text=[_size_and_factor(run.report) for _, run in measured],
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
        meta={"runs": [position for position, _ in measured]},
    )
    figure.update_xaxes(range=[0, 1.75 * max(peaks, default=1.0)])  # room for the text
    figure.update_layout(
        showlegend=True,
        legend={"orientation": "h", "traceorder": "normal", "y": 1.02, "yanchor": "bottom", "x": 0, "entrywidth": 110},
        yaxis={"type": "category", "autorange": "reversed", "showgrid": False},  # names such as "8" are no numbers
        height=150 + 64 * len(measured),
    )
    return figure


def _size_and_factor(report: MemoryReport) -> str:
    factor = "" if report.factor is None else f", {report.factor:.1f}x"
    return f" {format_bytes(report.peak_bytes)}{factor if (report.factor or 0) >= 1.05 else ''}"


def _timelines(comparison: Comparison) -> Figure:
    """Return live bytes through the step with the highest peak."""
    figure = new_figure("allocations and frees of one step, first to last", "live, MiB", yaxis_rangemode="tozero")
    for position, run in enumerate(comparison.runs):
        line = run.report.timeline
        if line is None:
            continue
        splits = zip(*line.by_category.values(), strict=True)
        texts = [
            f"{_text(run.name)}<br>"
            + "<br>".join(
                f"{c.replace('_', ' ')} {format_bytes(size)}" for c, size in zip(line.by_category, split, strict=True)
            )
            for split in splits
        ]
        figure.add_scatter(
            x=[event / max(1, line.events[-1]) for event in line.events],
            y=[total / MIB for total in line.total_bytes],
            mode="lines",
            text=texts,
            **_of_run(position),
        )
    figure.update_xaxes(tickformat=".0%")
    return figure


def _drift(comparison: Comparison) -> Figure:
    """Peaks of the measured steps: whether they grow."""
    figure = new_figure("step", "peak, MiB", yaxis_rangemode="tozero")
    for position, run in enumerate(comparison.runs):
        if len(run.peaks) > 1:
            figure.add_scatter(
                x=[step for step, _ in run.peaks],
                y=[peak / MIB for _, peak in run.peaks],
                mode="lines+markers",
                text=[f"{_text(run.name)}<br>step {step}<br>{peak} bytes" for step, peak in run.peaks],
                **_of_run(position),
            )
    return figure


def _number(position: int) -> str:
    return str(position + 1)
