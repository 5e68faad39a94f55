import dataclasses
import io
import re

import pytest
from rich.console import Console

from lightning_memsave import Applied, MemoryReport
from lightning_memsave.demo.run import RUNS
from lightning_memsave.reporting.comparison import compare
from lightning_memsave.reporting.console import print_comparison, print_settings, show_summary
from lightning_memsave.reporting.runs import Run, run_of

MIB = 2**20
HEADINGS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer state": "optimizer_state",
    "activations": "activations",
    "temporary": "temporary",
    "data": "data",
}


def rendered(reports, metrics=None, width=80, title=""):
    """All tables of a comparison, as printed."""
    metrics = metrics or {}
    runs = [run_of(name, report, metrics.get(name, {}), {}) for name, report in reports.items()]
    console = Console(file=io.StringIO(), width=width)
    print_comparison(compare(runs), console, title)
    return console.file.getvalue()


def cells(text):
    """The table as a dictionary from heading to cells; wrapped lines are joined. The header's heading is empty."""
    rows: list[list[str]] = []
    for line in text.splitlines():
        if not re.match("[┃│]", line):
            continue
        parts = [part.strip() for part in re.split("[┃│]", line)[1:-1]]
        # A line goes on when it has no figure in its last column; all lines of the header belong together.
        if rows and (line.startswith("┃") or not parts[-1]):
            rows[-1] = [f"{above} {part}".strip() for above, part in zip(rows[-1], parts, strict=True)]
        else:
            rows.append(parts)
    return {row[0]: row[1:] for row in rows}


def reports_of(names):
    return {
        name: MemoryReport(
            peak_bytes=(1000 - 100 * i) * MIB,
            by_category={key: (100 * k + 7 * i + 1) * MIB for k, key in enumerate(HEADINGS.values())},
            baseline_peak_bytes=1000 * MIB,
            applied=(Applied(technique="x", summary="x", loss_class=("exact", "unbiased", "changed")[i % 3]),),
        )
        for i, name in enumerate(names)
    }


def test_five_runs_fit_80_columns_and_nothing_is_cut_off():
    names = [*RUNS][:5]
    reports = {
        name: dataclasses.replace(report, step_seconds=0.5 * (i + 1))
        for i, (name, report) in enumerate(reports_of(names).items())
    }
    metrics = {name: {"test/accuracy": 1 - i / 7} for i, name in enumerate(names)}
    text = rendered(reports, metrics, title="WideResNet-28-2, digits, batch 100, seed 0")
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("┏") == 1, "one table"
    assert "WideResNet-28-2, digits, batch 100, seed 0" in text
    assert "…" not in text
    found = cells(text)
    assert found.pop("") == [f"{name} ●" for name in names]  # each is smaller and worse than the one before
    assert found.pop("peak") == ["1000.0 MiB", "900.0 MiB", "800.0 MiB", "700.0 MiB", "600.0 MiB"]
    assert found.pop("peak bytes") == [str((1000 - 100 * i) * MIB) for i in range(5)]
    assert found.pop("factor") == ["1.00x", "1.11x", "1.25x", "1.43x", "1.67x"]
    for k, heading in enumerate(HEADINGS):
        assert found.pop(heading) == [f"{100 * k + 7 * i + 1}.0 MiB" for i in range(5)]
    assert found.pop("step time") == ["1.00x", "2.00x", "3.00x", "4.00x", "5.00x"]
    assert found.pop("test/accuracy") == ["1", "0.8571", "0.7143", "0.5714", "0.4286"]
    assert found.pop("seconds per step") == ["0.5", "1", "1.5", "2", "2.5"]
    assert found.pop("loss class") == ["exact", "unbiased", "changed", "exact", "unbiased"]
    assert found == {}


@pytest.mark.parametrize("width", [40, 80, 200])
def test_many_runs_come_in_several_tables_and_no_figure_is_lost(width):
    names = [f"run {i}" for i in range(10)]
    text = rendered(reports_of(names), width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    tables = [cells("┏" + part) for part in text.split("┏")[1:]]
    assert len(tables) == {40: 10, 80: 2, 200: 1}[width] or width == 40
    assert [name for table in tables for name in table[""]] == names
    expected = [str((1000 - 100 * i) * MIB) for i in range(10)]
    assert [size for table in tables for size in table["peak bytes"]] == expected


def test_what_was_not_measured_is_not_a_number():
    found = cells(rendered({"one": MemoryReport()}))
    assert found["peak"] == found["peak bytes"] == ["n/a"]
    assert set(found) == {"", "peak", "peak bytes", "loss class"}, "what no run has is no row"


def test_zero_bytes_are_shown_as_zero():
    found = cells(rendered({"one": MemoryReport(peak_bytes=5, by_category={"weights": 5, "data": 0})}))
    assert found["data"] == ["0 B"]
    assert found["weights"] == ["5 B"]


@pytest.mark.parametrize("name", ["[red]8-bit", "b[/]", "[link=x]y[/link]", "<script>", "$a$", "a_b*c", "50 %"])
def test_names_are_shown_as_they_are(name):
    text = rendered({name: MemoryReport(peak_bytes=5)}, title=name, width=200)
    assert text.splitlines()[0].strip() == name
    assert cells(text)[""] == [name]


def test_settings_that_differ_are_said_of_each_run():
    runs = [
        Run(name="a[b]", report=MemoryReport(), config={"memsave": {"size": 10, "same": 1}, "lr": 0.1, "gone": None}),
        Run(name="c", report=MemoryReport(), config={"memsave": {"same": 1}, "lr": 0.2, "text": "[x]"}),
        Run(name="d", report=MemoryReport(), config={"memsave": {"same": 1}}),
    ]
    console = Console(file=io.StringIO(), width=80)
    print_settings(compare(runs), console)
    assert console.file.getvalue().splitlines() == [
        "a[b]: memsave.size=10; lr=0.1",
        "c: lr=0.2; text=[x]",
        "d: nothing that another run has not",
    ]


def test_long_sentences_are_folded_in_the_box_and_whole_in_the_report():
    reason = "microbatches change the result of " + ", ".join(f"m.layer.{n} (Dropout: other masks)" for n in range(20))
    applied = Applied(technique="microbatching", summary="parts", loss_class="changed", reasons=(reason,), restore=None)
    report = MemoryReport(peak_bytes=2**20, by_category={"weights": 2**20}, applied=(applied,))
    assert f"  {reason}" in str(report).splitlines()
    console = Console(file=io.StringIO(), width=60)
    show_summary(report, console=console)
    lines = [line.strip("│╭╮╰╯─ ") for line in console.file.getvalue().splitlines()]
    folded = lines[lines.index("microbatches change the result of m.layer.0 (Dropout:") :][:3]
    assert folded[1].startswith("other masks)")
    assert folded[2].endswith(" ...")
