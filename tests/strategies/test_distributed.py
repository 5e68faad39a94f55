from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("launcher", "program"),
    [
        ((), ("ddp_program.py",)),
        ((), ("ddp_sparsity_program.py",)),
        ((), ("ddp_low_rank_program.py",)),
        ((), ("ddp_sparse_update_program.py",)),
        ((), ("ddp_budget_program.py",)),
        (TORCHRUN, ("ddp_release_program.py",)),
        ((), ("fsdp_program.py",)),
        ((), ("compiled_fsdp_program.py",)),
        pytest.param((), ("prediction_program.py",), marks=pytest.mark.slow),
        (TORCHRUN, ("ddp_recovery_program.py",)),
        pytest.param((), ("ddp_recovery_program.py", "spawn"), marks=pytest.mark.slow),
    ],
    ids=[
        "ddp",
        "sparsity",
        "low rank",
        "sparse update",
        "budget",
        "release",
        "fsdp",
        "compiled fsdp",
        "prediction",
        "recovery under torchrun",
        "recovery in spawned processes",
    ],
)
def test_two_processes_equal_plain_lightning(launcher, program):
    name, *arguments = program
    command = [sys.executable, *launcher, str(Path(__file__).with_name(name)), *arguments]
    done = subprocess.run(command, check=False, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ok" in done.stderr.splitlines()
