"""Run tests on the simulated device: python -m tests.simulated_cuda [--torch torch==2.11.0] [pytest's arguments]."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tests import versions
from tests.simulated_cuda.build import build

SELECTED = ["-m", "gpu and not kernels and not slow"]
ALL = ["-n", "2", "--dist", "worksteal", "tests"]


def main() -> None:
    """Build what is needed and run pytest, with its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--torch", default="torch", help="a build for CUDA 13: torch==2.11.0 or later")
    options, arguments = parser.parse_known_args()
    python = versions.environment(options.torch)
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    variables = build(packages, python.parent.parent / "simulated_cuda")
    command = [python, "-m", "pytest", "-p", "tests.simulated_cuda.plugin", "-p", "no:cacheprovider"]
    os.chdir(versions.ROOT)
    done = subprocess.run([*command, *SELECTED, *(arguments or ALL)], env=os.environ | variables | {"PYTHONPATH": ""})
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
