"""A part of the step in inference mode, as a frozen teacher's: every plan and every measure of recovery bears it."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import Checkpointing, MemSave, Microbatching
from tests.strategies.record import Record

pytestmark = pytest.mark.filterwarnings("ignore:Found .* module.* in eval mode")
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x):
        return x + super().forward(x)


class Distils(L.LightningModule):
    """The student learns the teacher's output, which is an inference tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(*(Block() for _ in range(4)))
        self.teacher = nn.Sequential(*(Block() for _ in range(2)), nn.Dropout(0.0), nn.BatchNorm1d(8)).eval()
        self.num_failures, self.failed = 0, Record()

    def training_step(self, batch, batch_idx):
        with torch.inference_mode():
            target = self.teacher(batch[0])
        z = self.student(batch[0])
        if len(self.failed) < self.num_failures and torch.is_grad_enabled():
            self.failed.append(len(z))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried ...")
        return F.mse_loss(z, target.clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(module, memsave=None):
    module = copy.deepcopy(module)
    data = [(torch.randn(8, 8, generator=torch.Generator().manual_seed(i)),) for i in range(3)]
    trainer = L.Trainer(**QUIET, max_epochs=2, accelerator="cpu", callbacks=[memsave] if memsave else [])
    trainer.fit(module, DataLoader(data, batch_size=None))
    return module


@pytest.mark.parametrize("slots", [
    {"checkpointing": "blocks"},
    {"checkpointing": "sqrt"},
    {"checkpointing": "recursive"},
    {"checkpointing": Checkpointing(budget=0.9)},
    {"activations": "exact"},
    {"activations": "exact", "checkpointing": "sqrt"},
    {"microbatch": Microbatching(size=4)},
    {"budget": "0.95x"},
], ids=str)  # fmt: skip
def test_inference_mode_in_the_step(slots):
    module = Distils()
    plain, memsave = trained(module), MemSave(**slots)
    ours = trained(module, memsave)
    tolerance = 1e-6 if "microbatch" in slots or "budget" in slots else 0
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert (a - b).abs().max() <= tolerance


@pytest.mark.parametrize("num_failures", range(1, 6))
def test_every_measure_of_recovery(num_failures):
    module = Distils()
    plain, memsave = trained(module), MemSave()
    module.num_failures = num_failures
    ours = trained(module, memsave)
    assert memsave.report.num_oom_recovered >= min(num_failures, 3)  # the rehearsal of a plan may take one
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert (a - b).abs().max() <= (1e-6 if num_failures > 3 else 0)
