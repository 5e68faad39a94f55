"""What the command line says before anything heavy is imported: help, version, usage, missing extras."""

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import lightning_memsave
import lightning_memsave_cli as cli
from lightning_memsave.demo import run as demo

ROOT = Path(__file__).parents[1]


def test_options_reach_the_demo(monkeypatch):
    received = []
    monkeypatch.setattr(demo, "run_demo", received.append)
    options = ["--out", "o", "--data-dir", "d", "--epochs", "7", "--batch-size", "9", "--seed", "3", "--no-wandb"]
    assert cli.main(["demo", *options]) == 0
    assert cli.main(["demo"]) == 0
    assert received[0] == demo.DemoConfig(
        out=Path("o"), data_dir=Path("d"), epochs=7, batch_size=9, seed=3, wandb=False
    )
    assert received[1] == demo.DemoConfig(), "the two places that state defaults differ"


EXTRAS = [
    ("demo", [], "sklearn"),
    ("demo", [], "matplotlib"),
    ("demo", ["--data-dir", "cifar"], "plotly"),
    ("demo", [], "wandb_workspaces"),
    ("compare", ["run.json", "--out", "page.html"], "plotly"),
    ("dashboard", ["me/mine"], "wandb_workspaces"),
    ("plan", ["--config", "config.yaml"], "jsonargparse"),
    ("plan", ["users:Model", "--batch", "users:batch", "--figure", "step.html"], "plotly"),
]


@pytest.mark.parametrize(("command", "arguments", "module"), EXTRAS)
def test_a_missing_extra_is_said_before_the_work_begins(monkeypatch, capsys, command, arguments, module):
    monkeypatch.setitem(sys.modules, module, None)  # importing it now raises
    monkeypatch.setattr("lightning_memsave.cli.run", lambda *_: pytest.fail("work has begun"))
    assert cli.main([command, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert module in err
    assert err.endswith(f"pip install 'lightning-memsave[{command}]'\n")


@pytest.mark.parametrize(("command", "arguments", "module"), EXTRAS)
def test_the_extra_of_a_command_installs_what_it_imports(command, arguments, module):
    tomllib = pytest.importorskip("tomllib")
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    requirements = tomllib.loads(text)["project"]["optional-dependencies"][command]
    installed = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}
    assert {name.replace("_", "-").lower() for name in packages_distributions()[module]} & installed


@pytest.mark.parametrize(
    ("arguments", "modules"),
    [(["--data-dir", "cifar"], ["sklearn"]), (["--no-wandb"], ["wandb_workspaces"]), ([], ["jsonargparse"])],
)
def test_an_extra_that_the_options_do_not_need_may_be_missing(monkeypatch, arguments, modules):
    received = []
    monkeypatch.setattr(demo, "run_demo", received.append)
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    assert cli.main(["demo", *arguments]) == 0
    assert len(received) == 1


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help(capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert "lightning-memsave" in out
    assert "demo" in out


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit):
        cli.main(["demo", "--help"])
    out = capsys.readouterr().out
    for name in demo.DemoConfig.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in out or f"--no-{name}" in out


def test_no_command_is_a_question_and_no_wrong_usage(capsys):
    assert cli.main([]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("usage: lightning-memsave")
    assert err == ""


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lightning-memsave {lightning_memsave.__version__}\n"


QUESTION = """
import sys
from lightning_memsave_cli import main
try:
    status = main(sys.argv[1:])
except SystemExit as stopped:
    status = stopped.code
print(status, sorted({"torch", "lightning", "lightning_memsave", "numpy", "rich", "wandb"} & set(sys.modules)))
"""


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], ["verify", "--help"], ["plan", "--help"]])
def test_questions_import_nothing_heavy(arguments):
    program = [sys.executable, "-c", QUESTION, *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_the_console_script_begins_where_nothing_heavy_is_imported():
    tomllib = pytest.importorskip("tomllib")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    module, _, function = scripts["lightning-memsave"].partition(":")
    assert getattr(importlib.import_module(module), function) is cli.main


COMMANDS = ["demo", "compare", "dashboard", "verify", "plan"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_of_a_command_can_be_typed(capsys, command):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    program, *arguments = shlex.split(capsys.readouterr().out.partition("example:\n")[2])
    assert program == "lightning-memsave"
    assert cli._parser().parse_args(arguments).command == command


def test_every_argument_has_a_help_text():
    (commands,) = (each for each in cli._parser()._actions if isinstance(each, argparse._SubParsersAction))
    assert list(commands.choices) == COMMANDS
    arguments = [action for parser in commands.choices.values() for action in parser._actions]
    assert len(arguments) > 40
    assert [action.dest for action in arguments if not action.help] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["compare"],
        ["compare", "x", "--better", "up"],
        ["demo", "--epochs", "many"],
        ["demo", "--no-such-option"],
    ],
)
def test_wrong_usage_exits_2(capsys, arguments):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_module_can_be_run(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "lightning_memsave_cli", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    assert list(tmp_path.iterdir()) == []
