from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def benchmarks_and_examples_are_importable():
    """As when a script of benchmarks/ runs: its folder and the root of the repository come first."""
    before = list(sys.path)
    sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]
    yield
    sys.path[:] = before
