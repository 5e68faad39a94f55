"""Pictures of compared runs: every point is a figure of a report, and says whose it is."""

from __future__ import annotations

import html
import json

import pytest

from lightning_memsave import MemoryReport
from lightning_memsave.core.report import CATEGORIES, Timeline
from lightning_memsave.reporting.comparison import compare
from lightning_memsave.reporting.figures import CATEGORY_COLOURS, DASHES, RUN_COLOURS, SYMBOLS, draw
from lightning_memsave.reporting.runs import Run

MIB = 2**20


def run(name, peak=None, accuracy=None, timeline=None, peaks=(), **split):
    split = split or ({} if peak is None else {"weights": peak})
    report = MemoryReport(peak_bytes=peak, by_category=split, timeline=timeline)
    return Run(name=name, report=report, metrics={} if accuracy is None else {"val/accuracy": accuracy}, peaks=peaks)


def line(*totals):
    return Timeline(
        events=tuple(range(0, 2 * len(totals), 2)),
        by_category={name: totals if name == "data" else (0,) * len(totals) for name in CATEGORIES},
    )


def of_runs(figure):
    """The traces that belong to one run, by its position."""
    return {trace.meta["run"]: trace for trace in figure.data if "run" in trace.meta}


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([run("a"), run("b")], set()),
        ([run("a", 8)], {"breakdown"}),
        ([run("a", 8, 0.5)], {"breakdown", "tradeoff"}),
        ([run("a", 8, timeline=line(1, 8))], {"breakdown", "timeline"}),
        ([run("a", 8, peaks=((1, 8),))], {"breakdown"}),
        ([run("a", 8, peaks=((1, 7), (2, 8))), run("b", accuracy=0.5)], {"breakdown", "drift"}),
    ],
)
def test_there_is_a_picture_where_there_are_figures(runs, expected):
    assert set(draw(compare(runs))) == expected


def test_a_run_stands_at_its_peak_and_its_quality():
    runs = [run("a", 8 * MIB, 0.5), run("b", 4 * MIB, 0.75), run("c", 2 * MIB), run("d", 6 * MIB, 0.6)]
    figure = draw(compare(runs))["tradeoff"]
    found = of_runs(figure)
    assert {position: (*trace.x, *trace.y) for position, trace in found.items()} == {
        0: (8.0, 0.5),
        1: (4.0, 0.75),
        3: (6.0, 0.6),
    }
    (front,) = [trace for trace in figure.data if "runs" in trace.meta]
    assert (list(front.meta["runs"]), list(front.x), list(front.y)) == ([1], [4.0], [0.75])
    assert ["on the front" in found[position].customdata[0] for position in (0, 1, 3)] == [False, True, False]
    assert str(8 * MIB) in found[0].customdata[0]


def test_bars_are_the_bytes_of_each_category():
    splits = [{name: (i + 1) * (k + 1) * MIB for k, name in enumerate(CATEGORIES)} for i in range(2)]
    runs = [run(f"run {i}", sum(split.values()), **split) for i, split in enumerate(splits)]
    figure = draw(compare([runs[0], run("not measured"), runs[1]]))["breakdown"]
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert [bar.name.replace(" ", "_") for bar in bars] == list(CATEGORIES)
    assert [tuple(bar.x) for bar in bars] == [(k + 1, 2 * (k + 1)) for k in range(len(CATEGORIES))]
    assert all(list(bar.meta["runs"]) == [0, 2] and list(bar.y) == ["1 run 0", "3 run 1"] for bar in bars)
    assert [bar.marker.color for bar in bars] == list(CATEGORY_COLOURS)


def test_lines_are_live_bytes_through_the_step():
    figure = draw(compare([run("a", 8 * MIB), run("b", 8 * MIB, timeline=line(0, 8 * MIB, 2 * MIB))]))["timeline"]
    ((position, trace),) = of_runs(figure).items()
    assert position == 1
    assert list(trace.x) == [0.0, 0.5, 1.0]
    assert list(trace.y) == [0.0, 8.0, 2.0]
    assert "data 8.0 MiB" in trace.text[1]


def test_peaks_of_each_measured_step_show_whether_they_grow():
    figure = draw(compare([run("a", MIB), run("b", 3 * MIB, peaks=((10, MIB), (20, 3 * MIB)))]))["drift"]
    ((position, trace),) = of_runs(figure).items()
    assert (position, list(trace.x), list(trace.y)) == (1, [10, 20], [1.0, 3.0])


def test_no_run_is_told_by_its_colour_alone_and_many_runs_can_be_drawn():
    count = len(RUN_COLOURS)
    assert len(set(RUN_COLOURS)) == len(set(SYMBOLS)) == count
    assert len(set(CATEGORY_COLOURS)) == len(CATEGORIES)
    figure = draw(compare([run(str(i), 8 + i, 0.5 + i / 100) for i in range(3 * count)]))["tradeoff"]
    traces = of_runs(figure)
    assert len(traces) == 3 * count
    looks = [(traces[i].marker.color, traces[i].marker.symbol, traces[i].line.dash) for i in range(count)]
    assert len({colour for colour, _, _ in looks}) == len({symbol for _, symbol, _ in looks}) == count
    assert {dash for _, _, dash in looks} == set(DASHES)


@pytest.mark.parametrize("name", ["<b>bold</b>", "a&b", "<script>1</script>"])
def test_names_are_text(name):
    figures = draw(compare([run(name, 8, 0.5, line(1, 8), ((1, 7), (2, 8)))]))
    assert set(figures) == {"tradeoff", "breakdown", "timeline", "drift"}
    for figure in figures.values():
        shown = json.dumps(json.loads(figure.to_json()), ensure_ascii=False)
        assert name not in shown
        assert html.escape(name) in shown


def test_a_name_stands_above_its_bar_in_lines_that_end_between_words():
    name = "microbatch=10, activations=[exact, int4], checkpointing=blocks, optimizer_state=4bit"
    (trace,) = [trace for trace in draw(compare([run(name, 8 * MIB)]))["breakdown"].data if trace.type == "scatter"]
    lines = trace.text[0].split("<br>")
    written = [line for line in lines if line != "\u00a0"]
    assert " ".join(written) == f"1 {name}: 8.0\u00a0MiB"
    assert max(map(len, written)) <= 44, "what a phone has room for"
    assert len(lines) == 2 * len(written) + 1, "the middle of the text is the bar"
    assert lines[: len(written)] == written


def test_quality_that_hardly_differs_is_not_drawn_as_if_it_did():
    def shown(*values):
        return draw(compare([run("a", 8, value) for value in values]))["tradeoff"].layout.yaxis.range

    assert shown(0.5, 0.5) == pytest.approx((0.475, 0.525))
    assert shown(0.5, 0.502) == pytest.approx((0.47595, 0.52605))
    assert shown(0.0) == pytest.approx((-0.05, 0.05))
    assert shown(0.0, 1.0) == pytest.approx((-0.1, 1.1))


def test_there_are_no_half_steps():
    few = draw(compare([run("a", 8, peaks=((1, 7), (2, 8)))]))["drift"]
    many = draw(compare([run("a", 8, peaks=((1, 7), (200, 8)))]))["drift"]
    assert (few.layout.xaxis.dtick, many.layout.xaxis.dtick) == (1, None)


def test_runs_whose_names_are_numbers_have_a_bar_each():
    figures = draw(compare([run(name, peak=8) for name in ("8", "16", "0.1")]))
    assert figures["breakdown"].layout.yaxis.type == "category"
    assert list(figures["breakdown"].data[0].y) == ["1 8", "2 16", "3 0.1"]
