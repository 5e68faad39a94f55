"""`predict` with the settings of a `MemSave`: against hand-counted bytes and a run's ledger, and with a plan."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, plan_training, predict
from lightning_memsave.core.report import CATEGORIES
from tests.prediction.budget_runs import ONLY_PARTS, train

NUM_PARAMETERS = 16 * 32 + 32 + 32 * 4 + 4


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def test_weights_gradients_moments_and_data_have_the_bytes_that_can_be_counted_by_hand():
    found = predict(Net(), torch.ones(8, 16), MemSave("measure")).by_category
    assert set(found) == set(CATEGORIES)
    assert found["weights"] == 4 * NUM_PARAMETERS
    assert found["optimizer_state"] == 2 * 4 * NUM_PARAMETERS + 4 * 4  # two moments, and a step of each parameter
    assert found["data"] == 4 * 8 * 16


@pytest.mark.parametrize(
    ("slots", "options"),
    [
        ({"recipe": "measure"}, {}),
        ({"recipe": "measure"}, {"accumulate_grad_batches": 2}),
        ({}, {"accumulate_grad_batches": 2}),
        ({"microbatch": 3}, {}),
    ],
    ids=str,
)
def test_the_peak_is_that_of_a_run_with_the_same_trainer(slots, options):
    module, batch, memsave = Net(), torch.randn(64, 16), MemSave(**slots)
    found = predict(module, batch, MemSave(**slots), **options)
    train(memsave, module, loader=DataLoader([batch] * 6, batch_size=None), max_epochs=1, **options)
    assert found.peak_bytes == memsave.report.peak_bytes
    assert found.by_category == memsave.report.by_category


def test_no_settings_are_those_of_memsave():
    module, batch = Net(), torch.ones(64, 16)
    assert predict(module, batch).as_dict() == predict(module, batch, MemSave()).as_dict()


def test_a_function_and_a_number_of_samples_stand_for_module_and_batch():
    expected = predict(Net(), torch.ones(48, 16))
    for found in (
        predict(Net, lambda: torch.ones(48, 16)),
        predict(Net(), torch.ones(8, 16), num_samples=48),
        predict(Net, torch.ones(96, 16), num_samples=48),
    ):
        assert found.by_category == expected.by_category


def test_module_batch_and_random_numbers_stay_as_they_are():
    module, batch = Net(), torch.randn(8, 16)
    weights, values, state = copy.deepcopy(module.state_dict()), batch.clone(), torch.get_rng_state()
    predict(module, batch, MemSave(microbatch=2))
    assert all(map(torch.equal, weights.values(), module.state_dict().values()))
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(batch, values)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_cuda_target_has_bounds_above_what_tensors_take():
    found = predict(Net(), torch.ones(64, 16), target="cuda")
    low, high = found.needed_bytes
    assert found.peak_bytes <= found.cuda.allocated_bytes <= found.cuda.reserved_bytes < low < high
    assert found.fits(high)
    assert found.fits(high - 1) is None
    assert found.fits(low - 1) is False


def test_a_prediction_under_a_budget_is_of_its_plan():
    memsave, batch = MemSave(budget="0.9x", **ONLY_PARTS), torch.ones(8192, 32)
    with pytest.raises(ValueError, match=r"`budget` needs a plan first, got '0\.9x'"):
        predict(BoringModel(), batch, memsave)
    made = plan_training(BoringModel(), batch, memsave)
    plain, planned, again = (predict(BoringModel(), batch, *given) for given in ((), (memsave,), (MemSave(made),)))
    assert planned.peak_bytes == again.peak_bytes <= made.budget_bytes < plain.peak_bytes


def test_what_a_run_would_refuse_is_refused():
    class ByHand(Net):
        automatic_optimization = False

    with pytest.raises(ValueError, match="cannot be combined with manual optimization"):
        predict(ByHand(), torch.ones(8, 16), MemSave(microbatch="auto"))
    with pytest.raises(ValueError, match="`training_step` stopped the training, or there is no batch"):
        predict(Stops(), torch.ones(8, 16))


class Stops(Net):
    def training_step(self, batch, batch_idx):
        self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)
