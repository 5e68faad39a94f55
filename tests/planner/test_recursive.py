"""Halves of halves: memory that grows like the logarithm."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from lightning_memsave import Checkpointing, apply_checkpointing
from lightning_memsave.measuring.step_trace import trace_step
from lightning_memsave.planner.checkpointing.recursive import plan_recursive
from tests.planner.chains import assert_same_bits, chain, planner_of, trace_of
from tests.steps import Step, squares


def above_the_weights(step, **options):
    """Measured with a plan, less weights, batch and gradients, which grow with n whatever is kept."""
    regions = planner_of(step, **options).plan().config.regions
    applied = apply_checkpointing(step.model, Checkpointing(regions=regions))
    measured = step.measured()
    applied.undo()
    return measured.peak_bytes - measured.by_category["weights"] - measured.by_category["data"]


def test_recursive_grows_like_the_logarithm():
    """Each doubling costs one more boundary of 256 rows of 4: from 16 to 64 to 256 blocks, two of them each."""
    frozen = {}
    for num_blocks in (16, 64, 256):
        step = chain((1,) * num_blocks, width=4, batch_size=256)
        frozen[num_blocks] = above_the_weights(step, method="recursive")
    boundary = 256 * 4 * 4
    gradients = (4 * 1 + 1 + 1 * 4 + 4) * 4  # of one block
    for small, large in ((16, 64), (64, 256)):
        assert frozen[large] - frozen[small] <= 2 * boundary + (large - small) * gradients
    assert frozen[256] < 16 * boundary + 256 * gradients  # and not 256 boundaries


def test_recursive_ends_where_calls_keep_nothing():
    model = nn.Sequential(nn.Linear(4, 4), *(nn.Identity() for _ in range(5)), nn.Linear(4, 4))
    step = Step(model, {"x": torch.randn(2, 4)}, squares)
    assert_same_bits(step, planner_of(step, method="recursive").plan().config.regions or [["0"]])


def tanh_chain(num_calls):
    model, x = nn.Sequential(*(nn.Tanh() for _ in range(num_calls))), torch.randn(4, 8, requires_grad=True)
    return trace_step(model, lambda: model(x).sum().backward(), held=[x])


def test_halves_of_eight_equal_calls():
    regions = ["".join(candidate.names) for candidate in plan_recursive(tanh_chain(8))]
    assert regions == ["0123", "01", "0", "2", "45", "4", "6"]


@pytest.mark.parametrize("num_calls", [2, 3, 7, 16, 33])
def test_groups_are_nested_or_apart_and_no_call_is_in_more_than_the_logarithm_of_them(num_calls):
    regions = [set(candidate.names) for candidate in plan_recursive(tanh_chain(num_calls))]
    for first, second in itertools.combinations(regions, 2):
        assert first >= second or not first & second  # the outer ones come first
    depth = max(sum(str(i) in region for region in regions) for i in range(num_calls))
    assert depth == math.ceil(math.log2(num_calls))
    assert not any(str(num_calls - 1) in region for region in regions)  # it would be run again at once


def test_halves_are_of_bytes():
    """The first layer keeps as much as all others together."""
    step = chain((7 * 33, *(32,) * 7), width=1)  # and an output of one number each
    first, *_ = plan_recursive(trace_of(step))
    assert first.names == ("0",)


def test_modules_that_are_called_several_times_are_regions_of_their_own():
    first, second = nn.Tanh(), nn.Tanh()
    x = torch.randn(4, 8, requires_grad=True)
    model = nn.Sequential(first, second, first, nn.Sigmoid(), nn.Sigmoid())
    trace = trace_step(model, lambda: model(x).sum().backward(), held=[x])
    shared = [c for c in plan_recursive(trace) if c.names == ("0",)]
    assert [len(c.runs) for c in shared] == [2]
