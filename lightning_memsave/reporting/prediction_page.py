"""A prediction for people: tables and timelines for the terminal, and a picture (needs plotly, extra `compare`).

Beside the plain step, both are drawn to one scale, and a table says what of the plain peak is left where.
"""

from __future__ import annotations

import html
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_memsave.core.report import CATEGORIES, Timeline
from lightning_memsave.core.units import MIB, format_bytes
from lightning_memsave.reporting.figures import CATEGORY_COLOURS, new_figure
from lightning_memsave.simulation.caching_allocator import cublas_workspaces
from lightning_memsave.simulation.predicted_step import Prediction

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_NUM_ROWS = 10
_COLUMNS, _ROWS = 64, 8
_LETTERS = dict(zip(CATEGORIES, "WGOAT.", strict=True))
"""What each category is drawn as, from the bottom; data is a dot."""


def print_prediction(
    prediction: Prediction,
    console: Console,
    device_bytes: int | None = None,
    *,
    plain: Prediction | None = None,
    budget_bytes: int | None = None,
) -> None:
    """Print what a step will take, what that is, and whether it fits.

    Args:
        prediction: of the step.
        console: prints.
        device_bytes: what it has to fit into; `None` where nobody asks.
        plain: the step without any technique, to be shown beside it.
        budget_bytes: a line in the picture.
    """
    console.print(_headline(prediction), highlight=False)
    for flag in prediction.flags:
        console.print(f"  note: {flag}", markup=False, highlight=False)
    console.print(_split_table("by category", prediction.by_category, prediction.peak_bytes))
    if plain is None:
        shown = dict(itertools.islice(prediction.by_module.items(), _NUM_ROWS))
        if (rest := sum(prediction.by_module.values()) - sum(shown.values())) > 0:
            shown[f"and {len(prediction.by_module) - len(shown)} others"] = rest
        console.print(_split_table("by module", shown, prediction.peak_bytes))
    else:
        console.print(_places_table(plain, prediction))
    if prediction.top:
        console.print(_top_table(prediction))
    for line in _pictures(prediction, plain, budget_bytes):
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
            f"({cuda.fragmentation:.2f}x), of which cuBLAS has {format_bytes(sum(cublas_workspaces()))}, and "
            f"{format_bytes(low)} to {format_bytes(high)} of context and other libraries"
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
    for each in prediction.top[:_NUM_ROWS]:
        shape = ", ".join(map(str, each.shape))
        where = f"{each.module}\n{each.line}" if each.line else each.module
        kind = each.category.replace("_", " ")
        table.add_row(
            escape(f"{each.count} x [{shape}] {each.dtype}"), format_bytes(each.num_bytes), kind, escape(where)
        )
    return table


class Place(NamedTuple):
    """What the peaks of two steps hold of one category in a module and its repetitions."""

    module: str
    category: str
    plain_bytes: int
    num_bytes: int
    plain_kind: str
    """The largest kind of tensors there in the plain step; empty where it is not known."""
    kind: str
    """The same in the other step."""


def places_of(plain: Prediction, prediction: Prediction) -> list[Place]:
    """Return what two peaks hold by module and category; what is largest in the plain step comes first."""
    before, after = _by_place(plain), _by_place(prediction)
    kinds_before, kinds_after = _largest_kinds(plain), _largest_kinds(prediction)
    return [
        Place(*place, before[place], after[place], kinds_before.get(place, ""), kinds_after.get(place, ""))
        for place in sorted({**before, **after}, key=lambda place: (-before[place], -after[place]))
    ]


def _by_place(prediction: Prediction) -> Counter[tuple[str, str]]:
    return Counter(
        {(module, category): size for module, split in prediction.by_place.items() for category, size in split.items()}
    )


def _largest_kinds(prediction: Prediction) -> dict[tuple[str, str], str]:
    kinds: dict[tuple[str, str], str] = {}
    for each in prediction.top:  # the largest first
        kinds.setdefault((each.module, each.category), f"{each.count} x {list(each.shape)} {each.dtype}")
    return kinds


_HOLD, _HOLD_HEADINGS = "what the peaks hold, and the largest tensors there", ("", "plain step", "with the settings")


def _places_rows(plain: Prediction, prediction: Prediction) -> Iterator[tuple[str, str, str]]:
    """Yield the cells of a table: the largest places, the others together, all."""
    places = places_of(plain, prediction)
    shown, rest = places[:_NUM_ROWS], places[_NUM_ROWS:]
    for each in shown:
        before, after = format_bytes(each.plain_bytes), format_bytes(each.num_bytes)
        name = f"{each.module}\n{each.category.replace('_', ' ')}"
        yield name, f"{before}\n{each.plain_kind}".rstrip(), f"{after}\n{each.kind}".rstrip()
    if rest:
        before, after = (format_bytes(sum(sizes)) for sizes in zip(*(each[2:4] for each in rest), strict=True))
        yield f"and {len(rest)} others", before, after
    yield "all", format_bytes(plain.peak_bytes), format_bytes(prediction.peak_bytes)


def _places_table(plain: Prediction, prediction: Prediction) -> Table:
    table = Table(title=_HOLD, title_justify="left", pad_edge=False)
    for number, heading in enumerate(_HOLD_HEADINGS):
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    for row in _places_rows(plain, prediction):
        table.add_row(*map(escape, row))
    return table


