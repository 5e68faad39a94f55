import csv
import io
import json
import logging
import math
import os
import re
import warnings

import lightning as L
import pytest
import torch
import wandb
from rich.console import Console
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave
from lightning_memsave.demo import run as demo
from lightning_memsave.demo.limit import SimulatedLimit
from lightning_memsave.demo.model import ImageClassifier, WideResNet
from lightning_memsave.demo.run import LIMITS, RUNS, DemoConfig, run_demo
from tests.reporting.html_page import Page
from tests.reporting.wandb_file import read_wandb, wandb_paths

CATEGORIES = ("weights", "gradients", "optimizer_state", "activations", "temporary", "data")
SMALL_RUNS = {
    "measure (baseline)": {"recipe": "measure"},
    "the same again": {"recipe": "measure"},
    "microbatch 2": {"microbatch": 2},
    "microbatch 2 + blocks + 8-bit": {"microbatch": 2, "checkpointing": "blocks", "optimizer_state": "8bit"},
}

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")


def small_data(seed, num_train=34, num_test=10):
    generator = torch.Generator().manual_seed(seed)

    def part(num_samples):
        images = torch.randn(num_samples, 3, 16, 16, generator=generator)
        return TensorDataset(images, torch.randint(0, 10, (num_samples,), generator=generator))

    return part(num_train), part(num_test)


def make_small(monkeypatch, runs=SMALL_RUNS, load=small_data):
    monkeypatch.setattr(demo, "RUNS", runs)
    monkeypatch.setattr(demo, "load_digits_32", load)
    monkeypatch.setattr(demo, "WideResNet", lambda: WideResNet(depth=10, width=1))


def run(config, width=80):
    console = Console(file=io.StringIO(), width=width)
    return run_demo(config, console), console.file.getvalue()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    environment, threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkeypatch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
        make_small(monkeypatch)
        results, text = run(DemoConfig(out=out, epochs=1, batch_size=8))
        wandb.teardown()
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    return results, text, out


def test_every_run_has_a_result(outcome):
    results, _, _ = outcome
    assert [result.name for result in results] == list(SMALL_RUNS)
    for result in results:
        assert result.report.peak_bytes == sum(result.report.by_category.values()) > 0
        assert result.report.num_steps_measured == 2
        assert 0 <= result.test_accuracy <= 1


def test_later_runs_take_less_than_the_first(outcome):
    first, same, cut, all_of_it = (result.report for result in outcome[0])
    assert first.factor == same.factor == 1
    assert cut.factor == first.peak_bytes / cut.peak_bytes > 1
    assert all_of_it.factor == first.peak_bytes / all_of_it.peak_bytes > cut.factor
    assert (first.loss_class, cut.loss_class) == ("exact", "changed")  # BatchNorm sees smaller batches


def test_runs_start_from_the_same_weights_and_see_the_same_batches(outcome):
    _, _, out = outcome
    losses = {}
    for path in wandb_paths(out):
        file = read_wandb(path)
        losses[file.name] = [row["train/loss"] for row in file.history if "train/loss" in row]
    assert losses["measure (baseline)"] == losses["the same again"]
    assert len(losses["the same again"]) == 34 // 8
    assert len(set(losses["the same again"])) > 1


def test_table_is_printed_with_every_run_and_figure(outcome):
    results, text, out = outcome
    words = set(re.split(r"[\s┃│]+", text))
    for name in SMALL_RUNS:
        assert set(name.split()) <= words
    for result in results:
        assert f"{result.report.peak_bytes / 2**20:.1f}" in words
        assert str(result.report.peak_bytes) in words
        assert f"{result.test_accuracy:.4g}" in words
    assert f"{results[-1].report.factor:.2f}x" in words
    assert "WideResNet-28-2, digits, batch 8, seed 0" in text
    for path in (out / "table.csv", out / "memory.png", out / "index.html", out / "workspace.json", out / "wandb"):
        assert path.exists()
        assert str(path) in text
    table = [line for line in text.splitlines() if line[:1] in "┏┃┡│├└"]
    assert table
    assert max(map(len, table)) <= 80


