"""Set everything in a file: python examples/train_with_cli.py fit --config examples/lightning_cli.yaml."""

from __future__ import annotations

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader


class Autoencoder(L.LightningModule):
    def __init__(self, width: int = 64, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_blocks)))

    def training_step(self, batch, batch_idx):
        loss = (self.blocks(batch) - batch).square().mean()  # [B, width]
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Noise(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.randn(200, 64), batch_size=20)


if __name__ == "__main__":
    LightningCLI(Autoencoder, Noise)
