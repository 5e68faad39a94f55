from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_memsave import MemSave

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize(("script", "expected"), [("plain_torch.py", "x\n"), ("train_digits.py", "exact")])
def test_scripts_run_as_they_are(script, expected, tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script)], cwd=tmp_path, check=False, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert expected in done.stdout


def test_the_yaml_names_arguments_that_exist():
    (callback,) = yaml.safe_load((EXAMPLES / "lightning_cli.yaml").read_text())["trainer"]["callbacks"]
    assert MemSave(**callback["init_args"]).recipe.stems()[1:] == ("microbatching", "checkpointing", "optimizer_state")
