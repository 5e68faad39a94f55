"""Regions for a budget: met as measured, and the cheaper the more there is."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memsave import Checkpointing
from lightning_memsave.planner.checkpointing import Planner, milp
from lightning_memsave.planner.checkpointing.region_budget import fit_budget
from lightning_memsave.planner.checkpointing.replay import Replay
from tests.planner.chains import MODELS, assert_same_bits, chain, peak_with, trace_of


@pytest.mark.parametrize("name", MODELS)
def test_a_budget_is_met_and_more_of_it_takes_less_time(name):
    step = MODELS[name]()
    trace = trace_of(step)
    plain, (_, lowest) = Replay(trace).peak_bytes(), fit_budget(trace, Replay(trace), 0)
    seconds = []
    for share in (0.05, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95):
        budget = lowest + int(share * (plain - lowest))
        plan = Planner(trace, Checkpointing(budget=budget)).plan()
        assert plan.peak_bytes <= plan.budget_bytes == budget
        assert peak_with(step, plan.config.regions) <= budget
        seconds.append(plan.seconds)
    assert all(a >= b * (1 - 1e-3) for a, b in itertools.pairwise(seconds)), seconds  # the program's own gap: 1e-4
    assert Planner(trace, Checkpointing(budget=plain)).plan().config.regions == ()


@pytest.mark.parametrize("name", MODELS)
def test_without_scipy_a_plan_is_found_that_is_no_faster(name, monkeypatch):
    step = MODELS[name]()
    trace = trace_of(step)
    assert importlib.util.find_spec("scipy") is not None
    exact = Planner(trace, Checkpointing(budget=0.7)).plan()
    monkeypatch.setattr(milp, "find_spec", lambda name: None)
    plan = Planner(trace, Checkpointing(budget=0.7)).plan()
    assert not plan.is_exact
    assert exact.seconds <= plan.seconds
    assert peak_with(step, plan.config.regions) <= plan.budget_bytes


@settings(max_examples=25)
@given(
    inner=st.lists(st.sampled_from([1, 4, 16, 48, 100]), min_size=2, max_size=9),
    batch_size=st.sampled_from([1, 16, 96]),
    share=st.floats(0, 1),
)
def test_any_chain_stays_within_its_budget(inner, batch_size, share):
    step = chain(inner, batch_size=batch_size)
    trace = trace_of(step)
    plain, (_, lowest) = Replay(trace).peak_bytes(), fit_budget(trace, Replay(trace), 0)
    budget = lowest + int(share * (plain - lowest))
    plan = Planner(trace, Checkpointing(budget=budget)).plan()
    assert plan.config.regions or plain <= budget
    if plan.config.regions:
        assert peak_with(step, plan.config.regions) <= budget
        assert_same_bits(step, plan.config.regions)


def test_what_fits_needs_no_regions():
    trace = trace_of(chain())
    replay = Replay(trace)
    plain = replay.peak_bytes()
    for budget in (plain, 2 * plain):
        fit, lowest = fit_budget(trace, replay, budget)
        assert (fit.effects, fit.peak_bytes, fit.seconds) == ((), plain, 0.0)
        assert lowest == plain
    assert fit_budget(trace, replay, plain - 1)[0].effects


@pytest.mark.parametrize("name", MODELS)
def test_the_lowest_peak_that_is_named_can_be_met(name):
    trace = trace_of(MODELS[name]())
    replay = Replay(trace)
    nothing, lowest = fit_budget(trace, replay, 0)
    assert nothing is None
    fit, again = fit_budget(trace, replay, lowest)
    assert fit.peak_bytes == replay.peak_bytes(fit.effects) <= lowest
    assert again <= lowest
    assert fit.seconds == pytest.approx(sum(effect.seconds for effect in fit.effects))


def test_without_any_of_its_regions_a_choice_does_not_fit():
    trace = trace_of(chain())
    replay = Replay(trace)
    lowest = fit_budget(trace, replay, 0)[1]
    budget = (lowest + replay.peak_bytes()) // 2
    fit, _ = fit_budget(trace, replay, budget)
    assert fit.peak_bytes <= budget
    for effect in fit.effects:
        assert replay.peak_bytes([other for other in fit.effects if other is not effect]) > budget
