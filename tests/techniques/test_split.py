"""Means over labels: weighted by their number, microbatches give the gradient of the whole batch."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import BertConfig, BertForTokenClassification, GPT2Config, GPT2LMHeadModel

from lightning_memsave import LabelCount, MemSave, Microbatching, microbatches
from lightning_memsave.core.errors import MicrobatchWarning, NotLosslessWarning
from lightning_memsave.techniques.microbatching import active_microbatching

TINY = {"vocab_size": 30, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
DROPLESS = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}


def causal():
    return GPT2LMHeadModel(GPT2Config(**TINY, **DROPLESS))


def classifier():
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropless = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return BertForTokenClassification(BertConfig(**sizes, **dropless, intermediate_size=32, num_labels=30))


class Module(L.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(8)  # far from uniform predictions, so that losses of samples differ

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def padded():
    """Samples of 2 to 12 tokens: labels beyond are -100, and so are prompts of some."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([12, 2, 3, 11, 5, 2, 9, 4])
    tokens = torch.randint(0, 30, (8, 12), generator=generator)
    mask = torch.arange(12) < lengths[:, None]
    labels = torch.where(mask, tokens, -100)
    labels[3, :6] = -100
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": labels}


def fit(module, batch, callbacks):
    trainer = L.Trainer(
        accelerator="cpu",
        precision="64-true",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, DataLoader([batch], batch_size=None))
    return trainer


def trained(module, **settings):
    module = copy.deepcopy(module)
    fit(module, padded(), [MemSave(microbatch=Microbatching(**settings))] if settings else [])
    return [p.detach() for p in module.parameters()]


def largest_difference(first, second):
    return max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("make", "shifted"), [(causal, True), (classifier, False)])
def test_equal_to_the_whole_batch(make, shifted):
    torch.manual_seed(0)
    module = Module(make())
    whole = trained(module)
    counted = trained(module, size=3, weight_fn=LabelCount(shifted=shifted))
    assert largest_difference(counted, whole) < 1e-7  # transformers takes its loss in float32


def test_the_wrong_weights_are_noticed():
    torch.manual_seed(0)
    module = Module(causal())
    whole = trained(module)
    with pytest.warns(NotLosslessWarning, match="weighted by `weight_fn`"), pytest.warns(MicrobatchWarning):
        unshifted = trained(module, size=3, weight_fn=LabelCount())
    assert largest_difference(unshifted, whole) > 1e-5
    assert largest_difference(trained(module, size=3), whole) < 1e-6  # found without any


class Masked(L.LightningModule):
    """Its loss is a mean over labels, by hand: no number where there are none."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 30)
        self.mean = MeanMetric(nan_strategy="error").set_dtype(torch.float64)
        self.seen = []

    def training_step(self, batch, batch_idx):
        labels = batch["labels"]
        mask = (labels >= 0).double()
        losses = nn.functional.cross_entropy(
            self.table(batch["input_ids"]).transpose(1, 2), labels.clamp(min=0), reduction="none"
        )
        loss = (losses * mask).sum() / mask.sum()
        self.log("loss", loss)
        self.mean(loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("length", mask.sum() / len(labels))
        return {"loss": loss, "tokens": batch["input_ids"]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append((outputs["loss"], outputs["tokens"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    "split_fn", [None, lambda batch, size: [{k: v[i : i + 1] for k, v in batch.items()} for i in range(8)]]
)
def test_a_sample_without_labels_weighs_nothing(split_fn):
    batch = padded()
    batch["labels"][[2, 7]] = -100
    torch.manual_seed(0)
    first = Masked()

    def seen(callbacks):
        module = copy.deepcopy(first)
        logged = fit(module, batch, callbacks).callback_metrics
        ((loss, tokens),) = module.seen
        means = (logged["mean_step"], logged["mean_epoch"])
        return module.table.weight, loss, logged["loss"], *means, logged["length"], tokens

    whole = seen([])
    config = Microbatching(size=1, weight_fn=LabelCount(), split_fn=split_fn)
    for ours, expected in zip(seen([MemSave(microbatch=config)]), whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-12)


def test_a_metric_that_updates_otherwise_is_left_alone():
    class OfPairs(MeanMetric):
        def update(self, first, second):
            super().update(first - second)

    class Own(Module):
        def __init__(self):
            super().__init__(causal())
            self.pairs = OfPairs()

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.pairs(loss, second=loss)
            return loss

    fit(Own(), padded(), [MemSave(microbatch=3)])


def test_loops_of_ones_own_leave_out_what_has_no_labels():
    batch = padded()
    batch["labels"][[2, 7]] = -100
    with active_microbatching(Microbatching(size=1, weight_fn=LabelCount()), lambda num_parts: None):
        found = list(microbatches(batch))
    assert len(found) == 6
    assert sum(weight for _, weight in found) == pytest.approx(1)


def test_where_labels_are():
    labels = torch.tensor([[1, -1, 2], [-1, -1, 3]])
    assert LabelCount(ignore_index=-1)({"labels": labels}) == 3
    assert LabelCount(key=1, ignore_index=-1)((torch.zeros(2), labels)) == 3
    assert LabelCount(key="y", ignore_index=-1, shifted=True)(SimpleNamespace(y=labels)) == 2
    assert nn.functional.cross_entropy(torch.zeros(6, 4), labels.flatten(), ignore_index=-1) > 0
