"""FSDP2 whose last process is killed in the middle of an epoch, and that goes on with other numbers of processes.

`kill FOLDER KIND`: under two processes or more; the last one is killed in the third epoch.
`go-on FOLDER KIND`: from the last checkpoint, in any number of processes; writes the whole weights to FOLDER.
`straight FOLDER KIND`: the same from the beginning, without a checkpoint.
Run by `test_sharded_checkpoints.py`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave, OptimizerState

NUM_EPOCHS, GLOBAL_BATCH = 4, 16
SETTINGS = {
    "exact": lambda: MemSave("exact", summary=False),
    "small": lambda: MemSave(precision="bf16+8", optimizer_state=OptimizerState(min_size=1), summary=False),
}


class Module(L.LightningModule):
    def __init__(self, dies: bool = False) -> None:
        super().__init__()
        self.dies = dies
        blocks = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)) for _ in range(3))
        self.net = nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 4))

    def configure_model(self) -> None:
        for part in (*self.net, self.net):
            if list(part.parameters()):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        is_last = self.trainer.global_rank == self.trainer.world_size - 1
        if self.dies and is_last and (self.current_epoch, batch_idx) == (2, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def train(folder, memsave, num_processes, dies=False, ckpt_path=None):
    torch.manual_seed(0)
    module = Module(dies)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(64, 8, generator=generator), torch.randint(0, 4, (64,), generator=generator)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_processes,
        max_epochs=NUM_EPOCHS,
        strategy="memsave_fsdp",
        callbacks=[memsave, ModelCheckpoint(folder / "checkpoints", filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(*rows), GLOBAL_BATCH // num_processes), ckpt_path=ckpt_path)
    return module, trainer


def main() -> None:
    torch.set_num_threads(1)
    what, folder, kind = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if what == "kill":
        train(folder, SETTINGS[kind](), num_processes, dies=True)
        return
    last = folder / "checkpoints" / "epoch=1.ckpt" if what == "go-on" else None
    module, trainer = train(folder / what, SETTINGS[kind](), num_processes, ckpt_path=last)
    assert trainer.global_step == NUM_EPOCHS * 64 // GLOBAL_BATCH
    weights = [p.full_tensor().detach() for p in module.parameters()]
    if trainer.is_global_zero:
        torch.save(weights, folder / f"{what}-{num_processes}.pt")
        print("ok", file=sys.stderr)


if __name__ == "__main__":
    main()
