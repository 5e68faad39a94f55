"""What translates in the study of BLEU."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.quality.quality_dynamicconv import Checkpoints, mean_of_checkpoints


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
