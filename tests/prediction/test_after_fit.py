from __future__ import annotations

import csv
import logging
import math

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning_utilities.core import rank_zero
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave
from lightning_memsave.prediction import after_fit
from lightning_memsave.prediction.after_fit import Sample, seconds_allowed
from lightning_memsave.prediction.predictor import Predictor
from lightning_memsave.torch_internals.fake_tensors import is_fake


def _layers():
    return nn.Linear(64, 64), nn.Tanh()


class Stack(L.LightningModule):
    def __init__(self, num_blocks=6) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(*_layers(), *_layers()) for _ in range(num_blocks)))

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(after_fit, "LEAST_SECONDS", 60.0)


def fit(memsave, module=None, **options):
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"max_epochs": 1, "accelerator": "cpu", "logger": False, **quiet, **options}
    trainer = L.Trainer(callbacks=[memsave], **settings)
    trainer.fit(module or Stack(), DataLoader(torch.ones(1024, 64), batch_size=256))
    return memsave


def test_the_predicted_baseline_has_the_bytes_of_a_measured_one(patient):
    plain = fit(MemSave("measure")).report
    report = fit(MemSave(microbatch=8, checkpointing="blocks", optimizer_state="8bit")).report
    assert report.baseline_source == "predicted"
    assert report.baseline_peak_bytes == plain.peak_bytes
    assert dict(report.baseline_by_category) == dict(plain.by_category)


def test_a_measured_baseline_is_not_predicted_again(patient):
    plain = fit(MemSave("measure")).report
    report = fit(MemSave(microbatch=8).compare_to(plain)).report
    assert (report.baseline_source, report.baseline_peak_bytes) == ("measured", plain.peak_bytes)
    assert report.step_ratio == report.step_seconds / plain.step_seconds


def test_the_next_setting_takes_what_is_predicted_for_it(patient):
    report = fit(MemSave(optimizer_state=False, precision=False)).report
    assert report.next_setting == 'checkpointing="blocks"'
    assert fit(MemSave(checkpointing="blocks")).report.peak_bytes == report.next_peak_bytes < 0.9 * report.peak_bytes


def test_no_setting_is_advised_that_was_switched_off(patient):
    switched_off = {"checkpointing": False, "activations": False, "optimizer_state": False, "precision": False}
    assert fit(MemSave(**switched_off, microbatch=False)).report.next_setting is None


class Recurrent(Stack):
    def __init__(self, dropout=0.0) -> None:
        super().__init__(0)
        self.lstm, self.dropout = nn.LSTM(64, 64, batch_first=True), nn.Dropout(dropout)

    def training_step(self, batch, batch_idx):
        out, _ = self.lstm(batch.view(-1, 1, 64).expand(-1, 16, -1))
        return self.dropout(out).square().mean()


def test_microbatches_are_advised_where_they_are_exact_and_nothing_else_is(patient):
    report = fit(MemSave(), Recurrent()).report
    assert (report.next_setting, report.loss_class) == (
        "microbatch=64, if the loss is a mean over samples",
        "exact",
    )
    assert (
        fit(MemSave(microbatch=64), Recurrent()).report.peak_bytes == report.next_peak_bytes < 0.5 * report.peak_bytes
    )
    for memsave, dropout in ((MemSave(), 0.5), (MemSave(microbatch=False), 0.0), (MemSave(microbatch=128), 0.0)):
        assert "microbatch" not in (fit(memsave, Recurrent(dropout)).report.next_setting or "")


def test_a_run_that_changes_nothing_is_its_own_baseline():
    report = fit(MemSave("measure")).report
    assert (report.factor, report.baseline_source) == (1.0, "measured")


def test_a_step_that_reads_values_has_no_baseline_and_is_not_run_again(patient):
    class Reads(Stack):
        num_real_steps = 0

        def training_step(self, batch, batch_idx):
            type(self).num_real_steps += not is_fake(batch)
            loss = super().training_step(batch, batch_idx)
            return loss * 2 if loss.item() > 0.5 else loss

    memsave = fit(MemSave(microbatch=False), Reads())
    assert memsave.report.factor is None
    assert "without values" in memsave._outlook.why_not
    assert Reads.num_real_steps == 4


