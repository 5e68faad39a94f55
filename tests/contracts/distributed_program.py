"""Every technique under DDP or FSDP2, in two processes on CPU (gloo): as its row of the compatibility table says.

Run by `test_distributed_contracts.py` as a module, with `ddp` or `fsdp`; rank 0 prints `ok`.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave, Recipe
from lightning_memsave.core.compatibility import COMPATIBILITY
from lightning_memsave.techniques.registry import TECHNIQUES
from tests.contracts.test_contracts import Block

STEMS = [technique.stem for technique in TECHNIQUES]
SPECS = {stem: import_module(f"tests.techniques.test_{stem}").SPEC for stem in STEMS}
WAYS = {"ddp": "DDP", "fsdp": "model parallel (FSDP2)"}


class Toy(L.LightningModule):
    def __init__(self, is_sharded: bool) -> None:
        super().__init__()
        self.stem, self.is_sharded = nn.Linear(8, 96), is_sharded
        self.blocks = nn.Sequential(*(Block(96) for _ in range(3)))
        self.head = nn.Linear(96, 1)

    def configure_model(self) -> None:
        if self.is_sharded and not hasattr(self.head.weight, "full_tensor"):
            for part in (*self.blocks, self.stem, self.head):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        loss = (self.head(torch.sin(self.blocks(self.stem(batch[0])))) - batch[1]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 3e-3)


def train(memsave, kind: str, precision: str = "64-true"):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(96, 8, generator=generator)
    module = Toy(kind == "fsdp")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        precision=precision if kind == "ddp" else "32-true",
        strategy="ddp" if kind == "ddp" else L.pytorch.strategies.ModelParallelStrategy(2, 1),
        callbacks=[memsave] if memsave else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), 24))
    parameters = [p.detach() for p in module.parameters()]
    if kind == "fsdp":
        assert sum(p.to_local().numel() for p in parameters) < sum(p.numel() for p in parameters)
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters], trainer


def main(kind: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    plain, plain_trainer = train(None, kind)
    bounds = {"rtol": 1e-11, "atol": 1e-13} if kind == "ddp" else {"rtol": 2e-4, "atol": 2e-5}
    for stem in STEMS:
        spec, memsave = SPECS[stem], MemSave(Recipe("contract", (SPECS[stem].config,)))
        (row,) = (row for row in COMPATIBILITY if {row.first, row.second} == {stem, WAYS[kind]})
        if row.refused_because:
            with pytest.raises(ValueError, match=row.refused_because.replace("(", r"\(").replace(")", r"\)")):
                train(memsave, kind, spec.trainer_precision)
            continue
        found, trainer = train(memsave, kind, spec.trainer_precision)
        assert [applied.technique for applied in memsave.report.applied] == [stem], (stem, memsave.report.applied)
        assert memsave.report.loss_class == spec.loss_class, stem
        if spec.loss_class == "exact":
            for a, b in zip(found, plain, strict=True):
                torch.testing.assert_close(a, b, **bounds, msg=lambda m, stem=stem: f"{stem}: {m}")
            difference = plain_trainer.callback_metrics["loss"] - trainer.callback_metrics["loss"]
            assert abs(float(difference)) < (1e-11 if kind == "ddp" else 1e-4), stem
        flat = torch.cat([p.flatten() for p in found])
        assert torch.isfinite(flat).all(), stem
        both = [torch.zeros_like(flat) for _ in range(2)]
        dist.all_gather(both, flat)
        assert torch.equal(*both), f"{stem}: ranks have drifted apart"
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print("ok", file=sys.stderr)
    dist.barrier()  # a process that ends while gloo's threads of the other one wait may be aborted
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
