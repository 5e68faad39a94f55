"""Checkpoints under FSDP2 of small state and weights, between numbers of processes, and to plain Lightning."""

from __future__ import annotations

from pathlib import Path

import pytest

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
