"""Bars and lines of a running training, against the bytes that they show."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memsave import MemoryReport
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.core.units import format_bytes
from lightning_memsave.reporting.progress_text import memory_line, memory_text

SPLITS = st.lists(st.integers(0, 10**9), min_size=6, max_size=6).filter(any)


def report(sizes, **others):
    return MemoryReport(peak_bytes=sum(sizes), by_category=dict(zip(CATEGORIES, sizes, strict=True)), **others)


def bars(text):
    return [re.search(r"B ([a-z]*)", line)[1] for line in text.plain.splitlines()]


@given(SPLITS)
def test_a_category_is_as_wide_as_its_bytes_to_one_letter(sizes):
    full, now = bars(memory_text(report(sizes), dict(zip(CATEGORIES, sizes, strict=True))))
    assert len(full) == 16
    assert now == full
    letters = "".join(name[0] for name in CATEGORIES)
    assert len(set(letters)) == len(CATEGORIES), "a letter is one category"
    assert [letter for letter, _ in itertools.groupby(full)] == [each for each in letters if each in full]
    for letter, size in zip(letters, sizes, strict=True):
        assert abs(full.count(letter) - 16 * size / sum(sizes)) <= 1


def test_the_last_step_is_shown_against_the_highest():
    full, now = bars(memory_text(report([4, 0, 0, 12, 0, 0]), {"weights": 4, "activations": 4}))
    assert (full, now) == ("wwww" + 12 * "a", "wwwwaaaa")


def test_colours_are_those_of_letters():
    text = memory_text(report([4, 0, 0, 12, 0, 0]), {"weights": 4})
    styles = {(text.plain[span.start], str(span.style)) for span in text.spans}
    by_letter = dict(styles)
    assert len(by_letter) == len(styles) == 2
    assert by_letter["w"] != by_letter["a"]


@pytest.mark.parametrize("current", [{}, {"weights": 3, "data": 2}])
def test_figures_stand_beside_the_bars(current):
    made = report([2**20, 0, 0, 2**20, 0, 0], microbatch_size=8, baseline_peak_bytes=5 * 2**20)
    first, second = memory_text(made, current).plain.splitlines()
    assert first.startswith("peak  2.0 MiB ")
    assert first.endswith(" microbatch 8")
    assert second.startswith(f"now {format_bytes(sum(current.values())):>9} ")
    assert second.endswith(" 2.50x below the baseline")
    assert first.index("microbatch") == second.index("2.50x"), "one below the other"


def test_a_line_has_the_largest_category_first_and_leaves_out_what_is_empty():
    made = report([10, 0, 30, 2048, 0, 7], microbatch_size=8, baseline_peak_bytes=4190)
    assert memory_line(made, {"weights": 10, "data": 5}) == (
        "peak 2.0 KiB (activations 2.0 KiB, optimizer state 30 B, weights 10 B, data 7 B), now 15 B, "
        "microbatch 8, 2.00x below the baseline"
    )
    assert memory_line(report([10, 0, 0, 0, 0, 0]), {}) == "peak 10 B (weights 10 B), now 0 B"


def test_before_the_first_measurement_no_figure_is_shown():
    for text in (memory_text(MemoryReport(), {}).plain, memory_line(MemoryReport(), {"data": 5})):
        assert "not measured" in text
        assert not re.search(r"\d", text)
