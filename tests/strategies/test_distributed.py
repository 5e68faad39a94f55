from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_memsave.torch_internals.sharded_parameters import can_begin_anew

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
RECOVERS = pytest.mark.skipif(not can_begin_anew(), reason="FSDP2 does not begin anew after an error before torch 2.13")


@pytest.mark.parametrize(
    ("launcher", "program"),
    [
        ((), ("ddp_program.py",)),
        pytest.param((), ("ddp_sparsity_program.py",), marks=pytest.mark.slow),
        pytest.param((), ("ddp_low_rank_program.py",), marks=pytest.mark.slow),
        pytest.param((), ("ddp_sparse_update_program.py",), marks=pytest.mark.slow),
        ((), ("ddp_budget_program.py",)),
        (TORCHRUN, ("ddp_release_program.py",)),
        ((), ("fsdp_program.py",)),
        pytest.param((), ("compiled_fsdp_program.py",), marks=pytest.mark.slow),
        pytest.param((), ("prediction_program.py",), marks=pytest.mark.slow),
        (TORCHRUN, ("exchanging_program.py",)),
        (TORCHRUN, ("ddp_recovery_program.py",)),
        pytest.param(TORCHRUN, ("fsdp_recovery_program.py",), marks=RECOVERS),
        pytest.param((), ("fsdp_recovery_program.py", "alone"), marks=[RECOVERS, pytest.mark.slow]),
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
        "steps that exchange",
        "recovery under torchrun",
        "recovery under fsdp",
        "recovery under fsdp of one process",
        "recovery in spawned processes",
    ],
)
def test_two_processes_equal_plain_lightning(launcher, program):
    name, *arguments = program
    command = [sys.executable, *launcher, str(Path(__file__).with_name(name)), *arguments]
    done = subprocess.run(command, check=False, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ok" in done.stderr.splitlines()


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
