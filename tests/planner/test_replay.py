"""Predicted peaks with regions against the ledger's."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from lightning_memsave.measuring.step_trace import trace_step
from lightning_memsave.planner.checkpointing.candidates import groups, singles, units
from lightning_memsave.planner.checkpointing.replay import Replay
from tests.planner.chains import MODELS, Layer, assert_close, chain, peak_with, trace_of
from tests.steps import Step, squares


@pytest.mark.parametrize("name", MODELS)
def test_single_regions_are_predicted(name):
    step = MODELS[name]()
    trace = trace_of(step)
    replay = Replay(trace)
    plain = replay.peak_bytes(workspace=False)
    assert plain == step.measured().peak_bytes
    blocks = [c for c in singles(trace) if c.runs[0][0].children]
    assert len(blocks) >= 4
    for candidate in blocks:
        predicted = replay.peak_bytes([replay.effect_of(candidate)], workspace=False)
        measured = peak_with(step, [candidate.names])
        assert_close(predicted, measured, plain)


@pytest.mark.parametrize("name", MODELS)
def test_groups_are_predicted(name):
    step = MODELS[name]()
    trace = trace_of(step)
    replay = Replay(trace)
    plain = replay.peak_bytes(workspace=False)
    for candidate in groups(trace, units(trace))[::7]:
        predicted = replay.peak_bytes([replay.effect_of(candidate)], workspace=False)
        measured = peak_with(step, [candidate.names])
        assert_close(predicted, measured, plain)


def test_a_chain_is_predicted_to_the_byte():
    """Every block but the last: there the repetition stops before the block's own output, 64 rows of 16."""
    step = chain()
    trace = trace_of(step)
    replay = Replay(trace)
    for start, stop in itertools.combinations(range(12), 2):
        names = tuple(str(i) for i in range(start, stop))
        (candidate,) = [c for c in [*singles(trace), *groups(trace, units(trace))] if c.names == names]
        predicted = replay.peak_bytes([replay.effect_of(candidate)], workspace=False)
        assert 0 <= predicted - peak_with(step, [names]) <= 64 * 16 * 4


def test_what_is_made_between_the_calls_of_a_group_stays():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(16, 32) for _ in range(6)])

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    step = Step(Residual(), {"x": torch.randn(64, 16)}, squares)
    trace = trace_of(step)
    names = tuple(f"layers.{i}" for i in range(1, 5))
    (candidate,) = [c for c in groups(trace, units(trace)) if c.names == names]
    effect = Replay(trace).effect_of(candidate)
    assert effect.saved_bytes == 4 * 64 * 32 * 4  # the inside of four layers; their inputs are no call's output
    assert Replay(trace).peak_bytes([effect], workspace=False) == peak_with(step, [names])


def test_copies_of_buffers_are_predicted():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 16)) for _ in range(4)))
    step = Step(model, {"x": torch.randn(8, 16)}, squares)
    trace = trace_of(step)
    (call,) = [call for call in trace.calls if call.name == "1"]
    assert call.buffer_bytes == 64 * 4 * 2 + 8
    model.eval()
    (call,) = [call for call in trace_of(step).calls if call.name == "1"]
    assert call.buffer_bytes == 0


@pytest.mark.parametrize("name", MODELS)
def test_a_region_keeps_less_when_backward_begins_and_changes_nothing_behind_it(name):
    trace = trace_of(MODELS[name]())
    replay = Replay(trace)
    for candidate in [*singles(trace), *groups(trace, units(trace))[::5]]:
        effect = replay.effect_of(candidate)
        adjustment = replay.adjustment(effect)
        assert int(adjustment[trace.backward_begins]) == -effect.saved_bytes
        assert int(adjustment[-1]) == 0


def test_a_region_of_elementwise_calls_by_hand():
    """Six times tanh, each of which keeps its output: without two of them in the middle, one boundary is left."""
    model, x = nn.Sequential(*(nn.Tanh() for _ in range(6))), torch.randn(8, 16, requires_grad=True)
    trace = trace_step(model, lambda: model(x).sum().backward(), held=[x])
    replay = Replay(trace)
    (pair,) = [c for c in groups(trace, units(trace)) if c.names == ("2", "3")]
    effect = replay.effect_of(pair)
    assert effect.saved_bytes == x.nbytes  # the output of "2"; that of "3" is kept for "4"
    assert [spike for _, spike in effect.spikes] == [2 * x.nbytes]
    (single,) = [c for c in singles(trace) if c.names == ("2",)]
    assert replay.effect_of(single).saved_bytes == 0


def test_extra_bytes_are_there_at_every_moment():
    trace = trace_of(chain())
    plain, more = Replay(trace), Replay(trace, extra_bytes=1000)
    assert torch.equal(more.curve(), plain.curve() + 1000)
    assert more.live_before(5) == plain.live_before(5) + 1000
    assert plain.live_before(0) == trace.start_bytes
    assert plain.peak_bytes(workspace=False) == trace.peak_bytes
