from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = "tests.strategies.random_settings_program"


@pytest.mark.parametrize(
    ("num_processes", "seconds"),
    [
        (2, 15),
        *(pytest.param(num, 1200, marks=pytest.mark.slow) for num in (2, 3, 4)),
    ],
)
def test_random_settings_end_on_all_ranks_alike(num_processes, seconds):
    """No wait for ever, no rank that drifts away, and plain training's result where the report says so."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}", "-m")
    command = [sys.executable, *launcher, PROGRAM, str(num_processes), str(seconds)]
    done = subprocess.run(command, check=False, timeout=seconds + 300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "ok" in done.stderr.splitlines()
