from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def benchmarks_are_importable():
    """As when a script of benchmarks/ runs: its folder comes first."""
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path[:] = before
