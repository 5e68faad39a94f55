"""Checkpoints under FSDP2 of small state and weights, between numbers of processes, and to plain Lightning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.programs import run_program

PROGRAM = Path(__file__).with_name("sharded_checkpoint_program.py")


def test_two_processes_read_what_two_wrote(tmp_path):
    run_program(PROGRAM, "save", tmp_path, 2)
    run_program(PROGRAM, "load", tmp_path, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (1, 1)])
def test_another_number_of_processes_reads_whole_checkpoints(tmp_path, writers, readers):
    run_program(PROGRAM, "save", tmp_path, writers)
    run_program(PROGRAM, "load", tmp_path, readers, writers)


KILLED = PROGRAM.with_name("killed_fsdp_program.py")
NOISE = {"exact": 2e-5, "small": 4e-3}
"""Distance of weights from those of a run that was not killed; what rounding and 8-bit codes add up to in 8 steps."""


@pytest.mark.slow
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("kind", NOISE)
def test_a_run_of_which_a_process_was_killed_goes_on_with_another_number_of_processes(tmp_path, kind, writers, readers):
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={writers}")
    command = [sys.executable, *launcher, str(KILLED), "kill", str(tmp_path), kind]
    killed = subprocess.run(command, check=False, timeout=500, capture_output=True, text=True)
    assert killed.returncode, "it has come to its end"
    assert "SIGKILL" in killed.stderr
    run_program(KILLED, "go-on", tmp_path, kind, num_processes=readers)
    run_program(KILLED, "straight", tmp_path, kind, num_processes=readers)
    found, expected = (torch.load(tmp_path / f"{what}-{readers}.pt") for what in ("go-on", "straight"))
    for a, b in zip(found, expected, strict=True):
        assert float((a - b).abs().max()) <= NOISE[kind]
