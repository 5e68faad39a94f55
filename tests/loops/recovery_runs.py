"""Runs that run out of memory, for the tests of recovery."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn

from tests.loops.test_recovery import QUIET, Hungry, Net, data


def limited(make=Net, limit=8, where="forward"):
    torch.manual_seed(0)
    module = make()
    module.hungry.limit, module.hungry.where = limit, where
    return module


def train(module, memsave, loader=None, **options):
    torch.manual_seed(1)
    trainer = L.Trainer(**{**QUIET, "max_epochs": 1, **options}, callbacks=[memsave] if memsave else [])
    trainer.fit(module, loader or data())
    return trainer


class Deterministic(Net):
    def training_step(self, batch, batch_idx):
        loss = (self.last(self.hungry(self.norm(self.first(batch[0])))) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss


class OnDicts(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.hungry = nn.Linear(4, 1), Hungry()

    def training_step(self, batch, batch_idx):
        labels = batch.pop("labels")  # as transformers' examples do
        batch["more"].append(1)
        return (self.hungry(self.layer(batch["x"])) - labels).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
