"""Plans without a run: within their budget, of their module alone, and refused where there is none to make."""

from __future__ import annotations

import copy

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, plan_training
from tests.prediction.budget_runs import ONLY_PARTS, Net, Wide, data, train


def batch():
    return torch.linspace(-1, 1, 8192 * 32).reshape(8192, 32)


def test_each_module_has_a_plan_of_its_own():
    memsave = MemSave(budget="1x", **ONLY_PARTS)
    small, large = (plan_training(make(), next(iter(data())), memsave) for make in (Net, Wide))
    assert large.baseline_by_category["weights"] == small.baseline_by_category["weights"] + 4 * 100 * 101


def fitted(memsave):
    torch.manual_seed(0)
    module = BoringModel()
    train(memsave, module, loader=DataLoader([batch()] * 3, batch_size=None), limit_val_batches=0, max_epochs=1)
    return module


def test_a_run_with_the_plan_stays_within_the_budget_and_learns_what_plain_lightning_does():
    plan = plan_training(BoringModel(), batch(), MemSave(budget="0.9x", **ONLY_PARTS))
    ours, baseline = MemSave(plan), MemSave("measure")
    seen, plain = fitted(ours), fitted(baseline)
    assert plan.budget_bytes == int(0.9 * plan.baseline_bytes)
    assert ours.report.peak_bytes <= plan.needed_bytes <= plan.budget_bytes
    assert plan.budget_bytes < baseline.report.peak_bytes <= plan.baseline_bytes
    for a, b in zip(seen.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_nothing_moves_and_the_module_stays_as_it_is():
    module, given = BoringModel(), [batch()]
    before, values, state = copy.deepcopy(module.state_dict()), copy.deepcopy(given), torch.get_rng_state()
    plan_training(module, given[0], MemSave(budget="0.9x", **ONLY_PARTS))
    assert all(map(torch.equal, before.values(), module.state_dict().values()))
    assert all(p.grad is None for p in module.parameters())
    assert all(map(torch.equal, values, given))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_budget_that_is_met_anyway_takes_no_steps():
    plan = plan_training(BoringModel(), batch(), MemSave(budget="2GiB", **ONLY_PARTS))
    assert plan.steps == ()
    assert plan.budget_bytes == 2 * 2**30
    assert plan.needed_bytes <= plan.budget_bytes


@pytest.mark.parametrize("memsave", [MemSave(), MemSave("measure")], ids=["lossless", "measure"])
def test_settings_without_a_budget_are_refused(memsave):
    with pytest.raises(ValueError, match=rf"`memsave` must have a budget to plan for, got '{memsave.recipe.name}'"):
        plan_training(BoringModel(), batch(), memsave)
