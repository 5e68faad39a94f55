"""Runs from disk. The contract: a figure is the same, to the byte, wherever it was logged and wherever it is shown."""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
import wandb
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_memsave import Applied, MemoryReport, MemSave, wandb_logger
from lightning_memsave.core.report import CATEGORIES, Timeline
from lightning_memsave.planner.recipes import resolve
from lightning_memsave.prediction import after_fit
from lightning_memsave.reporting.comparison import compare
from lightning_memsave.reporting.console import print_comparison
from lightning_memsave.reporting.page import write_page
from lightning_memsave.reporting.runs import Run, read_runs, run_of
from lightning_memsave.reporting.wandb_run import record_config
from tests.reporting.html_page import Page
from tests.reporting.test_wandb_run import log_of, wandb_session
from tests.reporting.wandb_file import payloads, wandb_paths

ODD_BYTES = 2**24 + 1  # a total that float32 cannot hold

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")


class OddModel(BoringModel):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"lr": 0.1, "betas": (0.9, 0.99), "odd": object()})
        self.register_buffer("ballast", torch.zeros(ODD_BYTES, dtype=torch.uint8), persistent=False)

    def training_step(self, batch, batch_idx):
        self.log("train/loss", float(batch_idx))
        return self.step(batch)

    def test_step(self, batch, batch_idx):
        self.log("test/accuracy", torch.tensor(1 / 3, dtype=torch.float64))

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 16), batch_size=4)


