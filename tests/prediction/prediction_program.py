"""Two processes of DDP and FSDP2 on CPU (gloo) take what was predicted for them; run by `test_distributed.py`.

Rank 0 prints `ok`.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, OptimizerState, predict


class InPlace:
    """Reduces and scatters as NCCL does: gloo would work on copies."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        dist.all_reduce(input_tensor, group=group)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()]).div_(group.size())


class Module(L.LightningModule):
    def __init__(self, is_sharded: bool) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.net, self.head = nn.Sequential(nn.Linear(6, 32), *blocks, nn.BatchNorm1d(32)), nn.Linear(32, 3)
        self.is_sharded = is_sharded

    def configure_model(self) -> None:
        norms = (self.net[-1], *(block[0] for block in self.net[1:-1]))
        for part in (*norms, *self.net[1:-1], self.net, self.head) if self.is_sharded else ():
            fully_shard(part, mesh=self.device_mesh["data_parallel"]).set_custom_reduce_scatter(InPlace())

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.head(self.net(batch[0])), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


MOST_HELD = 512
"""Bytes of single numbers that gloo's threads may hold a moment longer."""
BATCH = torch.randn(48, 6), torch.randint(0, 3, (48,))
SHARDED = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
RELEASED = OptimizerState(first_moment="32bit", gradients="release")
SHARDED_STATE = ({}, {"second_moment": "factored"}, {"gradients": "release"})
CASES = [
    *(("ddp", slots) for slots in ({"microbatch": 16}, {"checkpointing": "sqrt"}, {"activations": "int4"})),
    ("memsave", {"optimizer_state": OptimizerState(first_moment="8bit", min_size=1024)}),
    ("ddp", {"recipe": "measure", "accumulate_grad_batches": 2}),
    *((DDPStrategy(gradient_as_bucket_view=is_view), {"recipe": "measure"}) for is_view in (False, True)),
    ("ddp_find_unused_parameters_true", {}),
    *((DDPStrategy(bucket_cap_mb=size), {"optimizer_state": RELEASED}) for size in (None, 0.01)),
    ("ddp", {"optimizer_state": OptimizerState(min_size=1024, gradients="into-state"), "microbatch": 16}),
    *((SHARDED, slots) for slots in ({}, {"microbatch": 16}, {"checkpointing": "blocks"}, {"activations": "int4"})),
    (SHARDED, {"recipe": "measure", "accumulate_grad_batches": 2}),
    *((SHARDED, {"optimizer_state": OptimizerState(min_size=1024, **kind)}) for kind in SHARDED_STATE),
    (SHARDED, {"optimizer_state": OptimizerState(min_size=1024), "precision": "bf16+8"}),
]


def settings(strategy, slots):
    slots = dict(slots)
    accumulated = {"accumulate_grad_batches": slots.pop("accumulate_grad_batches", 1)}
    return (
        Module(strategy is SHARDED),
        MemSave(**slots),
        {"strategy": copy.deepcopy(strategy), "devices": 2, **accumulated},
    )


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    predicted = []
    if "LOCAL_RANK" not in os.environ:  # only here, and before there are processes
        for case in CASES:
            module, memsave, options = settings(*case)
            predicted.append(predict(module, BATCH, memsave, **options))
    for number, case in enumerate(CASES):
        module, memsave, options = settings(*case)
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=[memsave],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(module, DataLoader([BATCH] * 8, batch_size=None))
        if dist.get_rank() == 0:
            assert predicted[number].source == "fake", (case, predicted[number].flags)
            took, expected = dict(memsave.report.by_category), dict(predicted[number].by_category)
            held = took.pop("temporary") - expected.pop("temporary")
            assert 0 <= held <= MOST_HELD, (case, held)
            assert took == expected, case
    if dist.get_rank() == 0:
        print("ok", file=sys.stderr)


if __name__ == "__main__":
    main()
