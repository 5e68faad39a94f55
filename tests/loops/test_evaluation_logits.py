"""Validation, test and prediction of a model that ends in a vocabulary: losses compute no logits there either."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics.functional.classification import multiclass_accuracy

from lightning_memsave import Ledger, MemSave
from tests.callbacks.test_wide_heads import CLASSES, HEAD, LOGITS_BYTES, ByHand, Words, words

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
FIT = {**QUIET, "max_epochs": 1, "limit_train_batches": 2, "num_sanity_val_steps": 0, "accelerator": "cpu"}


class Validated(Words):
    """Notes what a validation step takes at most, beyond what is there before."""

    reads = False

    def on_fit_start(self):
        self.peaks, self.outputs = [], []

    def validation_step(self, batch, batch_idx):
        with Ledger().watching(self, batch=batch) as ledger:
            found = self.loss_and_more(batch)
        self.peaks.append(ledger.measurement.peak_bytes - ledger.measurement.held_bytes)
        self.log("loss", found["loss"])
        return found

    def loss_and_more(self, batch):
        logits = self.head(self.blocks(self.embedding(batch)))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        if not self.reads:
            return {"loss": loss}
        self.log("accuracy", multiclass_accuracy(logits.flatten(0, 1), batch.flatten(), CLASSES, average="micro"))
        return {"loss": loss, "logits": logits}

    test_step = validation_step

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append(outputs)


class Reading(Validated):
    reads = True


class ValidatedByHand(ByHand, Validated):
    training_step = ByHand.training_step


def fitted(module, *callbacks):
    loader = DataLoader(words(), 4)
    trainer = L.Trainer(**FIT, callbacks=[*callbacks])
    trainer.fit(module, loader, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "memsave" not in name}


@pytest.mark.parametrize("setting", ["recipe", "slot", "by hand"])
def test_validation_of_a_fit_computes_no_logits(setting, products):
    make = ValidatedByHand if setting == "by hand" else Validated
    memsave = MemSave("exact") if setting == "recipe" else MemSave(activations=HEAD)
    plain, ours = make(), make()
    expected = fitted(plain)
    found = fitted(ours, memsave)
    assert products == []
    assert found == pytest.approx(expected, rel=1e-4)
    batch_logits = LOGITS_BYTES // 4  # a batch has a quarter of the samples
    assert min(plain.peaks) > 2 * batch_logits
    assert max(ours.peaks) < min(plain.peaks) - 2 * batch_logits + 3 * 2**20 / 4


def test_whoever_reads_them_finds_the_plain_ones_and_from_then_on_they_are_computed(products):
    plain, ours = Reading(), Reading()
    expected = fitted(plain)
    found = fitted(ours, MemSave(activations=HEAD))
    assert len(products) == 1
    assert found == pytest.approx(expected, rel=1e-4)
    for a, b in zip(ours.outputs, plain.outputs, strict=True):
        torch.testing.assert_close(a["logits"], b["logits"], rtol=1e-3, atol=1e-4)
    assert [type(each["logits"]) for each in ours.outputs[1:]] == [torch.Tensor] * 3


@pytest.mark.parametrize("make", [Validated, Reading])
@pytest.mark.parametrize("what", ["validate", "test"])
def test_without_a_fit(what, make, products):
    """In inference mode."""
    plain, ours = make(), make()
    for module in plain, ours:
        module.on_fit_start()
    expected = getattr(L.Trainer(**FIT), what)(plain, DataLoader(words(), 4), verbose=False)
    trainer = L.Trainer(**FIT, callbacks=[MemSave("exact")])
    found = getattr(trainer, what)(ours, DataLoader(words(), 4), verbose=False)
    assert len(products) == make.reads
    if not make.reads:
        assert max(ours.peaks) < min(plain.peaks)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)


@pytest.mark.parametrize("what", ["fit", "validate"])
def test_an_input_that_is_edited_after_the_head_is_as_it_was(what, products):
    """Without a fit, in inference mode, nobody counts edits."""

    class Edited(Validated):
        def loss_and_more(self, batch):
            hidden = self.blocks(self.embedding(batch))
            logits = self.head(hidden)
            hidden.mul_(2)
            return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten())}

    found = []
    for callbacks in [], [MemSave(activations=HEAD)]:
        module, trainer = Edited(), L.Trainer(**FIT, callbacks=callbacks)
        module.on_fit_start()
        loaders = [DataLoader(words(), 4)] * (2 if what == "fit" else 1)
        getattr(trainer, what)(module, *loaders)
        found.append(float(trainer.callback_metrics["loss"]))
    assert products == []
    assert found[1] == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("what", ["fit", "validate"])
def test_a_step_that_compares_two_sets_of_weights_finds_the_logits_of_each(what):
    class Compared(Validated):
        def loss_and_more(self, batch):
            logits, live = self.head(self.embedding(batch)), self.head.weight.clone()
            with torch.no_grad():
                self.head.weight.mul_(0.5)
            average = self.head(self.embedding(batch))
            with torch.no_grad():
                self.head.weight.copy_(live)
            losses = [torch.nn.functional.cross_entropy(z.flatten(0, 1), batch.flatten()) for z in (logits, average)]
            return {"loss": losses[0] + 10 * losses[1]}

    found = []
    for callbacks in [], [MemSave("exact")]:
        module, trainer = Compared(), L.Trainer(**FIT, callbacks=callbacks)
        module.on_fit_start()
        getattr(trainer, what)(module, *[DataLoader(words(), 4)] * (2 if what == "fit" else 1))
        found.append(float(trainer.callback_metrics["loss"]))
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_evaluation_leaves_nothing_on_compiled_modules():
    module = Validated()
    module.on_fit_start()
    module.blocks.compile(backend="eager")
    before = module.blocks._compiled_call_impl
    for _ in range(2):
        L.Trainer(**FIT, callbacks=[MemSave("exact")]).validate(module, DataLoader(words(), 4), verbose=False)
    assert module.blocks._compiled_call_impl is before
