"""State that steps in parts, in whole Lightning runs: a tied table, a frozen layer, uneven batches in dictionaries."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, OptimizerState
from lightning_memsave.torch_internals import optimizer_class


class Tied(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.table, self.frozen = nn.Embedding(77, 64), nn.Linear(64, 64)
        self.wide, self.narrow = nn.Linear(64, 129), nn.Linear(129, 64)
        self.head = nn.Linear(64, 77, bias=False)
        self.head.weight = self.table.weight
        self.frozen.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        hidden = self.table(batch["x"])
        hidden = hidden + self.narrow(self.wide(self.frozen(hidden)).tanh())
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def batches():
    draw = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, 77, (2, size, 5), generator=draw) for size in (8, 7, 8, 1)]
    return DataLoader([{"x": x, "y": y} for x, y in tokens], batch_size=None)


def fit(module, gradients, epochs, checkpoint=None):
    state = OptimizerState(
        first_moment="4bit", second_moment="factored", min_size=0, keep_embeddings_32bit=False, gradients=gradients
    )
    memsave = MemSave(optimizer_state=state, microbatch=3 if gradients == "into-state" else False)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, batches(), ckpt_path=checkpoint)
    return trainer


@pytest.mark.parametrize("gradients", ["keep", "release", "into-state"])
def test_a_run_that_is_resumed_is_the_run_that_went_on(monkeypatch, tmp_path, gradients):
    monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", 2048)  # the table has 4928 elements
    whole = Tied()
    half, resumed = copy.deepcopy(whole), copy.deepcopy(whole)
    frozen = whole.frozen.weight.clone()
    fit(whole, gradients, 2)
    fit(half, gradients, 1).save_checkpoint(tmp_path / "half.ckpt")
    fit(resumed, gradients, 2, tmp_path / "half.ckpt")
    assert not torch.equal(half.table.weight, whole.table.weight)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert torch.equal(whole.frozen.weight, frozen)
    assert resumed.head.weight is resumed.table.weight


def test_a_second_fit_goes_on(monkeypatch):
    monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", 2048)
    module = Tied()
    fit(module, "keep", 1)
    before = module.table.weight.detach().clone()
    fit(module, "keep", 1)
    assert module.table.weight.isfinite().all()
    assert not torch.equal(module.table.weight, before)
