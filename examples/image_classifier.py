"""Train an image classifier in less memory, and log memory beside accuracy to W&B.

    python examples/image_classifier.py

Runs are written offline, without account or network, into ./wandb: `lightning-memsave compare wandb` makes a page of
them, `wandb sync` uploads them.
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
import wandb
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, wandb_logger
from lightning_memsave.demo.data import load_digits_32


class Classifier(L.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, width, 3, stride=2, padding=1)]
        for _ in range(3):
            layers += [nn.GroupNorm(8, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch  # [B, 3, 32, 32], [B]
        return F.cross_entropy(self.net(images), labels)

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.log("test/accuracy", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 2e-3)


def train(name: str, memsave: MemSave) -> MemSave:
    L.seed_everything(0, verbose=False)
    training, test = load_digits_32(seed=0)
    logger = wandb_logger("digits", name=name, offline=True, quiet=True)
    trainer = L.Trainer(max_epochs=1, callbacks=[memsave], logger=logger, log_every_n_steps=1)
    module = Classifier()
    trainer.fit(module, DataLoader(training, batch_size=64, shuffle=True))
    trainer.test(module, DataLoader(test, batch_size=64), verbose=False)
    wandb.finish()
    return memsave


if __name__ == "__main__":
    plain = train("plain", MemSave("measure"))
    ours = train("microbatch 16", MemSave(microbatch=16).compare_to(plain.report))
    print(f"peak {ours.report.factor:.1f} times below the baseline's, loss class {ours.report.loss_class}")
