"""Sparse layers, and layers that train in part, in a LightningModule that is compiled: eager between compiled parts."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, Sparsity, UpdateSchedule
from tests.strategies.quiet_runs import QUIET

EVERY_SECOND = UpdateSchedule(every=2)
SETTINGS = {
    "static": {"sparsity": 0.9},
    "changing": {"sparsity": Sparsity(sparsity=0.9, method="rigl", schedule=EVERY_SECOND)},
    "with all": {"sparsity": 0.9, "microbatch": 4, "optimizer_state": "8bit", "precision": "bf16-sr"},
    "in part": {"sparse_update": 0.25, "microbatch": 4},
}


def block():
    return nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(2)
        ]
        self.net = nn.Sequential(*blocks)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def trained(settings, backend):
    module, memsave = Net(), MemSave(**settings, summary=False)
    data = DataLoader(torch.randn(96, 128, generator=torch.Generator().manual_seed(1)), 16)
    trainer = L.Trainer(**{**QUIET, "max_epochs": 1}, callbacks=[memsave])
    trainer.fit(module if backend is None else torch.compile(module, backend=backend), data)
    return module.state_dict(), memsave.report


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by Dynamo
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_compiled_and_eager_train_alike_in_the_same_memory(settings):
    (eager, report), (compiled, compiled_report) = trained(settings, None), trained(settings, "aot_eager")
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, msg=name)
    assert compiled_report.loss_class == report.loss_class
    layers = {each.technique: each.summary for each in compiled_report.applied}
    assert layers.keys() == {each.technique for each in report.applied}
    assert compiled_report.peak_bytes == pytest.approx(report.peak_bytes, rel=0.02)
