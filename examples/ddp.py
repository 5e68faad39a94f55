"""Train on two devices with DDP and memory saving: python examples/ddp.py (CPU where there is no GPU)."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave


class Regressor(L.LightningModule):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(6))
        self.net = nn.Sequential(nn.Linear(16, width), *blocks, nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 16), torch.randn(512, 1))
    memsave = MemSave(microbatch=16, checkpointing="blocks", optimizer_state="8bit")
    trainer = L.Trainer(
        accelerator="gpu" if torch.cuda.device_count() > 1 else "cpu",
        devices=2,
        strategy="memsave_ddp",  # or "ddp": the callback is enough
        max_epochs=1,
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Regressor(), DataLoader(data, batch_size=64))
    if trainer.is_global_zero:
        print(f"peak of each process: {memsave.report.peak_bytes} bytes")
