import csv
import struct
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader

from lightning_memsave import Applied, MemoryMonitor, MemoryReport, MemSave
from lightning_memsave.reporting.loggers import log_config, log_metrics, log_summary, one_line

CATEGORIES = ("weights", "gradients", "optimizer_state", "activations", "temporary", "data")
ODD_BYTES = 2**24 + 1  # a total that float32 cannot hold

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")


class OddModel(BoringModel):
    def __init__(self):
        super().__init__()
        self.register_buffer("ballast", torch.zeros(ODD_BYTES, dtype=torch.uint8), persistent=False)

    def training_step(self, batch, batch_idx):
        self.log("seen/batch_idx", float(batch_idx))
        return self.step(batch)

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 16), batch_size=4)


class Recorder(Logger):
    name, version = "recorder", 0

    def __init__(self):
        super().__init__()
        self.rows, self.hyperparams = [], []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params, *args, **kwargs):
        self.hyperparams.append(params)


QUIET = {
    "max_epochs": 1,
    "limit_val_batches": 0,
    "accelerator": "cpu",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class WithHyperparameters(OddModel):
    def __init__(self, width=7):
        super().__init__()
        self.save_hyperparameters()


def fit(callbacks, logger, **options):
    trainer = L.Trainer(
        **{
            "max_epochs": 1,
            "limit_val_batches": 0,
            "log_every_n_steps": 1,
            "accelerator": "cpu",
            "callbacks": callbacks,
            "logger": logger,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )
    trainer.fit(WithHyperparameters())
    return trainer


def is_odd(num_bytes):
    return float(torch.tensor(num_bytes, dtype=torch.float32)) != num_bytes


def read_tensorboard(folder):
    """Rows by tag, and texts, of TensorBoard's event files (https://www.tensorflow.org/tutorials/load_data/tfrecord)."""
    from tensorboardX.proto.event_pb2 import Event

    figures, texts = {}, ""
    for path in sorted(folder.rglob("events.*")):
        left = path.read_bytes()
        while left:  # length, its checksum, the event, its checksum
            (size,) = struct.unpack("<Q", left[:8])
            event, left = Event.FromString(left[12 : 12 + size]), left[16 + size :]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    figures.setdefault(value.tag, []).append((event.step, value.simple_value))
                texts += str(value)
    return figures, texts


def test_tensorboard_has_the_report_in_float32(tmp_path):
    memsave = MemSave(microbatch=2)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    fit([memsave], logger)
    logger.finalize("success")
    figures, _ = read_tensorboard(tmp_path)
    report = memsave.report
    for name, size in {"peak": report.peak_bytes, **{f"peak_{k}": v for k, v in report.by_category.items()}}.items():
        rounded = float(torch.tensor(size, dtype=torch.float32))
        assert figures[f"memsave/{name}_bytes"][-1] == (4, rounded)
    assert is_odd(report.peak_bytes)
    assert "recipe" in (tmp_path / "hparams.yaml").read_text()


def test_mlflow_has_the_report_to_the_byte(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    memsave = MemSave(microbatch=2)
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path}")
    fit([memsave], logger)
    run = mlflow.tracking.MlflowClient(f"file:{tmp_path}").get_run(logger.run_id)
    report = memsave.report
    assert run.data.metrics["memsave/peak_bytes"] == report.peak_bytes
    for category, size in report.by_category.items():
        assert run.data.metrics[f"memsave/peak_{category}_bytes"] == size
    assert "memsave/recipe" in run.data.params


def test_csv_has_the_report(tmp_path):
    memsave = MemSave(microbatch=2)
    fit([memsave], CSVLogger(tmp_path, name="", version=""))
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    measured = {int(row["step"]): row for row in rows if row["memsave/peak_weights_bytes"]}
    assert sorted(measured) == [1, 2, 4]  # second and third batch, and the final figures
    assert [int(row["step"]) for row in rows if row["seen/batch_idx"]] == [0, 1, 2, 3]
    report = memsave.report
    assert is_odd(report.peak_bytes)
    assert max(int(row["memsave/peak_bytes"]) for row in measured.values()) == report.peak_bytes
    for row in measured.values():
        assert sum(int(row[f"memsave/peak_{c}_bytes"]) for c in CATEGORIES) == int(row["memsave/peak_bytes"])
    final = measured[4]
    assert {c: int(final[f"memsave/peak_{c}_bytes"]) for c in CATEGORIES} == dict(report.by_category)
    assert int(final["memsave/peak_bytes"]) == report.peak_bytes
    assert int(final["memsave/microbatch_size"]) == 2
    assert float(final["memsave/step_seconds"]) == report.step_seconds
    assert report.by_category["weights"] == ODD_BYTES + (32 * 2 + 2) * 4


def test_csv_keeps_the_configuration(tmp_path):
    fit([MemSave("measure")], CSVLogger(tmp_path, name="", version=""))
    text = (tmp_path / "hparams.yaml").read_text()
    assert "recipe: measure" in text
    assert "every: 200" in text


def test_every_logger_gets_the_same_rows(tmp_path):
    first, second = Recorder(), Recorder()
    memsave = MemSave(optimizer_state=False)
    fit([memsave], [first, CSVLogger(tmp_path), second])
    assert first.rows == second.rows
    assert first.hyperparams == second.hyperparams
    assert {"width": 7, "memsave": {**memsave.recipe.as_dict(), "every": 200}} in first.hyperparams
    (written,) = tmp_path.rglob("metrics.csv")
    with written.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["memsave/peak_bytes"]]
    recorded = [row["memsave/peak_bytes"] for _, row in first.rows if "memsave/peak_bytes" in row]
    assert [float(row["memsave/peak_bytes"]) for row in rows] == recorded
    assert memsave.report.peak_bytes in recorded


def test_two_monitors_write_one_set_of_rows():
    alone, together = Recorder(), Recorder()
    fit([MemoryMonitor()], alone)
    monitors = [MemoryMonitor(), MemoryMonitor()]
    fit(monitors, together)
    assert [step for step, _ in together.rows] == [step for step, _ in alone.rows]
    assert monitors[0].report == monitors[1].report


def test_every_chooses_the_steps():
    recorder = Recorder()
    fit([MemoryMonitor(every=5)], recorder, max_epochs=3)  # 12 steps
    steps = [step for step, row in recorder.rows if "memsave/peak_data_bytes" in row]
    assert steps == [1, 2, 4, 9, 12]  # batches 2, 3, 5 and 10, counted from 1, and the final figures


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=["plain", "accumulating"])
def test_steps_are_lightnings(options):
    recorder = Recorder()
    fit([MemoryMonitor(every=1)], recorder, **options)
    own = [step for step, row in recorder.rows if "seen/batch_idx" in row]
    ours = [step for step, row in recorder.rows if "memsave/peak_data_bytes" in row]
    assert set(ours[:-1]) <= set(own), f"ours {ours}, Lightning's {own}"


