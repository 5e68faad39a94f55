from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_technique_does_in_two_processes_what_its_row_says(kind):
    command = [sys.executable, "-m", "tests.contracts.distributed_program", kind]
    done = subprocess.run(command, check=False, timeout=500, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ok" in done.stderr.splitlines()
