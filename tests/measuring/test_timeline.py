"""A step as a short line, against every moment of it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.measuring.timeline import MAX_POINTS, timeline

CHANGES = st.lists(st.tuples(st.integers(-50, 60), st.sampled_from(CATEGORIES)), max_size=1500)


def moments(start, changes):
    """Live bytes by category before the step and after each of its changes."""
    live = dict.fromkeys(CATEGORIES, 0)
    found = []
    for num_bytes, category in start:
        live[category] += num_bytes
    found.append(dict(live))
    for num_bytes, category in changes:
        live[category] += num_bytes
        found.append(dict(live))
    return found


@given(start=st.lists(st.tuples(st.integers(0, 99), st.sampled_from(CATEGORIES)), max_size=5), changes=CHANGES)
def test_each_point_is_a_moment_and_the_highest_of_its_stretch(start, changes):
    line, all_moments = timeline(start, changes), moments(start, changes)
    assert list(line.by_category) == list(CATEGORIES)
    for point, event in enumerate(line.events):
        assert {category: line.by_category[category][point] for category in CATEGORIES} == all_moments[event]
    assert len(line.events) <= MAX_POINTS
    assert all(a < b for a, b in itertools.pairwise(line.events))
    length = -(-len(all_moments) // MAX_POINTS)
    totals = [sum(moment.values()) for moment in all_moments]
    highest = [max(totals[begin : begin + length]) for begin in range(0, len(totals), length)]
    assert list(line.total_bytes) == highest


def test_a_short_step_is_told_in_full():
    line = timeline([(5, "weights"), (2, "weights")], [(3, "data"), (-3, "data"), (4, "temporary")])
    assert line.events == (0, 1, 2, 3)
    assert line.by_category["weights"] == (7, 7, 7, 7)
    assert line.by_category["data"] == (0, 3, 0, 0)
    assert line.total_bytes == (7, 10, 7, 11)


def test_a_peak_of_one_moment_is_there():
    changes = [(1, "data"), (-1, "data")] * 5000
    changes[7776:7776] = [(10**9, "activations"), (-(10**9), "activations")]
    line = timeline([(1, "weights")], changes)
    assert max(line.total_bytes) == 10**9 + 1
    assert line.events[line.total_bytes.index(10**9 + 1)] == 7777


def test_a_step_without_changes_is_one_point():
    line = timeline([], [])
    assert line.events == (0,)
    assert line.total_bytes == (0,)
