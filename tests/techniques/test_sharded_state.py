"""Optimizer state on shards: programs of two and of four processes."""

from __future__ import annotations

import pytest

from tests.programs import run_program


@pytest.mark.parametrize(
    ("program", "num_processes"),
    [
        ("sharded_state_program", 2),
        ("sharded_weights_program", 2),
        pytest.param("sharded_mesh_program", 4, marks=pytest.mark.slow),
    ],
)
def test_shards_step_as_the_whole_does(program, num_processes):
    run_program("-m", f"tests.techniques.{program}", num_processes=num_processes)
