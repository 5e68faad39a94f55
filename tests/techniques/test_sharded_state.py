"""Optimizer state on shards: programs of two and of four processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize(
    ("program", "num_processes"),
    [
        ("sharded_state_program", 2),
        ("sharded_weights_program", 2),
        pytest.param("sharded_mesh_program", 4, marks=pytest.mark.slow),
    ],
)
def test_shards_step_as_the_whole_does(program, num_processes):
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}", "-m")
    command = [sys.executable, *launcher, f"tests.techniques.{program}"]
    done = subprocess.run(command, check=False, timeout=500, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ok" in done.stderr.splitlines()