@pytest.mark.parametrize("logger", [False, None])
def test_callback_metric_is_the_report_to_the_byte(logger, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    memsave = MemSave().compare_to(MemoryReport(peak_bytes=2**25))
    trainer = fit([memsave], logger if logger is False else CSVLogger(tmp_path))
    value = trainer.callback_metrics["memsave/peak_bytes"]
    assert is_odd(memsave.report.peak_bytes)
    assert value.item() == memsave.report.peak_bytes > ODD_BYTES
    assert trainer.callback_metrics["memsave/factor"].item() == memsave.report.factor


def test_model_checkpoint_can_monitor_the_peak(tmp_path):
    memsave = MemSave()
    checkpoint = ModelCheckpoint(tmp_path, monitor="memsave/peak_bytes", save_top_k=1)
    fit([checkpoint, memsave], False, enable_checkpointing=True, max_epochs=2)
    assert checkpoint.best_model_score.item() == memsave.report.peak_bytes
    assert Path(checkpoint.best_model_path).is_file()


def test_without_logger_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    memsave = MemSave()
    fit([memsave], False)
    assert memsave.report.num_steps_measured == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("num_steps", "num_measured"), [(1, 0), (3, 2)])
def test_fast_dev_run_writes_nothing(tmp_path, monkeypatch, num_steps, num_measured):
    monkeypatch.chdir(tmp_path)
    memsave = MemSave()
    fit([memsave], CSVLogger(tmp_path), fast_dev_run=num_steps)
    assert memsave.report.num_steps_measured == num_measured
    assert (memsave.report.peak_bytes is None) == (num_measured == 0)
    assert list(tmp_path.rglob("*.*")) == []


