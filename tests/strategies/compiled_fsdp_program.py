"""Compiled blocks under FSDP2 on two processes (gloo, CPU), with and without codes. Rank 0 prints `ok`."""

from __future__ import annotations

import sys
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import ActivationCompression, MemSave


class Block(nn.Module):
    """A class of its own: of torch's `nn.Sequential` nothing is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.gelu(self.first(self.norm(x))))


class Module(L.LightningModule):
    def __init__(self, is_compiled: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 64), Block(), Block(), nn.Linear(64, 3))
        self.is_compiled = is_compiled

    def configure_model(self) -> None:
        for block in self.net[1:-1]:
            if self.is_compiled:
                block.compile()
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def train(is_compiled, **slots):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(1024, 6, generator=generator), torch.randint(0, 3, (1024,), generator=generator))
    module, memsave = Module(is_compiled), MemSave("measure", **slots, summary=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        strategy="memsave_fsdp",
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=128))
    return torch.cat([p.full_tensor().flatten() for p in module.parameters()]), memsave.report


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    plain, _ = train(False)
    compiled, _ = train(True)
    torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
    coded, report = train(True, activations=ActivationCompression(codecs=("int8",), min_numel=1))
    assert 0 < (coded - compiled).norm() < 0.01 * compiled.norm(), (coded - compiled).norm() / compiled.norm()
    (summary,) = [applied.summary for applied in report.applied if applied.technique == "activation_compression"]
    assert "int8" in summary, summary
    assert report.loss_class == "approximate", (report.loss_class, report.applied)
    if torch.distributed.get_rank() == 0:
        print("ok", file=sys.stderr)


if __name__ == "__main__":
    main()
