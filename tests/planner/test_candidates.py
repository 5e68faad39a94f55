"""What can become a region, and what cannot be run twice."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lightning_memsave.planner.checkpointing.candidates import (
    called_once,
    groups,
    kept_bytes,
    members,
    numbered_by_depth,
    singles,
    stretches,
    units,
)
from tests.planner.chains import Layer, assert_close, assert_same_bits, chain, gpt, peak_with, planner_of, trace_of, wrn
from tests.steps import Step, squares


class Counts(Layer):
    def __init__(self, width, inner):
        super().__init__(width, inner)
        self.calls = [None]

    def forward(self, x):
        self.calls.append(x.shape)
        return super().forward(x)


class Edits(Layer):
    def forward(self, x):
        return super().forward(x.tanh_())


class Records(Layer):
    """Puts what it computes into an object that it is given, as a cache of keys and values."""

    def forward(self, x, cache):
        cache.append(super().forward(x))
        return sum(cache)


@pytest.mark.parametrize("kind", [Counts, Edits])
@pytest.mark.parametrize("options", [{"method": "sqrt"}, {"method": "recursive"}, {"budget": 0.7}])
def test_calls_that_cannot_be_made_twice_are_left_out(kind, options):
    model = nn.Sequential(*(kind(16, 32) if i in (3, 7) else Layer(16, 32) for i in range(12)))
    step = Step(model, {"x": torch.randn(64, 16)}, squares)
    regions = planner_of(step, **options).plan().config.regions
    assert not {"3", "7"} & {name for region in regions for name in region}
    assert regions
    assert_same_bits(step, regions)


@pytest.mark.parametrize("how", [torch.jit.script, lambda layer: torch.jit.trace(layer, torch.ones(64, 16))])
@pytest.mark.parametrize("options", [{"method": "sqrt"}, {"method": "recursive"}, {"budget": 0.7}])
def test_what_torchscript_runs_is_left_out(how, options):
    model = nn.Sequential(*(Layer(16, 32) for _ in range(12)))
    model[3], model[7] = how(model[3]), nn.Sequential(how(model[7]))
    step = Step(model, {"x": torch.randn(64, 16)}, squares)
    for _ in range(3):  # so that both steps that are compared are compiled
        step.run()
    regions = planner_of(step, **options).plan().config.regions
    assert not {"3", "7", "7.0"} & {name for region in regions for name in region}
    assert regions
    assert_same_bits(step, regions)


def test_a_call_that_fills_an_object_is_left_out():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Records(16, 64) for _ in range(6)])

        def forward(self, x):
            cache = []
            for layer in self.layers:
                x = layer(x, cache)
            return x

    step = Step(Model(), {"x": torch.randn(64, 16)}, squares)
    trace = trace_of(step)
    assert all(call.edits_input for call in trace.calls if call.name.count(".") == 1)
    assert not any(candidate.names[0].count(".") == 1 for candidate in singles(trace))
    assert_same_bits(step, planner_of(step, method="sqrt").plan().config.regions or [["layers.0.up"]])


class Repeated(nn.Module):
    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.first, self.second = Layer(16, 64), Layer(16, 64)
        self.alias = self.first if shared else Layer(16, 64)

    def forward(self, x):
        for _ in range(3):
            x = self.second(self.first(x))
        return self.alias(x)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("options", [{"method": "sqrt"}, {"method": "recursive"}, {"budget": 0.7}])
def test_modules_that_are_called_several_times(shared, options):
    step = Step(Repeated(shared), {"x": torch.randn(64, 16)}, squares)
    plan = planner_of(step, **options).plan()
    assert plan.config.regions
    several = {"first", "second"}
    assert all(len(region) == 1 for region in plan.config.regions if several & set(region))
    assert_same_bits(step, plan.config.regions)
    measured = peak_with(step, plan.config.regions)
    assert measured < step.measured().peak_bytes
    if plan.tracked_peak_bytes is not None:
        assert_close(plan.tracked_peak_bytes, measured, plan.baseline_peak_bytes)


# ---------------------------------------------------------------------- what follows each other
class Fed(nn.Module):
    """Its children feed each other, with a residual around them or without."""

    def __init__(self, is_residual):
        super().__init__()
        self.up, self.act, self.down, self.is_residual = nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), is_residual

    def forward(self, x):
        out = self.down(self.act(self.up(x)))
        return x + out if self.is_residual else out


def traced(model):
    return trace_of(Step(model, {"x": torch.randn(8, 16)}, squares))


def names(calls):
    return [call.name for call in calls]


def test_containers_and_chains_are_split_and_residual_blocks_are_not():
    inner = ("up", "act", "down")
    plain = traced(nn.Sequential(*(Fed(is_residual=False) for _ in range(3))))
    assert names(units(plain)) == [f"{i}.{name}" for i in range(3) for name in inner]
    assert names(units(plain, members_are_whole=True)) == names(members(plain)) == ["0", "1", "2"]
    residual = traced(nn.Sequential(nn.Linear(16, 16), *(Fed(is_residual=True) for _ in range(3))))
    assert names(units(residual)) == ["0", "1", "2", "3"]


def test_units_are_apart_in_order_and_lie_in_the_step():
    for step in (gpt(), wrn()):
        trace = trace_of(step)
        chain_of = units(trace)
        assert len(chain_of) >= 8
        assert all(a.last_op <= b.first_op for a, b in itertools.pairwise(chain_of))
        assert sum(kept_bytes(trace, call) for call in chain_of) <= sum(
            s.num_bytes for s in trace.storages if s.is_kept
        )


def test_a_call_keeps_what_was_made_in_it():
    trace = trace_of(chain((32,) * 3))
    by_name = {call.name: call for call in trace.calls}
    inside, output = 64 * 32 * 4, 64 * 16 * 4
    assert [kept_bytes(trace, by_name[name]) for name in ("0", "1", "2")] == [inside + output] * 3
    assert kept_bytes(trace, by_name["1.up"]) == 0  # tanh keeps its own output
    assert kept_bytes(trace, by_name[""]) == 3 * (inside + output)


@pytest.mark.parametrize("num_calls", [1, 2, 5, 24])
def test_of_short_chains_every_group_is_a_candidate(num_calls):
    trace = traced(nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_calls))))
    found = [candidate.names for candidate in groups(trace, units(trace))]
    pairs = itertools.combinations(range(num_calls + 1), 2)
    assert sorted(found) == sorted(tuple(map(str, range(a, b))) for a, b in pairs if b - a > 1)


def test_of_long_chains_some_of_every_length_and_place_are():
    num_calls = 60
    trace = traced(nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_calls))))
    found = [[int(name) for name in candidate.names] for candidate in groups(trace, units(trace))]
    assert len(found) < num_calls * (num_calls - 1) // 2
    assert all(group == list(range(group[0], group[-1] + 1)) and group[-1] < num_calls for group in found)
    lengths = {len(group) for group in found}
    assert all(any(length <= wanted <= 1.3 * length + 1 for length in lengths) for wanted in range(2, num_calls + 1))
    for length in lengths:
        starts = sorted(group[0] for group in found if len(group) == length)
        assert starts[0] == 0
        assert num_calls - length - starts[-1] < max(1, length / 4)
        assert all(b - a <= max(1, length / 4) for a, b in itertools.pairwise(starts))


def test_stretches_end_at_calls_that_cannot_be_in_a_group():
    shared = nn.Linear(16, 16)
    layers = [nn.Linear(16, 16) for _ in range(8)]
    layers[0].requires_grad_(False)  # backward does not come by
    layers[2] = Counts(16, 8)  # its children stand for it
    layers[3] = nn.ReLU(inplace=True)
    layers[5] = layers[6] = shared
    trace = traced(nn.Sequential(*layers))
    chain_of = units(trace)
    assert called_once(trace) >= {"0", "1", "2", "3", "4", "7"}
    assert "5" not in called_once(trace)
    stretched = [names(run) for run in stretches(trace, chain_of)]
    assert stretched == [["1", "2.up", "2.down"], ["4"], ["7"]]
    found = {candidate.names: candidate for candidate in singles(trace)}
    assert not {("",), ("0",), ("2",), ("3",)} & found.keys()
    assert len(found[("5",)].runs) == 2


def test_candidates_overlap_where_they_share_an_operation():
    trace = trace_of(chain((8,) * 5))
    candidates = [*singles(trace), *groups(trace, units(trace))]

    def operations(candidate):
        return {op for run in candidate.runs for op in range(run[0].first_op, run[-1].last_op)}

    for first, second in itertools.product(candidates, repeat=2):
        assert first.overlaps(second) == bool(operations(first) & operations(second))


def test_numbered_modules_are_told_by_how_deep_they_are():
    block = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU())  # noqa: E731
    model = nn.Sequential(nn.Sequential(block(), block()), block(), nn.Linear(8, 8))
    trace = trace_of(Step(model, {"x": torch.randn(4, 8)}, squares))
    assert numbered_by_depth(trace) == [{"0", "1"}, {"0.0", "0.1"}]
