from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import EarlyZeroGrad, MemSave, Recipe
from lightning_memsave.techniques.early_zero_grad import estimate_early_zero_grad
from tests.contracts.spec import Spec

SPEC = Spec(config=EarlyZeroGrad(), loss_class="exact", bit_equal=True, shrinks="gradients")


class Deep(L.LightningModule):
    """The weights are in front and the activations behind, so the peak lies where forward meets backward."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 16384), nn.Tanh(), nn.Linear(16384, 64))

    def training_step(self, batch, batch_idx):
        h = self.net(batch).repeat(1, 64)
        for _ in range(40):
            h = h.tanh()
        return h.mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def report(recipe):
    torch.manual_seed(0)
    memsave, module = MemSave(recipe), Deep()
    trainer = L.Trainer(
        accelerator="cpu", max_steps=3, callbacks=[memsave], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.zeros(96, 64), batch_size=32))
    return memsave.report


def test_the_gradients_leave_the_peak_and_the_estimate_bounds_what_is_saved():
    plain, ours = report("measure"), report(Recipe("early", (EarlyZeroGrad(),)))
    estimate = estimate_early_zero_grad(Deep().parameters())
    assert plain.by_category["gradients"] == estimate == sum(p.numel() * 4 for p in Deep().parameters())
    assert ours.by_category["gradients"] == 0
    # What then stands at the peak is one gradient of a wide activation, on its way back.
    assert plain.peak_bytes - ours.peak_bytes == estimate - ours.by_category["temporary"]
    assert ours.by_category["temporary"] < 0.2 * estimate


def test_frozen_parameters_have_no_gradient_to_free():
    layer = nn.Linear(3, 5)
    layer.bias.requires_grad_(False)
    assert estimate_early_zero_grad(layer.parameters()) == 3 * 5 * 4
