"""Programs that tests run in processes of their own, alone or under `torchrun`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_program(*command: object, num_processes: int = 0, timeout: float = 500) -> str:
    """Run `python command`, in so many processes under `torchrun` if asked for, and return its standard error.

    Raises:
        AssertionError: it failed, or it did not write the line `ok`.
    """
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}")
    done = subprocess.run(
        [sys.executable, *(launcher if num_processes else ()), *map(str, command)],
        check=False,
        timeout=timeout,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},  # the stack of a process that a signal ends
    )
    error = done.stderr  # its beginning says why, its end is often the launcher's
    place = error.find("Fatal Python error")
    if place >= 0:  # where a signal has ended a process; a list of all its extensions follows
        error = f"{error[max(0, place - 1000) : place + 5000]}\n[...]\n{error[-2000:]}"
    elif len(error) > 8000:
        error = f"{error[:5000]}\n[...]\n{error[-3000:]}"
    assert done.returncode == 0, error
    assert "ok" in done.stderr.splitlines(), error
    return done.stderr
