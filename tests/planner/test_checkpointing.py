"""Plans against the ledger: what was predicted is what is measured, and what is computed stays the same bits."""

from __future__ import annotations

import pytest

from lightning_memsave import Checkpointing
from lightning_memsave.core.units import format_bytes
from lightning_memsave.planner.checkpointing import Planner, plan_checkpointing
from lightning_memsave.planner.checkpointing.replay import Replay
from tests.planner.chains import (
    MODELS,
    assert_close,
    assert_same_bits,
    chain,
    peak_with,
    planner_of,
    trace_of,
)


@pytest.mark.parametrize("options", [{"method": "sqrt"}, {"budget": 0.8}, {"budget": 0.6}])
@pytest.mark.parametrize("name", MODELS)
def test_plans_are_predicted(name, options):
    step = MODELS[name]()
    plan = planner_of(step, **options).plan()
    measured = peak_with(step, plan.config.regions)
    assert_close(plan.tracked_peak_bytes, measured, plan.baseline_peak_bytes)
    assert plan.tracked_peak_bytes <= plan.peak_bytes < plan.baseline_peak_bytes
    assert plan.seconds > 0


@pytest.mark.parametrize("options", [{"method": "sqrt"}, {"method": "recursive"}, {"budget": 0.7}])
@pytest.mark.parametrize("name", MODELS)
def test_plans_train_with_the_same_bits(name, options):
    step = MODELS[name]()
    regions = planner_of(step, **options).plan().config.regions
    assert regions
    assert_same_bits(step, regions)


@pytest.mark.parametrize("name", MODELS)
def test_an_impossible_budget_names_the_smallest_possible_one(name):
    step = MODELS[name]()
    trace = trace_of(step)
    with pytest.raises(
        ValueError, match=r"`Checkpointing.budget` must be at least .*Weights, batch and state"
    ) as caught:
        Planner(trace, Checkpointing(budget=1000)).plan()
    assert "the largest tensor of the step takes" in str(caught.value)
    smallest = int(str(caught.value).split("(")[1].split(" bytes")[0])
    plan = Planner(trace, Checkpointing(budget=smallest)).plan()
    assert plan.peak_bytes <= smallest
    assert peak_with(step, plan.config.regions) <= smallest
    assert format_bytes(smallest) in str(caught.value)


def test_a_fraction_is_of_the_activations():
    trace = trace_of(chain())
    planner = Planner(trace, Checkpointing(budget=0.75))
    kept = sum(storage.num_bytes for storage in trace.storages if storage.is_kept)
    assert planner.budget_bytes == Replay(trace).peak_bytes() - int(0.25 * kept)
    assert Planner(trace, Checkpointing(budget="100KiB")).budget_bytes == 100 * 1024


def test_extra_bytes_are_part_of_the_budget():
    trace = trace_of(chain())
    plan = Planner(trace, Checkpointing(budget=0.8)).plan()
    with_state = Planner(trace, Checkpointing(budget=plan.budget_bytes + 5000), extra_bytes=5000).plan()
    assert with_state.config == plan.config
    assert with_state.peak_bytes == plan.peak_bytes + 5000


def test_less_is_planned_again_for():
    planner = planner_of(chain(), budget=0.8)
    first, second = planner.plan(), planner.plan_again(less_bytes=20_000)
    assert second.budget_bytes == first.budget_bytes
    assert second.peak_bytes <= first.budget_bytes - 20_000
    assert planner.plan_again(less_bytes=10**9) is None


def test_plan_checkpointing_is_the_function_for_it():
    step = chain()
    step.model.zero_grad()
    found = plan_checkpointing(step.model, step.run, Checkpointing(budget=0.7, offload=True), held=step.batch.values())
    assert found == Checkpointing(regions=found.regions, offload=True)
    assert "regions over" in planner_of(step, budget=0.7).plan().describe()
