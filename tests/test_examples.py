from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_memsave import MemSave

EXAMPLES = Path(__file__).parent.parent / "examples"


SCRIPTS = {
    "plain_torch.py": "x\n",
    "train_digits.py": "exact",
    "finetune_lora.py": "loss class exact",
    "image_classifier.py": "loss class exact",
    "ddp.py": "peak of each process",
    "fsdp2.py": "peak of each process",
}
"""What each prints, among other things."""


def run(tmp_path, script, *arguments):
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, cwd=tmp_path, check=False, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs_as_it_is(script, tmp_path):
    assert SCRIPTS[script] in run(tmp_path, script).stdout


def test_every_script_is_run_here_and_is_short():
    scripts = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert scripts.keys() == {*SCRIPTS, "train_with_cli.py"}
    assert max(scripts.values()) < 80


def test_the_cli_takes_its_settings_from_the_yaml(tmp_path):
    done = run(tmp_path, "train_with_cli.py", "fit", "--config", str(EXAMPLES / "lightning_cli.yaml"))
    assert "less (baseline predicted)" in done.stdout + done.stderr


def test_the_yaml_names_arguments_that_exist():
    (callback,) = yaml.safe_load((EXAMPLES / "lightning_cli.yaml").read_text())["trainer"]["callbacks"]
    assert MemSave(**callback["init_args"]).recipe.stems()[1:] == ("microbatching", "checkpointing", "optimizer_state")
