"""Limits of the address space (`ulimit -v`): a run trains on, or ends in an error that says why; never by a signal."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc")


def outcomes(start: int, stop: int, step: int) -> list[dict[str, object]]:
    program = [sys.executable, "-m", "tests.loops.memory_limit_program", *map(str, (start, stop, step))]
    lines = subprocess.run(program, capture_output=True, text=True, timeout=1500, check=True).stdout.splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert [each["limit"] for each in found] == list(range(start, stop + 1, step))
    return found


def check(found):
    """Plain steps need 350 MiB. Below, where the heap has holes in the wrong places, a run may end as well."""
    for each in found:
        assert not each["signal"], each
        assert each["text"] == "trained" or each["text"].startswith("out of memory: "), each
    assert all(each["text"] == "trained" for each in found if each["limit"] >= 400)
    recovered = [each["text"] == "trained" for each in found if 100 <= each["limit"] < 350]
    assert sum(recovered) > len(recovered) / 2


def test_some_limits():
    check(outcomes(100, 600, 100))


@pytest.mark.slow
def test_all_limits():
    check(outcomes(50, 600, 10))