def test_csv_is_the_reports(outcome):
    results, _, out = outcome
    with (out / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == list(SMALL_RUNS)
    for row, result in zip(rows, results, strict=True):
        report = result.report
        assert int(row["peak_bytes"]) == report.peak_bytes
        assert {c: int(row[f"{c}_bytes"]) for c in CATEGORIES} == dict(report.by_category)
        assert row["factor"] == ("" if report.factor is None else repr(report.factor))
        assert float(row["test_accuracy_fraction"]) == result.test_accuracy
        assert row["loss_class"] == report.loss_class
        assert json.loads(row["applied"]) == [applied.summary for applied in report.applied]
    assert float(rows[0]["step_seconds"]) > 0
    assert json.loads(rows[0]["applied"]) == []
    assert len(json.loads(rows[-1]["applied"])) >= 3


def test_page_has_the_same_figures(outcome):
    results, _, out = outcome
    page = Page((out / "index.html").read_text("utf-8"))
    assert page.column("peak bytes") == [str(result.report.peak_bytes) for result in results]
    assert page.column("test/accuracy") == [str(result.test_accuracy) for result in results]
    assert set(page.figures) == {"tradeoff", "breakdown", "timeline"}
    lines = [trace["y"] for trace in page.figures["timeline"]["data"]]
    assert [max(line) * 2**20 for line in lines] == [result.report.peak_bytes for result in results]


def test_workspace_is_the_projects(outcome):
    specification = json.loads((outcome[2] / "workspace.json").read_text())
    assert (specification["entity"], specification["project"]) == ("ENTITY", "memsave-demo")
    assert "summary:test/accuracy" in json.dumps(specification)


def test_equal_weights_and_the_scatter_of_accuracy_are_told(outcome):
    results, text, _ = outcome
    told = " ".join(text.split())
    first, same, cut, _ = (result.weights_hash for result in results)
    assert first == same != cut
    assert f"the same again: the trained weights are those of measure (baseline), bit for bit ({first})." in told
    assert told.count("bit for bit") == 1
    accuracy = results[0].test_accuracy
    chance = 2 * math.sqrt(2 * accuracy * (1 - accuracy) / 10)
    assert f"One seed, 10 images: accuracies that differ by less than {chance:.1%}" in told


def test_the_end_is_the_box_of_the_last_run_and_what_to_type_next(outcome):
    results, text, _ = outcome
    *_, box, after = re.split(r"╭─ lightning-memsave|╰─", text)
    assert f"{results[-1].report.factor:.2f}x less (baseline measured)" in " ".join(box.split())
    assert 'MemSave("exact")' in after


def test_a_run_with_less_memory_than_it_needs_ends_with_the_same_weights(tmp_path, monkeypatch):
    make_small(monkeypatch, {"plain": {"recipe": "measure"}, "limited": {"recipe": "lossless"}})
    monkeypatch.setattr(demo, "LIMITS", {"limited": 0.85})
    (plain, limited), text = run(DemoConfig(out=tmp_path, epochs=1, batch_size=8, wandb=False))
    assert limited.report.num_oom_recovered > 0
    assert limited.report.peak_bytes <= 0.9 * plain.report.peak_bytes  # what is too much is counted as well
    assert limited.report.loss_class == "exact"
    assert limited.weights_hash == plain.weights_hash
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert re.search(r"limited: memory ran out \d+ times?; each time the step was run again\.", text)


def test_a_limit_that_nothing_can_meet_ends_the_run_and_counts_no_more():
    module, limit = ImageClassifier(WideResNet(depth=10, width=1)), SimulatedLimit(1000)
    trainer = L.Trainer(
        max_steps=1,
        accelerator="cpu",
        callbacks=[limit, MemSave("measure"), limit.after],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(torch.OutOfMemoryError, match=r"Simulated: out of memory, .* of 1000 B are needed"):
        trainer.fit(module, DataLoader(small_data(0)[0], batch_size=4))
    assert limit._ledger is None
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert torch.zeros(1000).nbytes > 1000, "nothing is raised any more"


def test_picture_is_written(outcome):
    assert (outcome[2] / "memory.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_wandb_has_one_run_per_line(outcome):
    results, _, out = outcome
    files = {file.name: file for file in map(read_wandb, wandb_paths(out))}
    assert set(files) == set(SMALL_RUNS)
    for result in results:
        file = files[result.name]
        assert file.finished
        assert file.summary["memsave/peak_bytes"] == result.report.peak_bytes
        assert file.summary["memsave/loss_class"] == result.report.loss_class
        assert file.summary.get("memsave/factor") == result.report.factor
        assert file.summary["test/accuracy"] == pytest.approx(result.test_accuracy, abs=1e-7)
    assert files["microbatch 2"].config["memsave"]["microbatching"]["size"] == 2


def test_without_wandb_there_is_no_wandb(tmp_path, monkeypatch):
    make_small(monkeypatch, {"only": {"recipe": "measure"}})
    (result,), text = run(DemoConfig(out=tmp_path, epochs=1, batch_size=8, wandb=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.html", "memory.png", "table.csv"]
    assert "W&B" not in text
    assert result.report.factor == 1


def test_seed_decides(tmp_path, monkeypatch):
    seeds = []

    def load(seed):
        seeds.append(seed)
        return small_data(seed)

    make_small(monkeypatch, {"only": {"recipe": "measure"}}, load)
    run(DemoConfig(out=tmp_path, epochs=1, batch_size=8, wandb=False, seed=5))
    assert seeds == [5]


def test_path_with_brackets_is_printed_whole(tmp_path, monkeypatch):
    make_small(monkeypatch, {"[b]": {"recipe": "measure"}})
    out = tmp_path / "a[b]c"
    _, text = run(DemoConfig(out=out, epochs=1, batch_size=8, wandb=False))
    assert str(out / "table.csv") in text
    assert str(out / "memory.png") in text
    assert any(line.lstrip().startswith("[b] ") for line in text.splitlines()), "the bar of the run"


def test_batch_larger_than_the_data_is_refused(tmp_path, monkeypatch):
    make_small(monkeypatch)
    with pytest.raises(ValueError, match=r"`batch_size` .* 34 .* got 35"):
        run(DemoConfig(out=tmp_path, epochs=1, batch_size=35, wandb=False))
    assert list(tmp_path.iterdir()) == []


def test_one_step_is_too_few_to_measure_but_does_not_crash(tmp_path, monkeypatch):
    make_small(monkeypatch)
    results, text = run(DemoConfig(out=tmp_path, epochs=1, batch_size=34, wandb=False))
    assert [result.report.peak_bytes for result in results] == [None] * len(SMALL_RUNS)
    assert "n/a" in text
    with (tmp_path / "table.csv").open(newline="") as file:
        assert [row["peak_bytes"] for row in csv.DictReader(file)] == [""] * len(SMALL_RUNS)


def test_logging_levels_are_put_back_even_after_an_error(tmp_path, monkeypatch):
    make_small(monkeypatch, {"wrong": {"recipe": "no such recipe"}})
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero")]
    for logger, level in zip(loggers, (31, 32), strict=True):
        monkeypatch.setattr(logger, "level", level)
    with pytest.raises(ValueError, match="no such recipe"):
        run(DemoConfig(out=tmp_path, epochs=1, batch_size=8, wandb=False))
    assert [logger.level for logger in loggers] == [31, 32]


@pytest.mark.parametrize("name", ["epochs", "batch_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_numbers_below_one_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"`{name}` must be at least 1, got {value}"):
        DemoConfig(**{name: value})


def test_first_run_is_the_baseline():
    assert next(iter(RUNS.values())) == {"recipe": "measure"}
    assert LIMITS.keys() <= RUNS.keys()
