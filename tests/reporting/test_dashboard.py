"""The W&B workspace: built without a network, sent to a server of the tests' own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys

import pytest
import wandb

from lightning_memsave.core.report import CATEGORIES, MemoryReport
from lightning_memsave.reporting.dashboard import build_workspace, save_workspace, write_workspace
from lightning_memsave_cli import main
from tests.reporting.wandb_server import serving

pytest.importorskip("wandb_workspaces")


def panels_of(specification):
    sections = specification["spec"]["section"]["panelBankConfig"]["sections"]
    return {
        section["name"]: [(panel["viewType"], panel["config"]) for panel in section["panels"]]
        for section in sections
        if section["panels"]
    }


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """No account either; whoever connects to anything fails the test."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setattr("socket.socket.connect", lambda *arguments: pytest.fail("connected"))


@pytest.fixture
def specification(no_network, tmp_path):
    assert main(["dashboard", "me/my-project", "--json", str(tmp_path / "w.json")]) == 0
    return json.loads((tmp_path / "w.json").read_text())


@pytest.fixture
def with_accuracy(no_network, tmp_path):
    command = ["dashboard", "me/my-project", "--metric", "test/accuracy", "--json", str(tmp_path / "w.json")]
    assert main(command) == 0
    return json.loads((tmp_path / "w.json").read_text())


def test_without_a_metric_the_costs_are_what_every_run_has(specification):
    ((kind, scatter),) = panels_of(specification)["What did it cost?"]
    assert kind == "Scatter Plot"
    assert (scatter["xAxis"], scatter["yAxis"]) == ("summary:memsave/peak_bytes", "summary:memsave/step_seconds")
    assert scatter["showMinYAxisLine"] is True, "less time is better"
    assert not scatter["showMaxYAxisLine"]
    assert set(re.findall(r"summary:([^\"]+)", json.dumps(specification))) == {
        "memsave/peak_bytes",
        "memsave/factor",
        "memsave/loss_class",
        "memsave/step_seconds",
    }


def test_panels_ask_the_questions(with_accuracy):
    specification = with_accuracy
    assert (specification["entity"], specification["project"]) == ("me", "my-project")
    panels = panels_of(specification)
    assert list(panels) == [
        "Which run is the smallest?",
        "What did it cost?",
        "Where did the bytes go?",
        "Does it grow?",
        "Which settings?",
    ]
    (kind, scatter), _ = panels["What did it cost?"]
    assert kind == "Scatter Plot"
    assert (scatter["xAxis"], scatter["yAxis"]) == ("summary:memsave/peak_bytes", "summary:test/accuracy")
    assert scatter["showMaxYAxisLine"] is True
    assert not scatter["showMinYAxisLine"]
    (bars, area) = (config for _, config in panels["Where did the bytes go?"])
    assert area["plotType"] == "stacked-area"
    for config in (bars, area):
        assert config["metrics"] == [f"memsave/peak_{category}_bytes" for category in CATEGORIES]


def test_every_metric_of_ours_is_one_that_runs_log(specification):
    named = set(re.findall(r"memsave/[a-z_]+", json.dumps(specification)))
    assert len(named) >= 9
    figures = {f.name: 1 for f in dataclasses.fields(MemoryReport) if f.name not in ("by_category", "applied")}
    full = MemoryReport(**{**figures, "by_category": dict.fromkeys(CATEGORIES, 1)})
    assert named <= {*full.metrics(), "memsave/loss_class"}


def test_less_of_a_loss_is_better(tmp_path, no_network):
    write_workspace(build_workspace("me/p", "val/loss"), tmp_path / "w.json")
    _, scatter = panels_of(json.loads((tmp_path / "w.json").read_text()))["What did it cost?"][0]
    assert scatter["yAxis"] == "summary:val/loss"
    assert scatter["showMinYAxisLine"] is True
    assert not scatter["showMaxYAxisLine"]


@pytest.mark.parametrize("target", ["", "me", "me/", "/p", "a/b/c", "me/my project"])
def test_a_target_of_another_form_is_refused(capsys, target):
    assert main(["dashboard", target, "--json", "never-written.json"]) == 2
    assert "`target` must be ENTITY/PROJECT" in capsys.readouterr().err


def test_missing_extra_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)  # importing it now raises
    assert main(["dashboard", "me/p", "--json", str(tmp_path / "w.json")]) == 2
    assert "pip install 'lightning-memsave[dashboard]'" in capsys.readouterr().err


def test_saving_sends_the_specification(tmp_path):
    with serving(tmp_path) as server:
        workspace = build_workspace("me/p")
        address = save_workspace(workspace)
    (view,) = server.views
    write_workspace(workspace, tmp_path / "w.json")
    written = json.loads((tmp_path / "w.json").read_text())
    assert (view["entityName"], view["projectName"]) == ("me", "p")
    assert panels_of({"spec": json.loads(view["spec"])}) == panels_of(written)
    assert "/me/p?nw=" in address


def test_without_account_saving_names_the_other_way(monkeypatch, tmp_path, capsys):
    wandb.teardown()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert main(["dashboard", "me/p"]) == 2
    err = capsys.readouterr().err
    assert "API key" in err
    assert "--json FILE" in err
