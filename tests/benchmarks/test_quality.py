"""What translates in the study of BLEU, and runs that go on."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.harness import resuming
from benchmarks.models import wrn
from benchmarks.quality import quality_wrn
from benchmarks.quality.quality_dynamicconv import Checkpoints, mean_of_checkpoints
from lightning_memsave.demo.model import WideResNet


class OneWeight(LightningModule):
    """Is 3 at first, and one more after each step."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([3.0], dtype=torch.bfloat16))

    def training_step(self, batch, batch_idx):
        return -self.weight.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_the_mean_is_of_the_steps_that_were_asked_for(tmp_path):
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=Checkpoints(tmp_path, (2, 5)),
    )
    trainer.fit(OneWeight(), DataLoader([torch.zeros(1)] * 6, batch_size=None))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.pt", "5.pt"]
    mean = mean_of_checkpoints(tmp_path)
    assert mean["weight"].dtype == torch.float32
    assert mean["weight"].item() == (5 + 8) / 2


@pytest.mark.parametrize(("setting", "last_epoch"), [("baseline", 2), (f"{quality_wrn.DENSEST}, microbatch 4", 0)])
def test_a_run_that_was_ended_goes_on_as_if_it_had_not_been(setting, last_epoch, tmp_path, monkeypatch):
    modules, before = [], resuming.ResumedRun.on_train_epoch_end

    def fit(module, *args, **kwargs):
        modules.append(module)
        return wrn.fit(module, *args, **kwargs)

    def end(run, trainer, module):
        before(run, trainer, module)
        if trainer.current_epoch == last_epoch:
            raise RuntimeError("ended")

    monkeypatch.setattr(resuming, "FOLDER", tmp_path)
    monkeypatch.setattr(quality_wrn, "fit", fit)
    monkeypatch.setattr(quality_wrn, "WideResNet", lambda num_classes: WideResNet(10, 1, num_classes))

    def train():
        size = {"pixels": 16, "num_train": 200, "epochs": 4, "num_test": 250}
        return quality_wrn.train(1, quality_wrn.CONVERGED[setting], size=size, resumes=True)

    expected = train()
    with monkeypatch.context() as patched:
        patched.setattr(resuming.ResumedRun, "on_train_epoch_end", end)
        with pytest.raises(RuntimeError, match="ended"):
            train()
    assert len(list(tmp_path.iterdir())) == 1
    found = train()
    assert list(tmp_path.iterdir()) == []
    seconds = expected.pop("cpu_seconds_run"), found.pop("cpu_seconds_run")
    assert min(seconds) > 0
    assert found == expected
    whole, _, resumed = (module.state_dict() for module in modules)
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)
