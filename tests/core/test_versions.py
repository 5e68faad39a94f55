"""What the package does where a dependency is not installed. (Its versions: `tests/test_package.py`.)"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lightning_memsave import OptimizerState, apply_optimizer_state, wandb_logger
from lightning_memsave.reporting.wandb_file import read_log


@pytest.fixture
def no_optional_packages(monkeypatch):
    for package in ("bitsandbytes", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)  # as Python marks what it must not import


@pytest.mark.usefixtures("no_optional_packages")
@pytest.mark.parametrize("config", [OptimizerState(backend="bitsandbytes"), OptimizerState(placement="paged")])
def test_what_needs_bitsandbytes_says_what_to_install(config):
    model = torch.nn.Linear(100, 100)
    with pytest.raises(ValueError, match=r"`optimizer_state` needs the package bitsandbytes.*pip install bitsandbytes"):
        apply_optimizer_state(torch.optim.AdamW(model.parameters()), config, model)


@pytest.mark.usefixtures("no_optional_packages")
def test_what_needs_wandb_says_what_to_install(tmp_path):
    with pytest.raises(ValueError, match=r"`wandb_logger` needs the package wandb.*pip install wandb"):
        wandb_logger(save_dir=tmp_path, offline=True)
    (tmp_path / "run-1.wandb").write_bytes(b"")
    with pytest.raises(ValueError, match=r"Reading run-1.wandb needs the package wandb.*pip install wandb"):
        read_log(tmp_path / "run-1.wandb")


TRAINS = """
import sys
for package in ("bitsandbytes", "wandb"):
    sys.modules[package] = None
import lightning as L, torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning_memsave import MemSave
class Module(BoringModel):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
memsave = MemSave("extreme", activations="int4", optimizer_state="8bit", summary=False)
options = dict(accelerator="cpu", max_steps=2, enable_checkpointing=False, enable_progress_bar=False)
L.Trainer(callbacks=[memsave], logger=CSVLogger(sys.argv[1]), **options).fit(Module())
assert memsave.report.peak_bytes > 0
print(*(applied.technique for applied in memsave.report.applied))
"""


def test_without_bitsandbytes_and_wandb_every_technique_trains(tmp_path):
    done = subprocess.run([sys.executable, "-c", TRAINS, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "optimizer_state" in done.stdout
