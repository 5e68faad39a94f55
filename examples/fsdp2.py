"""Shard a model over two devices with FSDP2 and recompute its blocks: python examples/fsdp2.py."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave


class Sharded(L.LightningModule):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(6)
        )
        self.last = nn.Linear(width, 1)

    def configure_model(self) -> None:
        for part in (self.first, *self.blocks, self.last):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0])  # [B, width]
        for block in self.blocks:
            x = block(x)
        return (self.last(x) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
    memsave = MemSave(microbatch=16, checkpointing="blocks")
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.device_count() > 1 else "cpu",
        devices=2,
        strategy="memsave_fsdp",
        max_epochs=1,
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Sharded(), DataLoader(data, batch_size=64))
    if trainer.is_global_zero:
        print(f"peak of each process: {memsave.report.peak_bytes} bytes")