def fake_trainer(is_global_zero, *loggers):
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_batches_that_stepped=7))
    return SimpleNamespace(
        is_global_zero=is_global_zero,
        loggers=list(loggers),
        fit_loop=loop,
        enable_autolog_hparams=True,
        lightning_module=WithHyperparameters(),
        datamodule=None,
    )


def test_only_the_first_rank_writes_the_configuration():
    recorder = Recorder()
    log_config(fake_trainer(False, recorder), {"recipe": "measure"})
    assert recorder.hyperparams == []
    log_config(fake_trainer(True, recorder), {"recipe": "measure"})
    assert recorder.hyperparams == [{"width": 7, "memsave": {"recipe": "measure"}}]


def test_a_run_without_hyperparameters_writes_none():
    """Plain Lightning writes no `hparams.yaml` and no `hp_metric` then."""
    recorder = Recorder()
    L.Trainer(**QUIET, callbacks=[MemSave()], logger=recorder).fit(OddModel())
    assert recorder.hyperparams == []


def test_the_first_that_tensorboard_hears_has_the_hyperparameters_of_the_run_as_well():
    recorder = Recorder()
    L.Trainer(**QUIET, callbacks=[MemSave(microbatch=2)], logger=recorder).fit(WithHyperparameters())
    assert recorder.hyperparams[0]["width"] == 7
    assert recorder.hyperparams[0]["memsave"]["recipe"] == "lossless, microbatch=2"
    assert recorder.hyperparams[1:] == [{"width": 7}]  # Lightning's


def test_hyperparameters_are_not_logged_where_the_trainer_says_so():
    recorder = Recorder()
    options = {**QUIET, "enable_autolog_hparams": False}
    L.Trainer(**options, callbacks=[MemSave(microbatch=2)], logger=recorder).fit(WithHyperparameters())
    assert recorder.hyperparams == []


def test_a_logger_that_takes_no_other_settings_ends_no_run():
    class Strict(Recorder):
        def log_hyperparams(self, params, *args, **kwargs):
            if self.hyperparams and params != self.hyperparams[0]:
                raise RuntimeError("params do not change")
            super().log_hyperparams(params)

    strict, memsave = Strict(), MemSave(microbatch=2)
    L.Trainer(**QUIET, callbacks=[MemSave("measure")], logger=strict).fit(OddModel())
    L.Trainer(**QUIET, callbacks=[memsave], logger=strict).fit(OddModel())
    assert memsave.report.num_steps_measured


def test_a_logger_cannot_change_what_the_next_one_gets():
    class Greedy(Recorder):
        def log_metrics(self, metrics, step=None):
            metrics.clear()

    recorder = Recorder()
    metrics = {"memsave/peak_bytes": 3}
    log_metrics(fake_trainer(True, Greedy(), recorder), metrics)
    assert recorder.rows == [(7, {"memsave/peak_bytes": 3})]


def test_what_was_not_measured_is_not_logged():
    recorder = Recorder()
    log_summary(fake_trainer(True, recorder), MemoryReport())
    assert recorder.rows == []


def test_one_line_says_what_was_measured():
    report = MemoryReport(
        peak_bytes=3 * 2**30,
        by_category={"weights": 2**30, "activations": 2**31, "gradients": 0},
        baseline_peak_bytes=9 * 2**30,
        num_steps_measured=5,
        applied=(Applied(technique="microbatching", summary="cut", loss_class="changed"),),
    )
    assert one_line(report) == (
        "memsave: peak 3.0 GiB (activations 2.0 GiB, weights 1.0 GiB), 3.00x below the baseline, changed, "
        "5 steps measured"
    )


def test_one_line_without_a_measurement_says_so():
    assert "no step was measured" in one_line(MemoryReport())
