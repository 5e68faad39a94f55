"""Two processes of DDP on CPU (gloo) with sparse layers; run by `test_distributed.py`. Rank 0 prints `ok`."""

from __future__ import annotations

import sys
import warnings

import lightning as L
import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave, Sparsity, UpdateSchedule
from lightning_memsave.techniques.sparsity import sparse_layers


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 80), nn.ReLU(), nn.Linear(80, 80), nn.ReLU(), nn.Linear(80, 3))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Compare(L.Callback):
    """After each batch, patterns, values and momentum are the same on both ranks."""

    def __init__(self):
        self.patterns = []

    def on_train_batch_end(self, trainer, pl_module, *args):
        layers = sparse_layers(pl_module)
        state = trainer.optimizers[0].state
        for layer in layers.values():
            same(layer.values_index)
            same(layer.values.detach())
            same(state[layer.values]["momentum_buffer"])
        same(torch.cat([p.detach().flatten() for p in pl_module.parameters()]))
        self.patterns.append(layers["net.2"].layout.positions())


def same(tensor):
    both = [torch.zeros_like(tensor) for _ in range(2)]
    torch.distributed.all_gather(both, tensor)
    assert torch.equal(*both), "ranks have drifted apart"


def train(config, strategy="ddp", callbacks=(), **slots):
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.manual_seed(rank)  # DDP makes weights equal; patterns are chosen before
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator))
    memsave = MemSave(sparsity=config, **slots)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        strategy=strategy,
        callbacks=[memsave, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(dataset, batch_size=4))
    return module


def setting(method, **options):
    moves = {} if method == "static" else {"schedule": UpdateSchedule(every=3, until=1.0)}
    return Sparsity(method=method, min_size=100, **moves, **{"sparsity": 0.9, **options})


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for strategy, config, slots in (
        ("ddp", setting("static"), {}),
        ("ddp", setting("static", initial="magnitude", distribution="global"), {}),
        ("ddp", setting("static", sparsity=0.97), {}),  # 16-bit positions
        ("ddp", setting("set"), {"microbatch": 2}),
        ("memsave_ddp", setting("rigl"), {}),
        ("memsave_ddp", setting("rigl"), {"microbatch": 2, "checkpointing": None}),
    ):
        compare = Compare()
        module = train(config, strategy, [compare], **slots)
        same(torch.cat([p.detach().flatten() for p in module.parameters()]))
        has_changed = not torch.equal(compare.patterns[0], compare.patterns[-1])
        assert has_changed == (config.method != "static")
        assert len(compare.patterns) == 16
    for config in (setting("dsr"), setting("gradual"), setting("static", initial="snip")):
        with pytest.raises(ValueError, match="must keep the size of each parameter"):
            train(config)
    if torch.distributed.get_rank() == 0:
        print("ok", file=sys.stderr)


if __name__ == "__main__":
    main()
