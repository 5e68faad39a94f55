"""Large parameters whose optimizer steps in parts: a prediction runs three of them."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memsave import LowPrecision, OptimizerState
from lightning_memsave.prediction.predictor import Predictor
from lightning_memsave.torch_internals import optimizer_class


class Wide(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(96, 256), nn.GELU(), nn.Linear(256, 96))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


FORMATS = [
    [OptimizerState(first_moment="8bit", min_size=0)],
    [OptimizerState(first_moment="8bit", min_size=0, gradients="release")],
    [OptimizerState(first_moment="4bit", second_moment="factored", min_size=0)],
    [OptimizerState(first_moment="fp8", min_size=0), LowPrecision(format="bf16+8")],
    [LowPrecision(format="bf16-sr")],
    [OptimizerState(first_moment="32bit", gradients="release")],
]


@pytest.mark.parametrize(
    "techniques",
    [pytest.param(each, marks=[pytest.mark.slow] * (number in (1, 2, 3))) for number, each in enumerate(FORMATS)],
    ids=range(len(FORMATS)),
)
def test_three_parts_show_what_all_take(monkeypatch, techniques):
    monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", 2048)  # weights have 24,576 elements
    predictor = Predictor(Wide(), torch.ones(4, 96))
    found = predictor(techniques)
    steps = optimizer_class._spans
    monkeypatch.setattr(optimizer_class, "is_fake", lambda p: False)
    whole = predictor(techniques)
    assert found.by_category == whole.by_category
    assert found.by_module == whole.by_module
    assert found.seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert found.num_operations == whole.num_operations
    spans = steps(torch.optim.SGD([torch.ones(1)]), torch.ones(10_000), 2048)
    assert [span for span, _ in spans] == [slice(n, min(n + 2048, 10_000)) for n in range(0, 10_000, 2048)]


def test_large_states_are_predicted_from_few_operations(monkeypatch):
    predictor = Predictor(Wide(), torch.ones(4, 96))
    few, many = ([], 2048), ([], 512)
    for parts, size in (few, many):
        monkeypatch.setitem(optimizer_class.PART_NUMEL, "cpu", size)
        stand_in = optimizer_class.stand_in
        monkeypatch.setattr(
            optimizer_class, "stand_in", lambda *args, made=stand_in, parts=parts: parts.append(1) or made(*args)
        )
        predictor([OptimizerState(first_moment="8bit", min_size=0)])
        monkeypatch.setattr(optimizer_class, "stand_in", stand_in)
    assert len(few[0]) == len(many[0]) == 2 * 2 * 3  # steps, weights, parts