def trainer_with(memsave, logger):
    return L.Trainer(
        max_epochs=1,
        limit_val_batches=0,
        log_every_n_steps=1,
        accelerator="cpu",
        callbacks=[memsave],
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """One training, logged to CSV and W&B and written as JSON."""
    folder = tmp_path_factory.mktemp("logged")
    memsave = MemSave(microbatch=2).compare_to(MemoryReport(peak_bytes=3 * 2**25 + 7))
    with wandb_session(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loggers = [
            CSVLogger(folder, "csv", "one"),
            wandb_logger("p", save_dir=str(folder), offline=True, name="online"),
        ]
        trainer = trainer_with(memsave, loggers)
        trainer.fit(OddModel())
        scores = trainer.test(OddModel(), verbose=False)
        wandb.finish()
        wandb.teardown()
    run = run_of("saved", memsave.report, scores[0], {"memsave": memsave.recipe.as_dict()})
    (folder / "saved.json").write_text(run.to_json())
    return folder, memsave.report, scores[0]["test/accuracy"]


def all_of(logged):
    folder, _, _ = logged
    return read_runs([folder / "csv", folder / "wandb", folder / "saved.json"])


def test_every_logger_has_the_same_figures(logged):
    _, report, accuracy = logged
    assert float(torch.tensor(report.peak_bytes, dtype=torch.float32)) != report.peak_bytes  # else it proves nothing
    runs = all_of(logged)
    assert [run.name for run in runs] == ["csv/one", "online", "saved"]
    for run in runs:
        assert run.report.metrics() == report.metrics()
        assert run.report.baseline_peak_bytes == 3 * 2**25 + 7
        assert run.report.num_steps_measured == report.num_steps_measured == 2
        assert run.metrics["test/accuracy"] == accuracy
        assert run.config["memsave"]["microbatching"]["size"] == 2
    for run in runs[:2]:
        assert [step for step, _ in run.peaks] == [1, 2]
        assert max(peak for _, peak in run.peaks) == report.peak_bytes
        assert run.metrics["train/loss"] == 3.0
        assert run.config["lr"] == 0.1
    assert runs[0].report.timeline is None, "a CSV file has no place for it"
    assert runs[1].report.timeline == runs[2].report.timeline == report.timeline
    assert max(report.timeline.total_bytes) == report.peak_bytes
    assert [run.loss_class for run in runs] == [None, "exact", "exact"]
    assert runs[1].applied == runs[2].applied
    assert len(runs[1].applied) == 2


def test_table_page_csv_and_wandb_show_the_same_numbers(logged, tmp_path):
    folder, report, _ = logged
    comparison = compare(all_of(logged), "test/accuracy")
    console = Console(file=io.StringIO(), width=200)
    print_comparison(comparison, console)
    (line,) = [line for line in console.file.getvalue().splitlines() if "peak bytes" in line]
    assert [int(text) for text in re.findall(r"\d+", line)] == [report.peak_bytes] * 3
    page = Page(write_page(comparison, tmp_path / "page.html", "t").read_text("utf-8"))
    shown = page.column("peak"), page.column("peak bytes")
    assert shown == ([str(report.peak_bytes)] * 3,) * 2
    assert page.texts("peak bytes") == [str(report.peak_bytes)] * 3
    for category in CATEGORIES:
        assert page.column(category.replace("_", " ")) == [str(report.by_category[category])] * 3
    bars = {trace["name"]: trace for trace in page.figures["breakdown"]["data"] if trace["type"] == "bar"}
    for category in CATEGORIES:
        assert [x * 2**20 for x in bars[category.replace("_", " ")]["x"]] == [report.by_category[category]] * 3
    with (folder / "csv" / "one" / "metrics.csv").open(newline="") as file:
        assert str(report.peak_bytes) in {row["memsave/peak_bytes"] for row in csv.DictReader(file)}
    (path,) = wandb_paths(folder)
    assert f'"{report.peak_bytes}"'.encode()[1:-1] in b"".join(payloads(path.read_bytes()))


def test_a_killed_run_keeps_its_last_figures(logged, tmp_path):
    """The file ends in the middle of a record, before the final figures."""
    folder, report, _ = logged
    content = wandb_paths(folder)[0].read_bytes()
    cut = content.rindex(b"memsave/num_steps_measured")  # of the last row
    (tmp_path / "run-x.wandb").write_bytes(content[:cut])
    (run,) = read_runs([tmp_path])
    assert run.report.peak_bytes == report.peak_bytes
    assert run.report.by_category == dict(report.by_category)
    assert run.report.num_steps_measured == 2
    assert run.loss_class == "exact"  # of the summary after the last measured step


def test_a_baseline_that_is_known_at_the_end_only_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(after_fit, "LEAST_SECONDS", 60.0)
    memsave = MemSave(microbatch=2)
    trainer_with(memsave, CSVLogger(tmp_path, "csv", "one")).fit(OddModel())
    assert memsave.report.factor is not None, "it is predicted after the fit"
    (run,) = read_runs([tmp_path])
    assert run.report.factor == memsave.report.factor
    assert run.report.baseline_peak_bytes == memsave.report.baseline_peak_bytes


@pytest.mark.parametrize(
    ("memsave", "columns", "name"),
    [
        (None, "loss", "plain"),
        ({"recipe": "measure", "every": 200}, "loss", "plain"),
        ({"recipe": None, "every": 200}, "loss", "plain"),
        ({"recipe": "extreme", "sparsity": {"sparsity": 0.9}}, "loss", "extreme"),
        ({"recipe": "lossless", "microbatching": {"size": "auto"}}, "loss", "lossless"),
        ({"recipe": "lossless, microbatch=10", "microbatching": {"size": 10}}, "loss", "microbatch=10"),
        (None, "memsave/microbatch_size", "lightning_logs/version_3"),
    ],
)
def test_a_run_without_a_name_is_called_by_its_settings(tmp_path, memsave, columns, name):
    paths = [
        tmp_path / "lightning_logs" / "version_3",
        tmp_path / "mine" / "version_3",
        tmp_path / "lightning_logs/one",
    ]
    for path in paths:
        path.mkdir(parents=True)
        (path / "metrics.csv").write_text(f"step,{columns}\n0,5\n")
        (path / "hparams.yaml").write_text(json.dumps({} if memsave is None else {"memsave": memsave}))
    assert [run.name for run in read_runs(paths)] == [name, "mine/version_3", "lightning_logs/one"]


def test_wandb_runs_without_a_name_are_called_by_their_settings(tmp_path):
    with wandb_session():
        for options in ({}, {"name": "given"}):
            run = wandb_logger("p", save_dir=str(tmp_path), offline=True, quiet=True, **options).experiment
            record_config(run, resolve("lossless", {"microbatch": 2, "checkpointing": "blocks"}).as_dict())
            wandb.finish()
    assert {run.name for run in read_runs([tmp_path])} == {"microbatch=2, checkpointing=blocks", "given"}


def test_the_caller_can_name_a_run(tmp_path):
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    (folder / "metrics.csv").write_text("step,loss\n0,0.5\n")
    names = [run.name for run in read_runs([Path(f"slow one={folder}"), folder, Path(f"slow one={folder}")])]
    assert names == ["slow one", f"{tmp_path.name}/lr=0.1", "slow one (2)"]
    with pytest.raises(ValueError, match="must be a file or folder with a run"):
        read_runs([Path(f"={folder}")])


def test_report_survives_json():
    report = MemoryReport(
        peak_bytes=2**53 + 1,
        by_category=dict.fromkeys(CATEGORIES, 7),
        baseline_peak_bytes=2**60,
        baseline_source="measured",
        applied=(Applied(technique="a", summary="b", loss_class="changed", reasons=("c", "d")),),
        timeline=Timeline(events=(0, 1), by_category={"weights": (1, 2)}),
    )
    run = Run(name="<é>", report=report, metrics={"a": 0.1}, config={"x": [1]}, peaks=((1, 2),), loss_class="changed")
    again = Run.from_json(run.to_json())
    assert again.report.loss_class_reasons == ("c", "d")
    assert again == run


def test_folders_of_runs_are_read_in_order_and_equal_names_are_numbered(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,loss\n0,0.5\n")
    document = Run(name=f"{tmp_path.name}/a", report=MemoryReport()).to_json()
    (tmp_path / "x.json").write_text(document)
    runs = read_runs([tmp_path, tmp_path / "x.json", tmp_path / "a" / "metrics.csv"])
    first = f"{tmp_path.name}/a"
    names = [first, f"{tmp_path.name}/b", *(f"{first} ({number})" for number in (2, 3, 4))]
    assert [run.name for run in runs] == names
    assert runs[0].report.peak_bytes is None
    assert runs[0].metrics == {"loss": 0.5}


def test_of_a_folder_the_runs_that_can_be_read_are(tmp_path):
    for name, content in (("good", "step,loss\n0,0.5\n"), ("bad", "name\nx\n"), ("empty", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text(content)
    (tmp_path / "folder.json").mkdir()
    with pytest.warns(UserWarning, match="Left out: `run` must be complete and readable.*(bad|empty)") as caught:
        (run,) = read_runs([tmp_path])
    assert run.metrics == {"loss": 0.5}
    assert len(caught) == 2
    with pytest.raises(ValueError, match="must be complete and readable"):
        read_runs([tmp_path / "bad"])


def test_json_of_others_is_left_alone(tmp_path):
    (tmp_path / "package.json").write_text("{}")
    (tmp_path / "ours.json").write_text(Run(name="ours", report=MemoryReport()).to_json())
    assert [run.name for run in read_runs([tmp_path])] == ["ours"]


def history(steps):
    """A log of W&B's with one row for each step."""
    records = [entry(run={"run_id": "abc", "display_name": "resumed"})]
    for step in steps:
        records.append(entry(history={"trainer/global_step": step, "loss": 1 / (1 + step), **measured_row(step)}))
    return log_of(*((1, record) for record in records))


def measured_row(step):
    split = {f"memsave/peak_{category}_bytes": step for category in CATEGORIES}
    return {"memsave/peak_bytes": step * len(CATEGORIES), **split}


def entry(run=None, history=None):
    from wandb.proto.wandb_internal_pb2 import Record

    record = Record()
    for name, value in (run or {}).items():
        setattr(record.run, name, value)
    for name, value in (history or {}).items():
        item = record.history.item.add()
        item.key, item.value_json = name, json.dumps(value)
    return record.SerializeToString()


def test_what_wandb_has_resumed_is_one_run(tmp_path):
    folders = [tmp_path / f"{day}_000000-abc" for day in ("run-20261101", "offline-run-20261102", "run-20261103")]
    for folder, steps in zip(folders, ((1, 2), (3,), (4,)), strict=True):
        folder.mkdir()
        (folder / "run-abc.wandb").write_bytes(history(steps))
    (run,) = read_runs([tmp_path])
    assert run.name == "resumed"
    assert run.peaks == tuple((step, step * len(CATEGORIES)) for step in (1, 2, 3, 4))
    assert run.metrics == {"loss": 0.2}
    (folders[1] / "run-abc.wandb").write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="Left out of a run that was resumed.*20261102"):
        (run,) = read_runs([tmp_path])
    assert [step for step, _ in run.peaks] == [1, 2, 4]


def test_runs_of_one_id_in_other_folders_are_other_runs(tmp_path):
    for name in ("a", "b"):
        folder = tmp_path / name / "wandb" / "run-20261101_000000-abc"
        folder.mkdir(parents=True)
        (folder / "run-abc.wandb").write_bytes(history((1, 2)))
    assert [len(run.peaks) for run in read_runs([tmp_path])] == [2, 2]


def test_a_loggers_prefix_is_no_part_of_the_names(tmp_path):
    memsave, logger = MemSave(), CSVLogger(tmp_path, "csv", "one", prefix="big-run")
    trainer_with(memsave, logger).fit(OddModel())
    (run,) = read_runs([tmp_path])
    assert run.report.metrics() == memsave.report.metrics()
    assert run.metrics["train/loss"] == 3.0


def test_what_is_no_quality_is_left_out(tmp_path):
    header = "epoch,step,lr-SGD,loss,memsave/factor,words,nothing"
    (tmp_path / "metrics.csv").write_text(f"{header}\n0,0,0.1,0.5,2.0,abc,nan\n1,5,0.2,0.25,,,\n")
    (run,) = read_runs([tmp_path])
    assert run.metrics == {"loss": 0.25}


def test_numbers_that_are_not_settings_of_yaml_are_text(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss\n0,0.5\n")
    yaml = (
        "betas: !!python/tuple [0.9, 0.99]\nmodel: !!python/object:os.system {a: 1}\nname: !!python/name:os.system ''\n"
    )
    (tmp_path / "hparams.yaml").write_text(yaml)
    (run,) = read_runs([tmp_path])
    assert run.config == {"betas": [0.9, 0.99], "model": {"a": 1}, "name": ""}


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.wandb", b"", "no header"),
        ("a.wandb", b"something else", "no header"),
        ("a.wandb", log_of((1, b"abc"))[:-1] + b"x", "damaged"),
        ("a.csv", b"", "no column `step`"),
        ("a.csv", b"name,size\nx,1\n", "no column `step`"),
        ("a.csv", b"step,loss\n0,\xff\n", "decode"),
        ("a.json", b"", "lightning-memsave run 1"),
        ("a.json", b"[1]", "lightning-memsave run 1"),
        ("a.json", b'{"format": "other"}', "lightning-memsave run 1"),
        ("a.json", b'{"format": "lightning-memsave run 1", "report": {"x": 1}}', "no fields but"),
        ("a.txt", b"x", "must be a `.wandb`, `.csv` or `.json` file"),
    ],
)
def test_what_is_not_a_run_is_refused_by_name(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        read_runs([tmp_path / name])
    assert "`run` must" in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("path", ["empty", "missing"])
def test_a_folder_without_runs_is_refused(tmp_path, path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match=r"`run` must be a file or folder with a run, got '.*'\. Name a W&B run folder"
    ):
        read_runs([tmp_path / path])
