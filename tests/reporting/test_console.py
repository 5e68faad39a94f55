import io
import re

import pytest
from rich.console import Console

from lightning_memsave import Applied, MemoryReport
from lightning_memsave.demo.run import RUNS
from lightning_memsave.reporting.console import comparison_table

MIB = 2**20
HEADINGS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer state": "optimizer_state",
    "activations": "activations",
    "temporary": "temporary",
    "data": "data",
}


def rendered(*args, width=80, **options):
    console = Console(file=io.StringIO(), width=width)
    console.print(comparison_table(*args, **options))
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
    names = list(RUNS)
    assert len(names) == 5
    extra = {
        "step time": [f"{i}.25x" for i in range(5)],
        "test accuracy": ["100.0%", "98.1%", "97.2%", "96.3%", "95.4%"],
    }
    text = rendered(reports_of(names), extra, title="WideResNet-28-2, digits, batch 100, seed 0")
    assert max(map(len, text.splitlines())) <= 80
    assert "WideResNet-28-2, digits, batch 100, seed 0" in text
    assert "…" not in text
    found = cells(text)
    assert found.pop("") == names
    assert found.pop("peak") == ["1000.0 MiB", "900.0 MiB", "800.0 MiB", "700.0 MiB", "600.0 MiB"]
    assert found.pop("factor") == ["1.00x", "1.11x", "1.25x", "1.43x", "1.67x"]
    for k, heading in enumerate(HEADINGS):
        assert found.pop(heading) == [f"{100 * k + 7 * i + 1}.0 MiB" for i in range(5)]
    assert found.pop("step time") == extra["step time"]
    assert found.pop("test accuracy") == extra["test accuracy"]
    assert found.pop("loss class") == ["exact", "unbiased", "changed", "exact", "unbiased"]
    assert found == {}


def test_what_was_not_measured_is_not_a_number():
    found = cells(rendered({"one": MemoryReport()}))
    assert found["peak"] == found["factor"] == found["weights"] == found["optimizer state"] == ["n/a"]


def test_zero_bytes_are_shown_as_zero():
    found = cells(rendered({"one": MemoryReport(peak_bytes=5, by_category={"weights": 5, "data": 0})}))
    assert found["data"] == ["0 B"]
    assert found["weights"] == ["5 B"]


@pytest.mark.parametrize("name", ["[red]8-bit", "b[/]", "[link=x]y[/link]", "<script>", "$a$", "a_b*c", "50 %"])
def test_names_are_shown_as_they_are(name):
    text = rendered({name: MemoryReport(peak_bytes=5)}, {name: [name]}, title=name, width=200)
    assert text.splitlines()[0].strip() == name
    found = cells(text)
    assert found[""] == [name]
    assert found[name] == [name]
