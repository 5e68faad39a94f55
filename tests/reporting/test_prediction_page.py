"""A prediction as tables, as a picture of letters and as a page."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lightning_memsave.core.report import CATEGORIES, Timeline
from lightning_memsave.core.units import GIB, MIB, format_bytes
from lightning_memsave.measuring.module_attribution import TopTensor
from lightning_memsave.measuring.timeline import timeline
from lightning_memsave.reporting.prediction_page import Place, places_of, print_prediction, timeline_lines, write_figure
from lightning_memsave.simulation.predicted_step import CudaBytes, Prediction

LETTERS = dict(zip(CATEGORIES, "WGOAT.", strict=True))
STEP = timeline(
    [(2 * MIB, "weights"), (MIB, "data")],
    [(3 * MIB, "activations"), (2 * MIB, "temporary"), (-2 * MIB, "temporary"), (MIB, "gradients")],
)


def prediction(**changes):
    by_module = {f"blocks.{i}": (20 - i) * MIB for i in range(12)}
    top = TopTensor(
        num_bytes=3 * MIB, count=2, shape=(4, 8), dtype="bfloat16", category="optimizer_state", line="a/b.py:7 forward",
        module="blocks.0",
    )  # fmt: skip
    fields = {
        "peak_bytes": sum(by_module.values()),
        "by_category": {**dict.fromkeys(CATEGORIES, 0), "optimizer_state": sum(by_module.values())},
        "by_module": by_module,
        "timeline": STEP,
        "top": (top,),
    }
    return Prediction(**{**fields, **changes})


PLAIN = Prediction(
    peak_bytes=9 * MIB,
    by_category={**dict.fromkeys(CATEGORIES, 0), "activations": 8 * MIB, "weights": MIB},
    by_place={"blocks.*": {"activations": 8 * MIB, "weights": MIB}},
    timeline=timeline([(MIB, "weights")], [(4 * MIB, "activations"), (4 * MIB, "activations")]),
    top=(
        TopTensor(
            num_bytes=8 * MIB, count=2, shape=(1024, 1024), dtype="float32", category="activations", line="",
            module="blocks.*",
        ),
    ),
)  # fmt: skip
CODED = Prediction(
    peak_bytes=4 * MIB,
    by_category={**dict.fromkeys(CATEGORIES, 0), "activations": 2 * MIB, "weights": MIB, "temporary": MIB},
    by_place={"blocks.*": {"activations": 2 * MIB, "weights": MIB}, "head": {"temporary": MIB}},
    timeline=timeline([(MIB, "weights")], [(2 * MIB, "activations"), (MIB, "temporary")]),
    top=(
        TopTensor(
            num_bytes=2 * MIB, count=1, shape=(2048, 1024), dtype="uint8", category="activations", line="",
            module="blocks.*",
        ),
    ),
)  # fmt: skip


def printed(made, device_bytes=None, width=100, **options):
    console = Console(file=io.StringIO(), width=width)
    print_prediction(made, console, device_bytes, **options)
    return console.file.getvalue()


def test_what_the_plain_peak_holds_is_told_beside_what_is_left_of_it():
    assert places_of(PLAIN, CODED) == [
        Place("blocks.*", "activations", 8 * MIB, 2 * MIB, "2 x [1024, 1024] float32", "1 x [2048, 1024] uint8"),
        Place("blocks.*", "weights", MIB, MIB, "", ""),
        Place("head", "temporary", 0, MIB, "", ""),
    ]
    text = printed(CODED, plain=PLAIN)
    assert re.search(r"blocks\.\* +│ +8\.0 MiB │ +2\.0 MiB", text)
    assert re.search(r"activations │ 2 x \[1024, 1024\] float32 │ 1 x \[2048, 1024\] uint8", text)
    assert re.search(r"all +│ +9\.0 MiB │ +4\.0 MiB", text)
    assert "by module" not in text
    few = Prediction(peak_bytes=66, by_place={f"layer{i}": {"weights": i} for i in range(12)})
    assert re.search(r"and 2 others +│ +1 B │ +1 B", printed(few, plain=few))


def test_two_steps_are_drawn_to_one_scale_with_the_budget_as_a_line():
    lines = printed(CODED, plain=PLAIN, budget_bytes=5 * MIB).splitlines()
    start = lines.index("plain step, 9.0 MiB")
    assert lines[start + 1 :] == [
        "  9.0 MiB |" + " " * 42 + "A" * 22,
        *["          |" + " " * 42 + "A" * 22] * 2,
        "  5.0 MiB |" + "-" * 42 + "A" * 22,
        "  4.5 MiB |" + " " * 21 + "A" * 43,
        *["          |" + " " * 21 + "A" * 43] * 2,
        "          |" + "W" * 64,
        "          +" + "-" * 42 + "^" + "-" * 21,
        "with the settings, 4.0 MiB",
        "  5.0 MiB |" + "-" * 64,
        "  4.5 MiB |" + " " * 42 + "T" * 22,
        *["          |" + " " * 21 + "A" * 43] * 2,
        "          |" + "W" * 64,
        "          +" + "-" * 42 + "^" + "-" * 21,
        "W weights, G gradients, O optimizer state, A activations, T temporary, . data",
        "^ the peak, - the budget",
    ]


def test_a_budget_above_all_steps_is_no_line():
    assert "the budget" not in printed(CODED, plain=PLAIN, budget_bytes=GIB)
    alone = printed(CODED, budget_bytes=3 * MIB)
    assert "  3.0 MiB |" in alone
    assert "- the budget" in alone


def test_the_page_of_two_steps_has_both_the_budget_and_what_is_left(tmp_path):
    text = write_figure(CODED, tmp_path / "page.html", plain=PLAIN, budget_bytes=5 * MIB).read_text("utf-8")
    assert all(each in text for each in ("peak 9.0 MiB", "peak 4.0 MiB", "plain step", "with the settings", "budget"))
    assert "1 x [2048, 1024] uint8" in text
    assert text.count('"stackgroup":"live 1"') == text.count('"stackgroup":"live 2"') == len(CATEGORIES)


def test_every_figure_is_printed():
    text = printed(prediction(flags=("an assumption [about] it",)))
    total = sum((20 - i) * MIB for i in range(12))
    assert f"predicted peak of a training step: {format_bytes(total)} of tensors (of fake tensors)" in text
    assert "note: an assumption [about] it" in text
    assert re.search(rf"optimizer state +│ +{re.escape(format_bytes(total))} │ 100\.0 %", text)
    for i in range(10):
        assert re.search(rf"blocks\.{i} +│ +{20 - i}\.0 MiB │ +{100 * (20 - i) * MIB / total:.1f} %", text)
    assert re.search(r"and 2 others +│ +19\.0 MiB", text)  # 10 and 9
    assert re.search(r"2 x \[4, 8\] bfloat16 +│ 3\.0 MiB │ optimizer state +│ blocks\.0", text)
    assert "a/b.py:7 forward" in text
    assert "fit" not in text
    assert all(f"{letter} {name.replace('_', ' ')}" in text for name, letter in LETTERS.items())


def test_what_was_measured_says_so_and_what_is_not_there_is_left_out():
    text = printed(Prediction(peak_bytes=5, by_category={"data": 5}, source="measured"))
    assert "5 B of tensors (measured" in text
    assert "largest tensors" not in text
    assert "the peak\n" not in text


@pytest.mark.parametrize("name", ["[red]head", "a[/]b", "[link=x]y"])
def test_names_of_modules_are_shown_as_they_are(name):
    assert name in printed(prediction(by_module={name: 3}))


@pytest.mark.parametrize(
    ("device_bytes", "answer"),
    [(3 * GIB, "fits in 3.0 GiB"), (2 * GIB, "may or may not fit in 2.0 GiB"), (GIB, "does NOT fit in 1.0 GiB")],
)
def test_whether_it_fits_is_said_with_what_is_needed(device_bytes, answer):
    cuda = CudaBytes(allocated_bytes=GIB, reserved_bytes=GIB, context_bytes=(GIB // 2, 3 * GIB // 2))
    text = printed(prediction(cuda=cuda), device_bytes)
    assert f"{answer}: 1.5 GiB to 2.5 GiB needed" in text
    told = (
        "on CUDA: 1.0 GiB allocated, 1.0 GiB reserved (1.00x), of which cuBLAS has 64.0 MiB, and 512.0 MiB to 1.5 GiB"
    )
    assert told in " ".join(text.split())
    assert "expandable_segments" not in text
    total = format_bytes(prediction().peak_bytes)
    assert f"fits in 3.0 GiB: {total} needed" in printed(prediction(), 3 * GIB)


def test_reserved_bytes_that_lie_in_pieces_are_told_with_the_setting_that_may_spare_them():
    text = printed(prediction(cuda=CudaBytes(allocated_bytes=10 * GIB, reserved_bytes=11 * GIB)))
    assert "10.0 GiB allocated, 11.0 GiB reserved (1.10x)" in text
    assert "the other 1.0 GiB lie between tensors, in pieces: PYTORCH_ALLOC_CONF=expandable_segments:True" in text
    assert CudaBytes(allocated_bytes=0, reserved_bytes=0).fragmentation == 1.0


CHANGES = st.lists(st.tuples(st.integers(0, 50), st.sampled_from(CATEGORIES)), min_size=1, max_size=400)


@given(CHANGES)
def test_each_column_is_a_stack_as_high_as_its_bytes(allocations):
    changes = [change for size, name in allocations for change in ((size, name), (-(size // 2), name))]
    line = timeline([(1, "weights")], changes)
    *rows, axis = timeline_lines(line)
    peak = max(line.total_bytes)
    drawn = [row.partition("|")[2].ljust(64) for row in rows]
    assert len(rows) == 8
    assert all(len(row) == 64 for row in drawn)
    heights = [sum(row[column] != " " for row in drawn) for column in range(64)]
    assert max(heights) == 8
    assert heights[axis.index("^") - 11] == 8
    stacks = ["".join(row[column] for row in reversed(drawn)).rstrip() for column in range(64)]
    order = "".join(LETTERS.values())
    assert all(list(map(order.index, stack)) == sorted(map(order.index, stack)) for stack in stacks)
    assert all(" " not in stack for stack in stacks)
    possible = {round(8 * total / peak + 1e-9) for total in line.total_bytes} | {
        round(8 * total / peak - 1e-9) for total in line.total_bytes
    }
    assert set(heights) <= possible


def test_letters_stand_where_their_bytes_are():
    line = Timeline(
        events=(0, 1),
        by_category={name: {"weights": (2, 2), "activations": (0, 6)}.get(name, (0, 0)) for name in CATEGORIES},
    )
    *rows, axis = timeline_lines(line)
    columns = [row.partition("|")[2] for row in rows]
    assert columns[:6] == [" " * 32 + "A" * 32] * 6
    assert columns[6:] == ["W" * 64] * 2
    assert axis.strip() == "+" + "-" * 32 + "^" + "-" * 31


def test_the_page_has_every_moment_and_names_the_peak(tmp_path):
    path = write_figure(prediction(peak_bytes=8 * MIB), tmp_path / "new" / "page.html")
    text = path.read_text("utf-8")
    assert "peak 8.0 MiB" in text
    assert all(f'"name":"{name.replace("_", " ")}"' in text for name in CATEGORIES)
    assert "src=" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "plotly.js v" in text, "it stands alone"
