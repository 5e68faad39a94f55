"""The same figures arrive at a server when a run is online, and when it is synced afterwards."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import wandb
from lightning_utilities.core import rank_zero

from lightning_memsave import MemoryReport, MemSave, wandb_logger
from lightning_memsave.core.report import CATEGORIES
from tests.reporting.test_wandb_run import OddModel, fit, wandb_session
from tests.reporting.wandb_file import wandb_paths
from tests.reporting.wandb_server import serving

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")


def train(folder, offline):
    memsave = MemSave(microbatch=2).compare_to(MemoryReport(peak_bytes=2**25))
    fit(OddModel(), memsave, wandb_logger("p", save_dir=str(folder), offline=offline, name="a run"))
    wandb.finish()
    wandb.teardown()
    return memsave.report


def check(server, report):
    assert server.complete
    assert server.unknown == []
    rows = [row for row in server.history if "memsave/peak_weights_bytes" in row]
    assert [row["trainer/global_step"] for row in rows] == [1, 2, 4]  # the measured steps, and the final figures
    assert max(row["memsave/peak_bytes"] for row in rows) == report.peak_bytes
    assert {name: server.summary[name] for name in report.metrics()} == report.metrics()
    assert {c: server.summary[f"memsave/peak_{c}_bytes"] for c in CATEGORIES} == dict(report.by_category)
    assert server.summary["memsave/loss_class"] == "exact"
    assert server.run["tags"] == ["memsave:early_zero_grad", "memsave:microbatching"]
    config = json.loads(server.run["config"])
    assert config["memsave"]["value"]["microbatching"]["size"] == 2
    assert {"memsave/breakdown", "memsave/timeline"} <= set(config["_wandb"]["value"]["visualize"])
    path = server.summary["memsave/breakdown_table"]["path"]
    (table,) = [content for name, content in server.files.items() if name.endswith(path)]
    assert json.loads(table)["data"] == [[name, size] for name, size in report.by_category.items()]


def test_online(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero, "log", logging.getLogger("told"))
    rank_zero.log.setLevel(logging.INFO)
    with serving(tmp_path) as server, wandb_session():
        monkeypatch.setenv("WANDB_CONSOLE", "wrap")  # as in a terminal: what is printed is sent as well
        report = train(tmp_path, offline=False)
        check(server, report)
    (path,) = tmp_path.glob("wandb/run-*/files/output.log")
    assert "lightning-memsave" in path.read_text()


def test_offline_and_synced_afterwards(tmp_path):
    with wandb_session():
        report = train(tmp_path, offline=True)
    (path,) = wandb_paths(tmp_path)
    command = shutil.which("wandb", path=Path(sys.executable).parent)
    with serving(tmp_path) as server:
        subprocess.run([command, "sync", str(path.parent)], check=True, timeout=120, capture_output=True)
        check(server, report)