def test_the_model_and_the_random_numbers_are_left_as_they_are(patient):
    class Drops(Stack):
        def training_step(self, batch, batch_idx):
            return super().training_step(nn.functional.dropout(batch), batch_idx)

    ends = []
    for summary in (True, False):
        torch.manual_seed(3)
        module = Drops()
        memsave = fit(MemSave(microbatch=False, summary=summary), module)
        assert (memsave._outlook.baseline is not None) == summary
        ends.append(([p.clone() for p in module.parameters()], torch.get_rng_state()))
    assert all(map(torch.equal, ends[0][0], ends[1][0]))
    assert torch.equal(ends[0][1], ends[1][1])


def test_the_baseline_is_of_the_measured_batch_with_the_highest_peak(patient):
    def run(memsave):
        options = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        batches = DataLoader([torch.ones(n, 64) for n in (64, 512, 128)], batch_size=None)
        trainer = L.Trainer(callbacks=[memsave], max_epochs=1, accelerator="cpu", logger=False, **options)
        trainer.fit(Stack(), batches)
        return memsave.report

    assert run(MemSave(checkpointing="blocks")).baseline_peak_bytes == run(MemSave("measure")).peak_bytes


def test_advice_of_a_worse_loss_class_says_so_and_comes_last(patient):
    taken = {"checkpointing": "blocks", "activations": False, "precision": False, "microbatch": False}
    report = fit(MemSave(**taken)).report
    assert report.next_setting == 'optimizer_state="8bit", which changes the result'


def test_what_a_step_prints_is_printed_once_per_step(patient, capsys):
    class Prints(Stack):
        def training_step(self, batch, batch_idx):
            print("a step")
            return super().training_step(batch, batch_idx)

    fit(MemSave(microbatch=False), Prints())
    assert capsys.readouterr().out.count("a step") == 4


def test_a_prediction_that_takes_too_long_is_given_up():
    with pytest.raises(TimeoutError, match="longer than it may"):
        Predictor(Stack(), torch.ones(4, 64), deadline=0.0)(())
    assert Predictor(Stack(), torch.ones(4, 64), deadline=math.inf)(()).peak_bytes > 0


def test_a_long_fit_allows_a_share_of_its_time(patient):
    assert seconds_allowed(10) == 60
    assert seconds_allowed(10_000) == 500


def test_a_sample_is_the_first_one_in_memory_of_its_own():
    batch = {"x": torch.arange(12.0).reshape(4, 3), "y": torch.arange(4)}
    sample = Sample.of(batch)
    assert sample.num_samples == 4
    assert torch.equal(sample.batch["x"], torch.tensor([[0.0, 1.0, 2.0]]))
    assert sample.batch["x"].untyped_storage().nbytes() == 12
    assert Sample.of({"x": torch.ones(())}) is None


@pytest.fixture
def info(monkeypatch):
    monkeypatch.setattr(rank_zero, "log", logging.getLogger("told"))
    rank_zero.log.setLevel(logging.INFO)


def test_the_box_shows_the_report_and_can_be_switched_off(patient, info, capsys):
    memsave = fit(MemSave(microbatch=8))
    shown = capsys.readouterr().out
    assert shown.startswith("╭─ lightning-memsave")
    for line in str(memsave.report).splitlines():
        assert line[:40] in shown  # longer ones are wrapped
    fit(MemSave(microbatch=8, summary=False))
    assert "lightning-memsave" not in capsys.readouterr().out


def test_the_box_is_silent_where_the_log_of_lightning_is(patient, info, capsys):
    rank_zero.log.setLevel(logging.ERROR)
    fit(MemSave(microbatch=8))
    assert capsys.readouterr().out == ""


def test_loggers_get_the_factor_to_the_predicted_baseline(patient, tmp_path):
    memsave = fit(MemSave(microbatch=8), logger=CSVLogger(tmp_path, name="", version=""))
    rows = csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines())
    (row,) = (row for row in rows if row["memsave/factor"])
    assert float(row["memsave/factor"]) == memsave.report.factor > 1


def test_a_module_of_lightnings_own_is_summed_up(patient):
    memsave = MemSave(microbatch=2)
    data = DataLoader(torch.randn(16, 32), batch_size=4)
    options = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    L.Trainer(callbacks=[memsave], max_epochs=1, accelerator="cpu", logger=False, **options).fit(BoringModel(), data)
    assert memsave.report.baseline_source == "predicted"
