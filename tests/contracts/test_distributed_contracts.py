from __future__ import annotations

import pytest

from tests.programs import run_program


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_every_technique_does_in_two_processes_what_its_row_says(kind):
    run_program("-m", "tests.contracts.distributed_program", kind)
