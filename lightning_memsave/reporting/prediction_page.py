"""A prediction for people: tables and a timeline for the terminal, and a picture (needs plotly, extra `compare`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_memsave.core.report import CATEGORIES, Timeline
from lightning_memsave.core.units import MIB, format_bytes
from lightning_memsave.reporting.figures import CATEGORY_COLOURS, new_figure
from lightning_memsave.simulation.predicted_step import Prediction

_NUM_MODULES = 10
_COLUMNS, _ROWS = 64, 8
_LETTERS = dict(zip(CATEGORIES, "WGOAT.", strict=True))
"""What each category is drawn as, from the bottom; data is a dot."""


def print_prediction(prediction: Prediction, console: Console, device_bytes: int | None = None) -> None:
    """Print what a step will take, what that is, and whether it fits."""
    console.print(_headline(prediction), highlight=False)
    for flag in prediction.flags:
        console.print(f"  note: {flag}", markup=False, highlight=False)
    console.print(_split_table("by category", prediction.by_category, prediction.peak_bytes))
    shown = dict(itertools.islice(prediction.by_module.items(), _NUM_MODULES))
    if (rest := sum(prediction.by_module.values()) - sum(shown.values())) > 0:
        shown[f"and {len(prediction.by_module) - len(shown)} others"] = rest
    console.print(_split_table("by module", shown, prediction.peak_bytes))
    if prediction.top:
        console.print(_top_table(prediction))
    if prediction.timeline is not None:
        for line in timeline_lines(prediction.timeline):
            console.print(line, markup=False, highlight=False)
    if device_bytes is not None:
        console.print(_verdict(prediction, device_bytes), highlight=False)


_FRAGMENTED = 1.05  # reserved over allocated bytes, above which the setting is named


def _headline(prediction: Prediction) -> str:
    how = "of fake tensors" if prediction.source == "fake" else "measured on a part of it"
    text = f"predicted peak of a training step: {format_bytes(prediction.peak_bytes)} of tensors ({how})"
    if prediction.cuda is not None:
        cuda, (low, high) = prediction.cuda, prediction.cuda.context_bytes
        text += (
            f"\non CUDA: {format_bytes(cuda.allocated_bytes)} allocated, {format_bytes(cuda.reserved_bytes)} reserved "
            f"({cuda.fragmentation:.2f}x), and {format_bytes(low)} to {format_bytes(high)} of context and library "
            "workspace"
        )
        if cuda.fragmentation > _FRAGMENTED:
            between = format_bytes(cuda.reserved_bytes - cuda.allocated_bytes)
            text += (
                f"\nthe other {between} lie between tensors, in pieces: "
                "PYTORCH_ALLOC_CONF=expandable_segments:True may spare some of them"
            )
    return text


def _verdict(prediction: Prediction, device_bytes: int) -> str:
    low, high = prediction.needed_bytes
    needed = format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
    answer = {True: "fits", False: "does NOT fit", None: "may or may not fit"}[prediction.fits(device_bytes)]
    return f"{answer} in {format_bytes(device_bytes)}: {needed} needed"


def _split_table(title: str, sizes: Mapping[str, int], total: int) -> Table:
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("", overflow="fold")
    table.add_column("at the peak", justify="right")
    table.add_column("", justify="right")
    for name, size in sizes.items():
        table.add_row(escape(name.replace("_", " ") if name in CATEGORIES else name), *_cells(size, total))
    return table


def _cells(size: int, total: int) -> tuple[str, str]:
    return format_bytes(size), f"{100 * size / max(1, total):.1f} %"


def _top_table(prediction: Prediction) -> Table:
    table = Table(title="largest tensors at the peak", title_justify="left", pad_edge=False)
    for heading in ("tensors", "bytes", "what", "where"):
        table.add_column(heading, justify="right" if heading == "bytes" else "left", overflow="fold")
    for each in prediction.top:
        shape = ", ".join(map(str, each.shape))
        where = f"{each.module}\n{each.line}" if each.line else each.module
        kind = each.category.replace("_", " ")
        table.add_row(
            escape(f"{each.count} x [{shape}] {each.dtype}"), format_bytes(each.num_bytes), kind, escape(where)
        )
    return table


def timeline_lines(timeline: Timeline) -> Iterator[str]:
    """Yield the step from left to right as a stack of letters, the peak marked.

    >>> line = Timeline(events=(0, 1), by_category={c: (2 * MIB, 0) for c in CATEGORIES})
    >>> print(next(timeline_lines(line)))
     12.0 MiB |................................
    """
    totals = timeline.total_bytes
    peak, last = max(totals), max(1, timeline.events[-1])
    columns: list[int] = []
    for column in range(_COLUMNS):  # the highest point of each stretch, the one before where it has none
        inside = [i for i, event in enumerate(timeline.events) if event * _COLUMNS // (last + 1) == column]
        columns.append(max(inside, key=totals.__getitem__) if inside else columns[-1])
    for row in range(_ROWS, 0, -1):
        height = (row - 0.5) / _ROWS * peak
        drawn = "".join(_letter(timeline, point, height) for point in columns).rstrip()
        label = format_bytes(round(row / _ROWS * peak)) if row in (_ROWS, _ROWS // 2) else ""
        yield f"{label:>9} |{drawn}"
    position = next(c for c, point in enumerate(columns) if totals[point] == peak)
    yield f"{'':>9} +{'-' * position}^{'-' * (_COLUMNS - position - 1)}"
    yield f"{'':>11}{', '.join(f'{_LETTERS[c]} {c}' for c in CATEGORIES)}; ^ the peak".replace("_", " ")


def _letter(timeline: Timeline, point: int, height: float) -> str:
    below = 0
    for name in CATEGORIES:
        below += timeline.by_category[name][point]
        if below > height:
            return _LETTERS[name]
    return " "


def write_figure(prediction: Prediction, path: Path) -> Path:
    """Write the timeline as a page of its own: what is alive when, by category, the peak marked."""
    line = prediction.timeline
    assert line is not None, "every prediction of a module has one"
    figure = new_figure("allocations and frees of one step, first to last", "live, MiB", yaxis_rangemode="tozero")
    for name, colour in zip(CATEGORIES, CATEGORY_COLOURS, strict=True):
        figure.add_scatter(
            x=line.events,
            y=[size / MIB for size in line.by_category[name]],
            name=name.replace("_", " "),
            stackgroup="live",
            mode="lines",
            line={"color": colour, "width": 0.5},
        )
    peak = max(range(len(line.events)), key=line.total_bytes.__getitem__)
    figure.add_annotation(
        x=line.events[peak], y=line.total_bytes[peak] / MIB, text=f"peak {format_bytes(prediction.peak_bytes)}"
    )
    figure.update_layout(showlegend=True, title={"text": "one predicted training step"}, margin={"t": 40})
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(path, include_plotlyjs=True)
    return path
