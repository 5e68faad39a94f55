from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memsave.torch_internals.sharded_parameters import can_begin_anew
from tests.programs import run_program

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
RECOVERS = pytest.mark.skipif(not can_begin_anew(), reason="FSDP2 does not begin anew after an error before torch 2.13")


@pytest.mark.parametrize(
    ("num_processes", "program"),
    [
        (0, ("ddp_program.py",)),
        pytest.param(0, ("ddp_sparsity_program.py",), marks=pytest.mark.slow),
        pytest.param(0, ("ddp_low_rank_program.py",), marks=pytest.mark.slow),
        pytest.param(0, ("ddp_sparse_update_program.py",), marks=pytest.mark.slow),
        (0, ("ddp_budget_program.py",)),
        (2, ("ddp_release_program.py",)),
        (0, ("fsdp_program.py",)),
        (0, ("fsdp_budget_program.py",)),
        pytest.param(0, ("fsdp_budget_program.py", "late"), marks=pytest.mark.slow),
        pytest.param(0, ("compiled_fsdp_program.py",), marks=pytest.mark.slow),
        pytest.param(0, ("prediction_program.py",), marks=pytest.mark.slow),
        (2, ("exchanging_program.py",)),
        (2, ("ddp_recovery_program.py",)),
        pytest.param(2, ("fsdp_recovery_program.py",), marks=RECOVERS),
        pytest.param(0, ("fsdp_recovery_program.py", "alone"), marks=[RECOVERS, pytest.mark.slow]),
        pytest.param(0, ("ddp_recovery_program.py", "spawn"), marks=pytest.mark.slow),
    ],
    ids=[
        "ddp",
        "sparsity",
        "low rank",
        "sparse update",
        "budget",
        "release",
        "fsdp",
        "budget under fsdp",
        "budget under fsdp of layers that come late",
        "compiled fsdp",
        "prediction",
        "steps that exchange",
        "recovery under torchrun",
        "recovery under fsdp",
        "recovery under fsdp of one process",
        "recovery in spawned processes",
    ],
)
def test_two_processes_equal_plain_lightning(num_processes, program):
    name, *arguments = program
    run_program(Path(__file__).with_name(name), *arguments, num_processes=num_processes)


@RECOVERS
@pytest.mark.parametrize(
    ("where", "rank", "why"),
    [
        pytest.param("forward", 0, "one sample did not go through", marks=pytest.mark.slow),
        pytest.param("backward", 1, "one sample did not go through", marks=pytest.mark.slow),
        ("step", 1, "some parameters may have been updated"),
    ],
)
def test_both_processes_of_fsdp_say_which_of_them_ran_out_of_memory_for_good(where, rank, why):
    program = str(Path(__file__).with_name("fsdp_recovery_program.py"))
    command = [sys.executable, *TORCHRUN, program, "end", where, str(rank)]
    done = subprocess.run(command, check=False, timeout=500, capture_output=True, text=True)
    ended = sorted(line for line in done.stderr.splitlines() if line.startswith("ended: "))
    assert len(ended) == 2, done.stderr[-3000:]
    place = {"step": "the optimizer's update"}.get(where, f"the {where} pass of part 1 of 1")
    for number, line in enumerate(ended):
        assert line.startswith(f"ended: {number}: Memory ran out in rank {rank}, and {why}"), line
        assert f"It ran out in {place}: " in line
        assert "`checkpointing=" in line
    assert f"Rank {1 - rank} waited for it in the forward pass" in ended[1 - rank] or where == "backward"