def _pictures(prediction: Prediction, plain: Prediction | None, budget_bytes: int | None) -> Iterator[str]:
    """Yield the lines of a picture, or of two to one scale."""
    if prediction.timeline is None:
        return
    steps = {"": prediction.timeline}
    if plain is not None and plain.timeline is not None:
        steps = dict(zip(_HOLD_HEADINGS[1:], (plain.timeline, prediction.timeline), strict=True))
    scale = max(max(line.total_bytes) for line in steps.values())
    if budget_bytes is not None and budget_bytes > scale:
        budget_bytes = None  # a line far above says nothing
    for title, line in steps.items():
        if title:
            yield f"{title}, {format_bytes(max(line.total_bytes))}"
        yield from timeline_lines(line, scale, budget_bytes)
    yield ", ".join(f"{_LETTERS[c]} {c}" for c in CATEGORIES).replace("_", " ")
    yield f"^ the peak{', - the budget' if budget_bytes else ''}"


def timeline_lines(
    timeline: Timeline, scale_bytes: int | None = None, budget_bytes: int | None = None
) -> Iterator[str]:
    """Yield the step from left to right as a stack of letters, the peak marked.

    Args:
        timeline: of the step.
        scale_bytes: what the whole height stands for; by default the peak. Rows above the peak are left out.
        budget_bytes: a line.

    >>> line = Timeline(events=(0, 1), by_category={c: (2 * MIB, 0) for c in CATEGORIES})
    >>> print(next(timeline_lines(line)))
     12.0 MiB |................................
    """
    totals = timeline.total_bytes
    peak, last = max(totals), max(1, timeline.events[-1])
    scale = scale_bytes or peak or 1
    columns: list[int] = []
    for column in range(_COLUMNS):  # the highest point of each stretch, the one before where it has none
        inside = [i for i, event in enumerate(timeline.events) if event * _COLUMNS // (last + 1) == column]
        columns.append(max(inside, key=totals.__getitem__) if inside else columns[-1])
    of_budget = None if budget_bytes is None else _row_of(budget_bytes, scale)
    num_rows = max(_row_of(peak, scale), of_budget or 0)
    for row in range(num_rows, 0, -1):
        height = (row - 0.5) / _ROWS * scale
        drawn = "".join(_letter(timeline, point, height) for point in columns)
        label = format_bytes(round(row / _ROWS * scale)) if row in (_ROWS, _ROWS // 2) else ""
        if row == of_budget:
            drawn, label = drawn.replace(" ", "-"), format_bytes(budget_bytes)
        yield f"{label:>9} |{drawn.rstrip()}"
    position = next(c for c, point in enumerate(columns) if totals[point] == peak)
    yield f"{'':>9} +{'-' * position}^{'-' * (_COLUMNS - position - 1)}"


def _row_of(num_bytes: int, scale_bytes: int) -> int:
    """Return the row, counted from 1 at the bottom, that a height ends in; the highest for what is above."""
    return min(_ROWS, max(1, -(-num_bytes * _ROWS // scale_bytes)))


def _letter(timeline: Timeline, point: int, height: float) -> str:
    below = 0
    for name in CATEGORIES:
        below += timeline.by_category[name][point]
        if below > height:
            return _LETTERS[name]
    return " "


def write_figure(
    prediction: Prediction, path: Path, *, plain: Prediction | None = None, budget_bytes: int | None = None
) -> Path:
    """Write the timeline as a page of its own: what is alive when, by category, the peak marked.

    Args:
        prediction: of the step.
        path: of the HTML file.
        plain: the step without any technique, drawn beside it to the same scale, above a table of what is left where.
        budget_bytes: a line.
    """
    steps = {"one predicted training step": prediction}
    if plain is not None:
        steps = dict(zip(_HOLD_HEADINGS[1:], (plain, prediction), strict=True))
    figure = new_figure("", "live, MiB", yaxis_rangemode="tozero")
    specs = [[{}] * len(steps), [{"type": "table", "colspan": 2}, None]][: len(steps)]
    figure.set_subplots(
        rows=len(steps),
        cols=len(steps),
        shared_yaxes=True,
        vertical_spacing=0.15,
        specs=specs,
        subplot_titles=[*steps, _HOLD],
    )
    for column, step in enumerate(steps.values(), 1):
        _draw_step(figure, step, column, budget_bytes)
    if plain is not None:
        columns = zip(*_places_rows(plain, prediction), strict=True)
        cells = [[html.escape(cell).replace("\n", "<br>") for cell in column] for column in columns]
        align = ["left", "right", "right"]
        figure.add_table(
            header={"values": _HOLD_HEADINGS, "align": align}, cells={"values": cells, "align": align}, row=2, col=1
        )
    figure.update_xaxes(title={"text": "allocations and frees of one step, first to last", "font": {"size": 13}})
    figure.update_layout(showlegend=True, margin={"t": 40})
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.write_html(path, include_plotlyjs=True)
    return path


def _draw_step(figure: Figure, prediction: Prediction, column: int, budget_bytes: int | None) -> None:
    """Draw one step's timeline into a column of the first row."""
    line, place = prediction.timeline, {"row": 1, "col": column}
    assert line is not None, "every prediction of a module has one"
    for name, colour in zip(CATEGORIES, CATEGORY_COLOURS, strict=True):
        figure.add_scatter(
            x=line.events,
            y=[size / MIB for size in line.by_category[name]],
            name=name.replace("_", " "),
            legendgroup=name,
            showlegend=column == 1,
            stackgroup=f"live {column}",
            mode="lines",
            line={"color": colour, "width": 0.5},
            **place,
        )
    peak = max(range(len(line.events)), key=line.total_bytes.__getitem__)
    text = f"peak {format_bytes(prediction.peak_bytes)}"
    figure.add_annotation(x=line.events[peak], y=line.total_bytes[peak] / MIB, text=text, **place)
    if budget_bytes is not None:
        figure.add_hline(
            budget_bytes / MIB, line={"dash": "dash"}, annotation_text="budget", annotation_position="top left", **place
        )
