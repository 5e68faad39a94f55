from __future__ import annotations

import pytest

from tests.programs import run_program

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
    run_program("-m", PROGRAM, num_processes, seconds, num_processes=num_processes, timeout=seconds + 300)
