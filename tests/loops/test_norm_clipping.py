"""Clipping by norm where gradients end in backward, against Lightning's own clipping of gradients that are kept."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memsave import Checkpointing, MemSave, OptimizerState
from lightning_memsave.core.errors import NoEffectWarning
from tests.harness import fit
from tests.techniques.test_gradient_release import Module, assert_same, batches

MAX_NORM = {"gradient_clip_val": 0.05}


def released(norm_clipping: str = "two-pass", **settings) -> OptimizerState:
    return OptimizerState(**{"first_moment": "32bit", "gradients": "release", **settings}, norm_clipping=norm_clipping)


class Noisy(Module):
    """A module with dropout, running statistics, a counter of its own, and a loss that is sometimes missing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.num_batches, self.seen = nn.BatchNorm1d(5), 0, []

    def training_step(self, batch, batch_idx):
        self.num_batches += 1
        self.seen.append(batch_idx)
        x = torch.dropout(self.norm(batch[0]), 0.3, self.training)
        loss = super().training_step((x + 0.1 * torch.randn_like(x), batch[1]), batch_idx)
        self.log("count", float(self.num_batches + 100 * len(self.seen)))
        return {"loss": loss, "count": self.num_batches}


@pytest.mark.parametrize("make", [Module, Noisy])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activations": "exact"},
        {"activations": "int8"},
        {"checkpointing": Checkpointing(modules="Net")},
        {"checkpointing": "sqrt"},
        {"precision": "bf16-sr"},
    ],
    ids=str,
)
def test_two_passes_clip_to_the_bit_as_gradients_that_are_kept(make, settings):
    module = make()
    kept = fit(module, batches(), MemSave("measure", **settings), **MAX_NORM)
    memsave = MemSave("measure", optimizer_state=released(), **settings)
    ours = fit(module, batches(), memsave, **MAX_NORM)
    assert_same(kept, ours)
    unclipped = fit(module, batches(), MemSave("measure", **settings))
    assert any(not torch.equal(kept.parameters[n], unclipped.parameters[n]) for n in kept.parameters)
    if not settings:
        assert memsave.report.loss_class == "exact"


def test_low_bit_state_is_clipped_as_well():
    module = Module()
    kept = OptimizerState(min_size=30)
    ours = released(first_moment="8bit", min_size=30)
    assert_same(*(fit(module, batches(), MemSave(optimizer_state=state), **MAX_NORM) for state in (kept, ours)))


def test_no_gradient_is_kept():
    memsave = MemSave(optimizer_state=released())
    fit(Module(), batches(), memsave, **MAX_NORM)
    largest = max(p.nbytes for p in Module().parameters())
    assert memsave.report.by_category["gradients"] <= largest


def test_the_previous_step_s_norm_is_that_of_the_step_before():
    """A reference in plain torch: the first step clips by its own norm, each later one by that of the step before."""
    module = Module("SGD", "exponential")
    memsave = MemSave(optimizer_state=released("previous-step"))
    ours = fit(module, batches(), memsave, **MAX_NORM)
    assert memsave.report.loss_class == "changed"
    assert any("step before" in reason for applied in memsave.report.applied for reason in applied.reasons)

    class Reference(L.Callback):
        def __init__(self):
            self.before = None

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            gradients = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            used = norm if self.before is None else self.before
            self.before = norm
            for gradient in gradients:
                gradient.mul_((MAX_NORM["gradient_clip_val"] / (used + 1e-6)).clamp(max=1.0))

    reference = fit(module, batches(), callbacks=[Reference()])
    for name, value in reference.parameters.items():
        assert torch.equal(value, ours.parameters[name]), name


class Teacher(Module):
    """It moves a parameter in `training_step`."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Parameter(torch.zeros(3), requires_grad=False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.teacher.lerp_(self.head.weight[0], 0.1)
        return super().training_step(batch, batch_idx)


class EditsItsBatch(Module):
    def training_step(self, batch, batch_idx):
        batch[0].mul_(2)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("make", "word"), [(Teacher, "parameter teacher"), (EditsItsBatch, "edits a tensor of the ba")]
)
def test_a_step_that_cannot_be_repeated_is_refused(make, word):
    with pytest.raises(RuntimeError, match=rf"norm_clipping.*runs each batch twice.*{word}"):
        fit(make(), batches(), MemSave(optimizer_state=released()), **MAX_NORM)


class Skips(Module):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_batches_that_are_skipped_are_skipped():
    module = Skips()
    plain = fit(module, batches(), **MAX_NORM)
    assert_same(plain, fit(module, batches(), MemSave(optimizer_state=released()), **MAX_NORM))
    late = fit(module, batches(), MemSave(optimizer_state=released("previous-step")), **MAX_NORM)
    assert late.logged[0] == plain.logged[0]
    assert all(p.isfinite().all() for p in late.parameters.values())


def test_the_trainer_clips_again_afterwards():
    trainer = L.Trainer(
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[MemSave(optimizer_state=released())],
        **MAX_NORM,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(batches(), batch_size=None))
    assert trainer.gradient_clip_val == MAX_NORM["gradient_clip_val"]


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}])
def test_where_nothing_is_clipped_by_norm_it_has_no_effect(options):
    module, memsave = Module(), MemSave(optimizer_state=released("previous-step"))
    with pytest.warns(NoEffectWarning, match="clips nothing by norm"):
        ours = fit(module, batches(), memsave, **options)
    assert_same(fit(module, batches(), **options), ours)
    assert memsave.report.loss_class == "exact"


class TakesItsOwn(Module):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`")
def test_a_step_that_takes_its_batches_itself_is_refused():
    with pytest.raises(ValueError, match=r"norm_clipping cannot be combined with dataloader_iter"):
        fit(TakesItsOwn(), batches(), MemSave(optimizer_state=released(), microbatch=False), **MAX_NORM)


def test_without_release_it_is_refused():
    with pytest.raises(ValueError, match=r"OptimizerState.norm_clipping` is used with `gradients=.release"):
        OptimizerState(norm_clipping="two-pass")
    with pytest.raises(ValueError, match=r"norm_clipping` must be one of 'two-pass', 'previous-step'"):
        OptimizerState(gradients="release", norm_clipping="later")
