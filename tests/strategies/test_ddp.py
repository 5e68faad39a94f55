from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_two_processes_equal_plain_ddp():
    program = Path(__file__).with_name("ddp_program.py")
    done = subprocess.run([sys.executable, str(program)], check=False, timeout=500, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ok" in done.stderr.splitlines()
