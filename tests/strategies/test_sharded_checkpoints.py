"""Checkpoints under FSDP2 of small state and weights, between numbers of processes, and to plain Lightning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).with_name("sharded_checkpoint_program.py"))


def run(*arguments: object) -> None:
    command = [sys.executable, PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, check=False, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ok" in done.stderr.splitlines()


def test_two_processes_read_what_two_wrote(tmp_path):
    run("save", tmp_path, 2)
    run("load", tmp_path, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (1, 1)])
def test_another_number_of_processes_reads_whole_checkpoints(tmp_path, writers, readers):
    run("save", tmp_path, writers)
    run("load", tmp_path, readers, writers)
