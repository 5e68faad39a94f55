"""Metrics of classification see in a part what they see in its batch: logits, or probabilities."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave
from lightning_memsave.loops import metric_inputs
from lightning_memsave.loops.metric_inputs import MetricInputs
from tests.strategies.quiet_runs import QUIET

LOGITS = torch.tensor([[0.2, 0.9, 0.1], [-2.0, 3.0, 1.0], [0.6, 0.3, 0.8], [4.0, -1.0, 0.5]])
LABELS = torch.tensor([1, 2, 0, 0])
METRICS = {
    "binary": (torchmetrics.AUROC("binary"), LOGITS[:, 0], LABELS % 2),
    "multilabel": (torchmetrics.CalibrationError("binary"), LOGITS[:, 1], LABELS % 2),
    "multiclass": (torchmetrics.AveragePrecision("multiclass", num_classes=3), LOGITS, LABELS),
}


def given_in_parts(metric, logits, labels):
    """Give a metric one sample after the other, in all the ways that there are."""
    with MetricInputs([metric]) as inputs:
        metric.update(logits[1:2], labels[1:2])
        metric.update(preds=logits[:1], target=labels[:1])
        for place in range(2, len(logits)):
            metric.update(logits[place : place + 1], target=labels[place : place + 1])
    inputs.give_anew()
    return inputs


@pytest.mark.parametrize("kind", METRICS)
def test_parts_of_logits_are_taken_for_logits(kind):
    metric, logits, labels = METRICS[kind]
    whole, update = metric(logits, labels), metric.update
    metric.reset()
    inputs = given_in_parts(metric, logits.requires_grad_(), labels)
    torch.testing.assert_close(metric.compute(), whole)
    assert (inputs.are_mixed, metric.update) == (False, update)
    copy.deepcopy(metric)  # which torch refuses where a graph is kept


@pytest.mark.parametrize("shift", [0.0, -2.0, 2.0])
def test_parts_of_one_kind_are_left_as_they_are(shift):
    values, labels = torch.tensor([0.2, 0.9, 0.6]) + shift, torch.tensor([0, 1, 0])
    metric = torchmetrics.AUROC("binary")
    with MetricInputs([metric]) as inputs:
        for value, label in zip(values, labels, strict=True):
            metric.update(value[None], label[None])
    before = list(metric.preds)
    inputs.give_anew()
    assert all(a is b for a, b in zip(metric.preds, before, strict=True))


def test_what_is_too_large_to_be_kept_is_told(monkeypatch):
    monkeypatch.setattr(metric_inputs, "_MOST_ELEMENTS", 3)
    metric, logits, labels = METRICS["binary"]
    metric.reset()
    assert given_in_parts(metric, logits, labels).are_mixed


def test_integers_and_other_metrics_pass():
    accuracy, mean = torchmetrics.Accuracy("multiclass", num_classes=3), torchmetrics.MeanMetric()
    with MetricInputs([accuracy, mean]):
        accuracy.update(torch.tensor([1, 2]), torch.tensor([1, 1]))
        mean.update(torch.tensor([7.0]))
    assert (float(accuracy.compute()), float(mean.compute())) == (0.5, 7.0)


class Classifier(L.LightningModule):
    """Logits of one sample often all lie in [0, 1]; those of a batch do not."""

    fails = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        metrics = [torchmetrics.Accuracy("binary"), torchmetrics.AUROC("binary")]
        self.train_metrics = torchmetrics.MetricCollection(metrics)
        self.val_metrics = self.train_metrics.clone(prefix="val_")

    def scored(self, batch, metrics):
        logits = self.net(batch[0]).squeeze(1)
        is_asked = self.training and not torch.is_grad_enabled()
        if self.fails and len(logits) > 1 and not is_asked:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        metrics.update(logits, batch[1])
        self.log_dict(metrics, on_step=False, on_epoch=True)
        return F.binary_cross_entropy_with_logits(logits, batch[1].float())

    def training_step(self, batch, batch_idx):
        return self.scored(batch, self.train_metrics)

    def validation_step(self, batch, batch_idx):
        self.scored(batch, self.val_metrics)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def metrics_of(memsave=None, fails=False):
    module = Classifier()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(128, 8, generator=generator)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 32)
    trainer = L.Trainer(**{**QUIET, "max_steps": -1, "max_epochs": 2}, callbacks=[memsave] if memsave else [])
    module.fails = fails
    trainer.fit(module, loader, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "memsave" not in name}


@pytest.mark.parametrize(
    ("memsave", "fails"),
    [({"microbatch": 1}, False), ({"microbatch": 2}, False), ({}, True)],
    ids=["one sample each", "two", "recovered"],
)
@pytest.mark.filterwarnings("ignore:Memory ran out in evaluation")
def test_metrics_of_an_epoch_are_those_of_whole_batches(memsave, fails):
    memsave = MemSave(**memsave, summary=False)
    assert metrics_of(memsave, fails) == pytest.approx(metrics_of(), abs=1e-6)
    assert memsave.report.loss_class == "exact"


@pytest.mark.filterwarnings("ignore:Microbatches change")
def test_where_that_cannot_be_had_the_class_is_another(monkeypatch):
    monkeypatch.setattr(metric_inputs, "_MOST_ELEMENTS", 3)
    memsave = MemSave(microbatch=1, summary=False)
    metrics_of(memsave)
    assert memsave.report.loss_class_reasons == ("metrics took logits of some microbatches for probabilities",)
