"""A second fit of a module that keeps its optimizer: what an earlier fit made of it is replaced, or told."""

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, NoEffectWarning, OptimizerState


class Keeps(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)
        self.optimizer = torch.optim.AdamW(self.parameters(), 1e-2)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return self.optimizer


def fit(module, **settings):
    memsave = MemSave(**settings)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.ones(16, 32), 4))
    return memsave.report


@pytest.fixture
def kept():
    module = Keeps()
    assert fit(module, optimizer_state=OptimizerState(first_moment="8bit", min_size=1)).loss_class == "changed"
    assert type(module.optimizer).__qualname__ == "AdamWCoded"
    return module


def steps_of(module):
    return {float(state["step"]) for state in module.optimizer.state.values()}


def test_a_fit_that_does_not_ask_for_low_bit_state_says_that_there_is_some(kept):
    report = fit(kept)
    assert report.loss_class == "changed"
    assert "the state of AdamWCoded is low-bit" in report.loss_class_reasons
    assert steps_of(kept) == {8.0}


def test_another_format_replaces_it(kept):
    report = fit(kept, optimizer_state=OptimizerState(first_moment="4bit", min_size=1))
    assert any("4-bit state" in applied.summary for applied in report.applied)
    assert steps_of(kept) == {8.0}


def test_releasing_gradients_in_32_bits_leaves_it(kept):
    report = fit(kept, optimizer_state=OptimizerState(first_moment="32bit", gradients="release"))
    assert type(kept.optimizer) is torch.optim.AdamW
    assert report.loss_class == "exact"
    assert steps_of(kept) == {8.0}


@pytest.mark.parametrize("state", ["8bit", "4bit", "offload", OptimizerState(projection="galore", rank=64, min_size=0)])
def test_a_format_that_changes_no_parameters_state_says_so(state):
    with pytest.warns(NoEffectWarning, match="`optimizer_state` in '.*' has no effect on this model"):
        report = fit(Keeps(), optimizer_state=state)
    assert report.loss_class == "exact"


def test_a_default_that_changes_nothing_is_silent():
    assert fit(Keeps(), recipe="balanced", activations=False).loss_class == "exact"  # warnings are errors here
