"""Interactive pictures of compared runs (needs plotly, in the extra `compare`).

Colours and grids belong to the page, which has a light and a dark theme. Each trace says in `meta` whose it is, so that
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
_LABELS = ("top center", "bottom center", "top right", "bottom left")  # so that neighbours can be read
_COLUMNS = 44  # of text in a picture, on a phone
_ROOM = 0.05  # of a quality, to either side of runs that hardly differ in it
_FEW_STEPS = 8


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
        margin={"l": 8, "r": 20, "t": 8, "b": 8},  # to the right, half of the last number
        xaxis={"title": {"text": x, "font": {"size": 13}}, "automargin": True},
        yaxis={"title": {"text": y, "font": {"size": 13}}, "automargin": True},
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
    """Draw peak against quality, the front as a line."""
    figure = new_figure("peak, MiB", f"{_text(quality.name, _COLUMNS)}<br>({quality.direction})")
    points = {}
    for position, run in enumerate(comparison.runs):
        value = quality.of(run)
        if value is not None and run.report.peak_bytes is not None:
            points[position] = (run.report.peak_bytes / MIB, value)
    lowest, highest = (each(value for _, value in points.values()) for each in (min, max))
    middle = lowest / 2 + highest / 2
    reach = max(0.6 * (highest - lowest), _ROOM * abs(middle)) or _ROOM
    figure.update_yaxes(range=[middle - reach, middle + reach])
    figure.add_scatter(
        x=[points[position][0] for position in comparison.front],
        y=[points[position][1] for position in comparison.front],
        mode="lines",
        line={"shape": "hv", "width": 1, "color": "#888888"},
        hoverinfo="skip",
        meta={"runs": list(comparison.front)},
    )
    for order, (position, (peak, value)) in enumerate(sorted(points.items(), key=lambda point: point[1])):
        run = comparison.runs[position]
        figure.add_scatter(
            x=[peak],
            y=[value],
            mode="markers+text",
            **{**_of_run(position), "hovertemplate": "%{customdata}<extra></extra>"},
            text=[_number(position)],
            textposition=_LABELS[order % len(_LABELS)],
            cliponaxis=False,
            customdata=[
                f"{_text(run.name)}<br>{run.report.peak_bytes} bytes<br>{_text(quality.name)} {value!r}"
                + "<br>on the front" * (position in comparison.front)
            ],
        )
    return figure


def _breakdown(comparison: Comparison) -> Figure:
    """Draw stacked bars: what the bytes of each peak were."""
    figure = new_figure("peak, MiB", "", barmode="stack", bargap=0.77)
    measured = [(p, run) for p, run in enumerate(comparison.runs) if run.report.peak_bytes is not None]
    names = [f"{_number(position)} {_text(run.name)}" for position, run in measured]
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
    figure.add_scatter(  # above the bars, where there is room for names
        x=[0] * len(names),
        y=names,
        mode="text",
        text=[_above(f"{_number(position)} {run.name}: {_size_and_factor(run.report)}") for position, run in measured],
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
        meta={"runs": [position for position, _ in measured]},
    )
    figure.update_xaxes(autorangeoptions={"clipmin": 0})
    figure.update_layout(
        showlegend=True,
        legend={"orientation": "h", "traceorder": "normal", "y": 1.02, "yanchor": "bottom", "x": 0, "entrywidth": 110},
        yaxis={  # names such as "8" are no numbers
            "type": "category",
            "autorange": "reversed",
            "showgrid": False,
            "showticklabels": False,
        },
        height=115 + 64 * len(measured),
    )
    return figure


def _above(text: str) -> str:
    """Return text that stands above a point when its middle is at it: as many empty lines follow, and one."""
    lines = _text(text, _COLUMNS)
    return lines + "<br>\u00a0" * (lines.count("<br>") + 2)


def _size_and_factor(report: MemoryReport) -> str:
    factor = "" if report.factor is None else f", {report.factor:.1f}x less"
    text = f"{format_bytes(report.peak_bytes)}{factor if (report.factor or 0) >= 1.05 else ''}"
    return text.replace(" ", "\u00a0")  # stays in one line


def _timelines(comparison: Comparison) -> Figure:
    """Draw the live bytes through the step with the highest peak, a line for each run."""
    figure = new_figure("allocations and frees of one step", "live, MiB", yaxis_rangemode="tozero")
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
    figure.update_xaxes(tickformat=".0%", range=[0, 1], dtick=0.25)
    return figure


def _drift(comparison: Comparison) -> Figure:
    """Draw the peaks of the measured steps: whether they grow."""
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
    if max((step for run in comparison.runs for step, _ in run.peaks), default=0) <= _FEW_STEPS:
        figure.update_xaxes(dtick=1)  # no half steps
    return figure


def _number(position: int) -> str:
    return str(position + 1)
