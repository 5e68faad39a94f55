"""Recovery in validation, test and prediction."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC

from lightning_memsave import MemSave
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError
from tests.loops.recovery_runs import limited
from tests.loops.test_recovery import QUIET, Net, data

pytestmark = pytest.mark.filterwarnings("ignore::lightning_memsave.core.errors.NotLosslessWarning")  # numbers are drawn

PARTS = pytest.mark.filterwarnings("ignore:Memory ran out in evaluation")


class Evaluated(Net):
    def __init__(self):
        super().__init__()
        self.auroc, self.calls, self.outputs = BinaryAUROC(), [], []

    def forward(self, x):
        if len(x) > self.hungry.limit and not torch.is_grad_enabled():
            self.hungry.fail(len(x))
        return self.last(self.norm(self.first(x)))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("before", x.mean(), on_step=True, on_epoch=True)
        predicted = self(x)
        self.calls.append(len(x))
        self.auroc(predicted[:, 0], (y[:, 0] > 0).long())
        loss = (predicted - y).square().mean()
        self.log_dict({"val_loss": loss, "auroc": self.auroc, "random": torch.rand(()) * 0 + x.sum() * 0})
        return {"loss": loss, "predicted": predicted}

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append((outputs["loss"], outputs["predicted"]))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


@PARTS
@pytest.mark.parametrize("what", ["validate", "test"])
def test_evaluation_recovers_with_the_same_figures(what):
    plain, module, memsave = limited(Evaluated, 10**9), limited(Evaluated, 10), MemSave()
    expected = getattr(L.Trainer(**QUIET), what)(plain, data(), verbose=False)
    found = getattr(L.Trainer(**QUIET, callbacks=[memsave]), what)(module, data(), verbose=False)
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert found[0][name] == pytest.approx(value, rel=1e-5, abs=1e-7)
    assert module.calls == [8] * 12
    assert plain.calls == [32] * 3
    assert memsave.report.num_oom_recovered == 2
    for one, other in zip(module.outputs, plain.outputs, strict=True):
        torch.testing.assert_close(one, other)


@PARTS
def test_the_mean_of_a_loss_is_that_of_batches_however_many_parts_they_had():
    class Mean(Evaluated):
        def __init__(self):
            super().__init__()
            self.mean = MeanMetric()

        def validation_step(self, batch, batch_idx):
            self.mean(float((self(batch[0]) - batch[1]).square().mean()))
            self.log("mean", self.mean)
            self.calls.append(len(batch[0]))

        def on_validation_batch_end(self, outputs, batch, batch_idx):
            """Nothing was returned."""

    x, y = torch.randn(26, 16), torch.randn(26, 1)
    batches = DataLoader([(x[:18], y[:18]), (x[18:], y[18:])], batch_size=None)
    plain, ours = limited(Mean, 10**9), limited(Mean, 10)
    expected = L.Trainer(**QUIET).validate(plain, batches, verbose=False)[0]["mean"]
    found = L.Trainer(**QUIET, callbacks=[MemSave()]).validate(ours, batches, verbose=False)[0]["mean"]
    assert ours.calls == [9, 9, 8]
    assert found == pytest.approx(expected, rel=1e-6)


@PARTS
def test_prediction_recovers():
    plain, module, memsave = limited(Evaluated, 10**9), limited(Evaluated, 5), MemSave()
    expected = L.Trainer(**QUIET).predict(plain, data())
    found = L.Trainer(**QUIET, callbacks=[memsave]).predict(module, data())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert memsave.report.num_oom_recovered == 3


@PARTS
def test_validation_within_a_fit_recovers_and_leaves_accumulated_gradients_alone():
    class Both(Evaluated):
        def training_step(self, batch, batch_idx):
            return (self.last(self.norm(self.first(batch[0]))) - batch[1]).square().mean()

    def run(limit, callbacks):
        module = limited(Both, limit)
        torch.manual_seed(1)
        trainer = L.Trainer(**QUIET, max_epochs=1, callbacks=callbacks, accumulate_grad_batches=2, val_check_interval=1)
        trainer.fit(module, data(), data())
        return module

    memsave = MemSave()
    plain, ours = run(10**9, []), run(10, [memsave])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
    assert memsave.report.num_oom_recovered == 2
    assert memsave.report.microbatch_size is None  # training was never cut


@PARTS
def test_evaluation_that_cannot_be_cut_says_so():
    module = limited(Evaluated, 0)
    with pytest.raises(
        OutOfMemoryUnrecoverableError, match=r"a batch of validate, which cannot be cut: it has one sample"
    ):
        L.Trainer(**QUIET, callbacks=[MemSave()]).validate(module, data(), verbose=False)
    module.validation_step = lambda batch, batch_idx: (_ for _ in ()).throw(ValueError("mine"))
    with pytest.raises(ValueError, match="mine"):
        L.Trainer(**QUIET, callbacks=[MemSave()]).validate(module, data(), verbose=False)


def test_that_evaluation_is_cut_is_told_once():
    trainer = L.Trainer(**QUIET, callbacks=[MemSave()])
    with pytest.warns(UserWarning, match="run in parts. These results are right: torchmetrics") as told:
        trainer.validate(limited(Evaluated, 10), data(), verbose=False)
    assert len([w for w in told if "in parts" in str(w.message)]) == 1
