"""Cuts of a chain near the root of its length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_memsave.measuring.step_trace import CallRecord
from lightning_memsave.planner.checkpointing.candidates import singles
from lightning_memsave.planner.checkpointing.replay import Replay
from lightning_memsave.planner.checkpointing.sqrt import cut_by_size, plan_sqrt, without_idle
from tests.planner.chains import chain, peak_with, planner_of, trace_of
from tests.steps import Step, squares


@pytest.mark.parametrize("num_blocks", [16, 36, 64])
def test_sqrt_cuts_an_equal_chain_near_the_root(num_blocks):
    """A chain whose blocks keep little more than their output: regions of one block would gain almost nothing."""
    step = chain((4,) * num_blocks)
    plan = planner_of(step, method="sqrt").plan()
    lengths = [len(region) for region in plan.config.regions]
    root = math.sqrt(num_blocks)
    assert root / 2 <= len(lengths) <= 2 * root
    assert root / 2 <= max(lengths) <= 2 * root
    blocks = [[str(i)] for i in range(num_blocks)]
    assert peak_with(step, plan.config.regions) < peak_with(step, blocks) < step.measured().peak_bytes


def calls(sizes):
    found = [CallRecord(str(i), i, None, i, i, (), frozenset(), i + 1, i + 1) for i in range(len(sizes))]
    return found, dict(enumerate(sizes))


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([1, 1, 1, 1, 1], 1, ["01", "23", "4"]),
        ([1, 1, 1, 1], 1, ["01", "23"]),
        ([5, 1, 1, 5], 4, ["0", "123"]),
        ([2, 2, 2], 0, ["0", "1", "2"]),
        ([2, 2, 2], 100, ["012"]),
        ([0, 0, 3, 0], 2, ["012", "3"]),
        ([], 1, []),
    ],
)
def test_a_region_ends_where_it_holds_more_than_the_limit(sizes, limit, expected):
    run, by_index = calls(sizes)
    assert ["".join(c.names) for c in cut_by_size(run, by_index, limit)] == expected


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(0, 40))
def test_a_cut_leaves_nothing_out_and_no_region_could_have_ended_before(sizes, limit):
    run, by_index = calls(sizes)
    regions = [[by_index[int(name)] for name in c.names] for c in cut_by_size(run, by_index, limit)]
    assert [size for region in regions for size in region] == sizes
    for region in regions:
        assert sum(region[:-1]) <= limit
    assert all(sum(region) > limit for region in regions[:-1])


def test_a_region_that_lowers_no_peak_is_left_out():
    trace = trace_of(chain())
    replay = Replay(trace)
    effects = [replay.effect_of(c) for c in singles(trace) if len(c.names[0]) <= 2]
    assert len(effects) == 12
    chosen = without_idle(replay, effects)
    assert replay.peak_bytes(chosen) <= replay.peak_bytes(effects)
    last = max(chosen, key=lambda effect: effect.candidate.runs[0][0].first_op)
    assert len(chosen) < len(effects), "the last region is repeated at once"
    assert replay.peak_bytes([e for e in chosen if e is not last]) > replay.peak_bytes(chosen)
    assert without_idle(replay, []) == []


def test_nothing_is_cut_where_no_region_lowers_the_peak():
    model = nn.Sequential(nn.Linear(8, 8))
    trace = trace_of(Step(model, {"x": torch.randn(4, 8)}, squares))
    assert plan_sqrt(trace, Replay(trace)) == []


def test_blocks_that_are_containers_and_run_twice_in_a_step_are_cut_as_blocks():
    """As in siamese training, where one network sees two views."""
    parts = (lambda: nn.Linear(32, 32), lambda: nn.GroupNorm(4, 32), nn.ReLU)
    model = nn.Sequential(*(nn.Sequential(*(make() for make in parts * 2)) for _ in range(6)))

    def two_views(model, batch):
        return sum((squares(model, {"x": batch["x"] + view}) for view in (0, 1)), torch.zeros(()))

    step = Step(model, {"x": torch.randn(256, 32)}, two_views)
    plan, blocks = planner_of(step, method="sqrt").plan(), [[str(i)] for i in range(6)]
    assert peak_with(step, plan.config.regions) <= peak_with(step, blocks) < 0.5 * step.measured().peak_bytes
