"""Train a small network of one's own with and without memory saving: python examples/train_digits.py."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave
from lightning_memsave.demo.data import load_digits_32
from lightning_memsave.reporting.comparison import compare
from lightning_memsave.reporting.console import print_comparison
from lightning_memsave.reporting.runs import run_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(F.silu(self.norm(x)))


class Digits(L.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(6)))
        self.head = nn.Linear(width, 10)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def train(memsave: MemSave) -> MemSave:
    L.seed_everything(0, verbose=False)
    data = DataLoader(load_digits_32(seed=0)[0], batch_size=128, drop_last=True)
    L.Trainer(max_epochs=1, callbacks=[memsave], logger=False, enable_checkpointing=False).fit(Digits(), data)
    return memsave


if __name__ == "__main__":
    plain = train(MemSave("measure"))
    ours = train(MemSave(microbatch=16, checkpointing="blocks").compare_to(plain.report))
    print_comparison(compare([run_of("plain", plain.report), run_of("MemSave", ours.report)]), Console())
