"""Two processes of DDP on CPU (gloo) with a sparse update; run by `test_distributed.py`. Rank 0 prints `ok`."""

from __future__ import annotations

import sys
import warnings

import lightning as L
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave, OptimizerState, SparseUpdate
from lightning_memsave.techniques.sparse_update import partial_layers


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 3))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Compare(L.Callback):
    """After each batch, channels, values, dense weights and all other parameters are the same on both ranks."""

    def __init__(self) -> None:
        self.num_batches = 0

    def on_train_batch_end(self, trainer, pl_module, *args):
        assert partial_layers(pl_module)
        for tensor in (*pl_module.parameters(), *pl_module.state_dict().values()):
            same(tensor.detach().float())
        for layer in partial_layers(pl_module).values():
            same(layer.channels)
        self.num_batches += 1


def same(tensor):
    both = [torch.zeros_like(tensor) for _ in range(2)]
    torch.distributed.all_gather(both, tensor)
    assert torch.equal(*both), "ranks have drifted apart"


def train(config, strategy="ddp", **slots):
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(rank)  # DDP makes weights equal; channels are chosen before
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator))
    compare = Compare()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        strategy=strategy,
        callbacks=[MemSave(sparse_update=config, **slots), compare],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(dataset, batch_size=4))
    assert compare.num_batches == 16
    for p in module.parameters():
        same(p.detach())


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config = SparseUpdate(layers={"net.2": 0.25, "net.4": 1.0})
    train(config)
    train(0.3)
    train(config, microbatch=2, activations="exact")
    train(config, "memsave_ddp", precision="bf16+8", optimizer_state=OptimizerState(min_size=0))
    train(config, optimizer_state=OptimizerState(first_moment="32bit", gradients="release"), microbatch=False)
    if torch.distributed.get_rank() == 0:
        print("ok", file=sys.stderr)


if __name__ == "__main__":
    main()
