from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("program", ["ddp_program.py", "ddp_sparsity_program.py", "fsdp_program.py"])
def test_two_processes_equal_plain_lightning(program):
    path = Path(__file__).with_name(program)
    done = subprocess.run([sys.executable, str(path)], check=False, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ok" in done.stderr.splitlines()
