"""Language models in Lightning whose logits nobody reads, or somebody does: as in plain Lightning, and as predicted."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from lightning_memsave import Checkpointing, LowRank, MemSave, OptimizerState, Sparsity, predict
from lightning_memsave.saved_tensors import deferred_logits

NUM_TOKENS, WIDTH = 600, 16


class Language(L.LightningModule):
    """An embedding, a block, and a head; `use` is what `training_step` returns."""

    def __init__(self, use="loss", tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.block = nn.Embedding(NUM_TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.use = nn.Linear(WIDTH, NUM_TOKENS, bias=not tied), use
        if tied:
            self.head.weight = self.table.weight
        self.accuracy, self.found, self.latest = MulticlassAccuracy(NUM_TOKENS), [], None

    def training_step(self, batch, batch_idx):
        if self.use == "out of memory" and len(batch) > 6:
            self.head(self.table(batch))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        z = self.head(torch.tanh(self.block(self.table(batch))))
        loss = F.cross_entropy(z[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        if self.use == "metric":
            self.log("accuracy", self.accuracy(z[:, :-1].flatten(0, 1), batch[:, 1:].flatten()))
        if self.use == "attribute":
            self.latest = z
        if self.use == "output":
            return {"loss": loss, "logits": z}
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.use == "output":
            self.found.append(outputs["logits"].double().mean().item())
        if self.use == "attribute":
            self.found.append(self.latest.double().mean().item())

    def validation_step(self, batch, batch_idx):
        self.found.append(self.head(self.block(self.table(batch))).mean().item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


BATCHES = [torch.arange(number, number + 8 * 32).view(8, 32) % NUM_TOKENS for number in range(3)]


@pytest.fixture
def products(monkeypatch):
    """One entry for each time that a head's whole output was computed after all."""
    seen, product = [], deferred_logits.HeadCall.product
    monkeypatch.setattr(deferred_logits.HeadCall, "product", lambda self: seen.append(1) or product(self))
    return seen


def fit(module, memsave=None, **options):
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[memsave] if memsave else [],
        **options,
    )
    loader = DataLoader(BATCHES, batch_size=None)
    trainer.fit(module, loader, loader)
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def lean(*codecs, **slots):
    return MemSave("measure", activations=["linear-cross-entropy", *codecs], **slots)


@pytest.mark.parametrize("use", ["loss", "metric", "output", "attribute"])
@pytest.mark.parametrize("settings", [{}, {"microbatch": 2}, {"precision": "bf16-mixed"}])
def test_it_trains_as_plain_lightning_does_whoever_reads_logits(use, settings):
    if use == "attribute" and "microbatch" in settings:
        pytest.skip("an attribute is of the last microbatch, whatever becomes of logits")
    plain_module, module = Language(use).double(), Language(use).double()
    slots = {key: value for key, value in settings.items() if key == "microbatch"}
    options = {key: value for key, value in settings.items() if key == "precision"}
    plain_weights, weights = fit(plain_module, **options), fit(module, lean(**slots), **options)
    torch.testing.assert_close(weights, plain_weights, rtol=1e-9, atol=1e-9)
    assert module.found == pytest.approx(plain_module.found, rel=1e-9)
    if use == "metric":
        assert module.accuracy.compute() == plain_module.accuracy.compute()


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}])
@pytest.mark.parametrize("tied", [False, True])
def test_ways_of_training(options, tied, products):
    weights = fit(Language(tied=tied).double(), lean(), **options)
    assert products == [1], "validation reads them, and they are computed there from its second batch on"
    torch.testing.assert_close(weights, fit(Language(tied=tied).double(), **options), rtol=1e-9, atol=1e-9)


def test_a_batch_that_ran_out_of_memory_behind_its_head_is_run_again():
    weights = fit(Language("out of memory").double(), lean(microbatch="auto"))
    torch.testing.assert_close(weights, fit(Language().double()), rtol=1e-9, atol=1e-9)


PREDICTED = {
    "alone": lambda: lean(),
    "exact": lambda: lean("exact"),
    "int4": lambda: lean("exact", "int4"),
    "microbatch": lambda: lean(microbatch=2),
    "regions": lambda: lean(checkpointing=Checkpointing(regions=[["block"]])),
    "bf16-sr": lambda: lean(precision="bf16-sr"),
    "released": lambda: lean(optimizer_state=OptimizerState(first_moment="32bit", gradients="release")),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", PREDICTED)
def test_the_predicted_peak_is_the_measured_one(name, tied):
    prediction = predict(Language(tied=tied), BATCHES[0], PREDICTED[name]())
    memsave = PREDICTED[name]()
    fit(Language(tied=tied), memsave)
    assert prediction.source == "fake"
    assert dict(prediction.by_category) == dict(memsave.report.by_category)
    assert prediction.peak_bytes == memsave.report.peak_bytes
    logits = 8 * 32 * NUM_TOKENS * 4
    assert predict(Language(tied=tied), BATCHES[0], MemSave("measure")).peak_bytes - prediction.peak_bytes >= logits


@pytest.mark.parametrize("use", ["metric", "output"])
def test_the_predicted_peak_is_the_measured_one_where_logits_are_read(use):
    prediction, memsave = predict(Language(use), BATCHES[0], lean()), lean()
    fit(Language(use), memsave)
    assert prediction.peak_bytes == memsave.report.peak_bytes


@pytest.mark.parametrize("slots", [{"sparsity": Sparsity(sparsity=0.5, modules="head")}, {"low_rank": LowRank(rank=2)}])
def test_heads_that_are_sparse_or_of_low_rank_are_computed_where_they_are_called(slots, monkeypatch):
    made = []
    monkeypatch.setattr(deferred_logits, "_made", lambda *_: made.append(1))
    fit(Language(), lean(**slots))
    assert made == []
