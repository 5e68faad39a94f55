from __future__ import annotations

import json

import pytest
import torch

from lightning_memsave import (
    ActivationCompression,
    Checkpointing,
    EarlyZeroGrad,
    LabelCount,
    LowPrecision,
    MemSave,
    Microbatching,
    OptimizerState,
    Plan,
    Sparsity,
    UpdateSchedule,
)
from lightning_memsave.planner.plan import PlanStep

EVERYTHING = (
    EarlyZeroGrad(),
    Sparsity(sparsity=0.5, method="rigl", schedule=UpdateSchedule(every=7, until=0.5)),
    LowPrecision(keep_32bit=("head", "*Norm")),
    Microbatching(start=4, max_bytes=1000, growth_interval=None, weight_fn=LabelCount(shifted=True)),
    ActivationCompression(codecs=("exact", "int8"), modules={"head": "exact"}),
    Checkpointing(regions=(("0", "1"), ("2",))),
    OptimizerState(first_moment="4bit", min_size=1),
)


def plan(**changes):
    step = PlanStep(
        technique="checkpointing", setting="regions", saves_bytes=2**20, time_factor=1.2, loss_class="exact", reason="x"
    )
    fields = {
        "recipe": "extreme",
        "techniques": EVERYTHING,
        "budget": "1MiB",
        "budget_bytes": 2**20,
        "baseline_bytes": 4 * 2**20,
        "baseline_by_category": {"weights": 2**20, "activations": 3 * 2**20},
        "peak_bytes": 2**19,
        "by_category": {"weights": 2**19},
        "workspace_bytes": 2**10,
        "steps": (step,),
        "next_step": "nothing",
        "flags": ("a guess",),
    }
    return Plan(**{**fields, **changes})


def test_a_plan_is_data_both_ways():
    made = plan()
    assert Plan.from_json(made.to_json()) == made
    assert json.loads(made.to_json())["techniques"]["microbatching"]["start"] == 4
    again = MemSave(Plan.from_json(made.to_json()))
    assert again.recipe.techniques == EVERYTHING
    assert again.plan == made


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": 2}, "format 1, got 2"),
        ({"steps": [{"setting": "x"}]}, r"plan\.steps\.0\.technique` Field required"),
        ({"peak_bytes": "3"}, "plan.peak_bytes` Input should be a valid integer, got '3'"),
        ({"by_category": {"data": 2**70}}, "plan.by_category` must have numbers of 64 bits"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"techniques": {"unheard_of": {}}}, "unheard_of"),
        ({"techniques": {"microbatching": {"size": 0}}}, "positive integer"),
    ],
)
def test_what_is_no_plan_is_refused(change, match):
    with pytest.raises(ValueError, match=match):
        Plan.from_dict({**plan().as_dict(), **change})
    with pytest.raises(ValueError, match=r"must be a plan as `Plan\.to_json` writes it"):
        Plan.from_dict({"format": 1})


def test_functions_cannot_be_written_and_the_error_names_the_setting():
    with pytest.raises(ValueError, match=r"`Microbatching.weight_fn` cannot be written into a plan"):
        plan(techniques=(Microbatching(size=2, weight_fn=len),)).to_json()
    with pytest.raises(ValueError, match=r"`Checkpointing.modules` cannot be written"):
        plan(techniques=(Checkpointing(modules=torch.nn.Linear),)).to_json()


def test_a_plan_explains_itself():
    text = str(plan())
    assert "Plan for a budget of 1.0 MiB" in text
    assert "plain step: 4.0 MiB (activations 3.0 MiB, weights 1.0 MiB)" in text
    assert "regions: saves 1.0 MiB, time about x1.20, exact" in text
    assert "planned step: 513.0 KiB (weights 512.0 KiB), of which kernels 1.0 KiB" in text
    assert "note: a guess" in text
    assert plan().loss_class == "exact"
    assert plan().time_factor == 1.2
    timed = plan(measured_time_factor=1.5)
    assert timed.time_factor == 1.5
    assert "exact, time measured x1.50 (without what sparsity, " in str(timed)
    assert Plan.from_json(timed.to_json()) == timed


def test_a_plan_claims_nothing_for_what_was_on_already():
    """That is in `techniques`, and no step of the plan."""
    recovery, chosen = Microbatching(), Checkpointing(method="sqrt")
    step = plan().steps[0]
    assert step.technique == "checkpointing"
    assert "exact, time about x1.20; " in str(plan(techniques=(EarlyZeroGrad(), recovery, chosen)))
    noisy = plan(techniques=(recovery, ActivationCompression(codecs=("int4",)), chosen))
    assert "exact, time about x1.20 (without what activation_compression changes and costs); " in str(noisy)


def test_a_plan_stands_alone():
    with pytest.raises(ValueError, match="`microbatch` cannot be set beside a plan"):
        MemSave(plan(), microbatch=4)
    with pytest.raises(ValueError, match="`budget` cannot be set beside a plan"):
        MemSave(plan(), budget="1GiB")
    with pytest.raises(ValueError, match="needs a recipe that may change something"):
        MemSave("measure", budget="1GiB")


def test_a_plan_that_is_handed_over_keeps_its_microbatches_where_recovery_does_not_work():
    recipe = MemSave(plan()).recipe
    assert recipe.stepping_aside(["DDP with static_graph"])[0].get(Microbatching) is not None  # refused in the run
    for ways in (["model parallel (FSDP2)"], ["DDP"], ["manual optimization"]):
        handed_over, reasons = recipe.stepping_aside(ways)
        (found,) = [t for t in handed_over.techniques if isinstance(t, Microbatching)]
        assert (found.size, found.max_bytes, found.weight_fn) == (4, None, LabelCount(shifted=True))
        assert len(reasons) == 1
    assert recipe.stepping_aside(["accumulate_grad_batches"])[0] == recipe
    without = MemSave(plan(techniques=(Microbatching(max_bytes=1000),))).recipe
    assert without.stepping_aside(["DDP"])[0].techniques == ()
