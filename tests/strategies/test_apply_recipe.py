"""A recipe on a trainer that is being set up: what comes before the optimizers, what after, and what steps aside."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import Checkpointing, LowPrecision, MemSave, OptimizerState, Sparsity
from lightning_memsave.strategies import apply_recipe
from tests.strategies.quiet_runs import QUIET


class Net(L.LightningModule):
    def __init__(self, optimizer=torch.optim.AdamW):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).square().mean()

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), 1e-2)


class Look(L.Callback):
    """The session, and what `look` sees of a trainer between two steps."""

    def __init__(self, look=lambda trainer: None):
        self.look, self.seen = look, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.session = trainer.strategy.memsave
        self.seen.append(self.look(trainer))


def fitted(module, look=lambda trainer: None, **slots):
    memsave, callback = MemSave(**slots), Look(look)
    trainer = L.Trainer(**{**QUIET, "max_steps": 2}, callbacks=[memsave, callback])
    trainer.fit(module, DataLoader(torch.linspace(-1, 1, 8 * 16).reshape(8, 16), 4))
    return memsave, callback


@pytest.fixture
def told(monkeypatch):
    """What is told of defaults that are left out."""
    lines = []
    monkeypatch.setattr(apply_recipe, "rank_zero_info", lines.append)
    return lines


@pytest.mark.filterwarnings("ignore::lightning_memsave.NoEffectWarning")
def test_weights_are_sparse_and_short_before_there_are_optimizers():
    class Looks(Net):
        def configure_optimizers(self):
            weight = self.blocks[0][0].weight
            seen.append((weight.dtype, weight.numel(), type(self.blocks[0][0]) is not nn.Linear))
            return super().configure_optimizers()

    seen, module = [], Looks()
    memsave, _ = fitted(module, recipe="measure", sparsity=Sparsity(sparsity=0.75, min_size=1), precision="bf16-sr")
    assert seen == [(torch.bfloat16, 16 * 16, True)]
    assert [a.technique for a in memsave.report.applied] == ["sparsity", "low_precision"]
    assert type(module.blocks[0][0]) is nn.Linear
    assert module.blocks[0][0].weight.dtype == torch.float32
    assert int((module.blocks[0][0].weight != 0).sum()) == 16 * 16 // 4


def test_regions_that_are_named_are_there_before_the_first_batch_and_others_are_planned_in_it():
    def regions(trainer):
        scopes = trainer.strategy.memsave.scopes
        planned = None if scopes.planned is None else scopes.planned.is_due
        return scopes.regions is not None, planned, scopes.region_inputs is not None

    named = {"checkpointing": Checkpointing(modules="blocks.*"), "recipe": "measure"}
    assert fitted(Net(), regions, **named)[1].seen == [(True, None, False)] * 2
    offloaded = {**named, "checkpointing": Checkpointing(modules="blocks.*", offload=True)}
    assert fitted(Net(), regions, **offloaded)[1].seen == [(True, None, True)] * 2
    planned = {**named, "checkpointing": Checkpointing(budget=10**9)}
    assert fitted(Net(), regions, **planned)[1].seen == [(False, True, False), (False, False, False)]
    assert fitted(Net(), regions, recipe="measure")[1].seen == [(False, None, False)] * 2


def test_the_store_is_open_where_activations_are_on():
    def is_open(trainer):
        return trainer.strategy.memsave.scopes.activations is not None

    assert fitted(Net(), is_open, recipe="measure", activations="exact")[1].seen == [True, True]
    assert fitted(Net(), is_open, recipe="measure")[1].seen == [False, False]


def test_a_default_that_an_optimizer_cannot_carry_steps_aside_and_what_was_asked_for_is_refused(told):
    memsave, look = fitted(Net(torch.optim.LBFGS), recipe="balanced", activations=False, precision=False)
    assert look.session.recipe.get(OptimizerState) is None
    assert [a.technique for a in memsave.report.applied] == ["early_zero_grad"]
    assert len(told) == 1
    assert told[0].startswith("memsave: optimizer_state is left out: ")
    with pytest.raises(ValueError, match="LBFGS"):
        fitted(Net(torch.optim.LBFGS), optimizer_state="8bit")


def test_short_weights_by_default_are_long_again_where_the_optimizer_cannot_step_them(told):
    slots = {"recipe": "extreme", "sparsity": False, "activations": False, "microbatch": False}
    memsave, look = fitted(Net(torch.optim.LBFGS), lambda t: t.lightning_module.blocks[0][0].weight.dtype, **slots)
    assert look.seen == [torch.float32] * 2
    assert look.session.weights is None
    assert look.session.recipe.get(LowPrecision) is None
    assert {a.technique for a in memsave.report.applied} == {"early_zero_grad"}
    assert [line.partition(" is left out")[0] for line in told] == [
        "memsave: optimizer_state",
        "memsave: low_precision",
    ]
    with pytest.raises(ValueError, match="LBFGS"):
        fitted(Net(torch.optim.LBFGS), precision="bf16-sr")
