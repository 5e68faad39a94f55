"""Two processes of FSDP2 on CPU (gloo) with a budget, or (`late`) with layers that come late, and a bound of noise."""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import ActivationCompression, BudgetWarning, MemSave


class InPlace:
    """Reduces and scatters as NCCL does: gloo would work on copies."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        dist.all_reduce(input_tensor, group=group)
        output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()]).div_(group.size())


def new_net():
    blocks = (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3))
    return nn.Sequential(nn.Linear(6, 64), *blocks, nn.Linear(64, 3))


class Module(L.LightningModule):
    """Has its layers from the start, or gets them when they are sharded, from the meta device."""

    def __init__(self, is_late: bool = False) -> None:
        super().__init__()
        self.net = None if is_late else new_net()

    def configure_model(self) -> None:
        assert self.trainer.world_size == self.device_mesh.size()  # a trial is of this process alone
        mesh = self.device_mesh["data_parallel"]
        if self.net is None:
            with torch.device("meta"):
                self.net = new_net()
        if not hasattr(self.net, "unshard"):
            for part in (*list(self.net)[1:-1], self.net):
                fully_shard(part, mesh=mesh).set_custom_reduce_scatter(InPlace())

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def train(memsave, module=None, max_epochs=1, ckpt_path=None):
    torch.manual_seed(0)
    module = module or Module()
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(1024, 6, generator=generator), torch.randint(0, 3, (1024,), generator=generator)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=max_epochs,
        strategy="memsave_fsdp",
        # The norm is summed over the processes of the run, not over those of its plan.
        gradient_clip_val=0.05,
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(*rows), batch_size=128), ckpt_path=ckpt_path)
    return module, trainer


def weights(module):
    return [p.detach().full_tensor() for p in module.parameters()]


def check_the_plan(memsave):
    """Every process has it, and it takes what it says."""
    texts = [None, None]
    dist.all_gather_object(texts, memsave.plan.to_json())
    assert texts[0] == texts[1]
    plan, report = memsave.plan, memsave.report
    assert plan.source == "fake"
    assert plan.steps
    assert report.peak_bytes <= plan.budget_bytes
    assert abs(report.peak_bytes - plan.peak_bytes) <= MOST_HELD


FEW = {"optimizer_state": False, "activations": False, "tiling": False}
MOST_HELD = 4096
"""Bytes that gloo's threads may hold a moment longer, or give back a moment later."""


def check_a_budget_and_its_resumption():
    plain, _ = train(MemSave("measure"))
    memsave = MemSave(budget="0.75x", **FEW)
    planned, trainer = train(memsave)
    check_the_plan(memsave)
    assert memsave.report.loss_class == "exact"
    for a, b in zip(weights(plain), weights(planned), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    trainer.save_checkpoint(Path(folder[0]) / "sharded")
    resumed = MemSave(budget="0.75x", **FEW)
    _, trainer = train(resumed, max_epochs=2, ckpt_path=Path(folder[0]) / "sharded")
    assert trainer.global_step == 8
    check_the_plan(resumed)
    assert resumed.plan == memsave.plan


def check_layers_that_come_late():
    memsave, module = MemSave("balanced", budget="0.4x", activations=False), Module(is_late=True)
    for _ in range(2):  # the second time with the same plan, as the module is sharded already
        train(memsave, module)
        check_the_plan(memsave)
    with pytest.raises(ValueError, match="a module that is sharded already cannot be copied"):
        train(MemSave(budget="0.5x"), module)

    codes, texts = ActivationCompression(codecs=("int4",), min_numel=64), [None, None]
    bounded, module = MemSave(activations=codes, max_gradient_noise=0.03), Module(is_late=True)
    for _ in range(2):
        train(bounded, module)
        dist.all_gather_object(texts, bounded.state_dict()["chosen_codecs"])
        assert texts[0] == texts[1]
        assert 0 < bounded.report.gradient_noise <= 0.03


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("error", BudgetWarning)
    check_layers_that_come_late() if "late" in sys.argv[1:] else check_a_budget_and_its_resumption()
    if dist.get_rank() == 0:
        print("ok", file=sys.stderr)


if __name__ == "__main__":
    main()
