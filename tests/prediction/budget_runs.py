"""A module of residual blocks and its runs, for the tests of budgets."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width: int, norm=nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(L.LightningModule):
    norm: type[nn.Module] = nn.LayerNorm

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), *(Block(32, self.norm) for _ in range(3)), nn.Linear(32, 3))
        self.seen: list[float] = []

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(batch[0].sum()))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01, foreach=False)


class Wide(Net):
    def __init__(self):
        super().__init__()
        self.more = nn.Linear(100, 100)


def data(shuffle=True, **options):
    generator = torch.Generator().manual_seed(3)
    rows, labels = torch.randn(384, 8, generator=generator), torch.randint(3, (384,), generator=generator)
    return DataLoader(TensorDataset(rows, labels), 96, shuffle=shuffle, **options)


def train(memsave, kind=Net, *, loader=None, ckpt_path=None, callbacks=(), **options):
    torch.manual_seed(0)
    module = kind() if isinstance(kind, type) else kind
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=options.pop("max_epochs", 2),
        callbacks=[*([memsave] if memsave is not None else []), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader or data(), ckpt_path=ckpt_path)
    return trainer, module


ONLY_PARTS = {"activations": False, "checkpointing": False, "optimizer_state": False}
"""With these, microbatches are the only dimension, and few predictions are made."""
