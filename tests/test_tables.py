from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
tables = importlib.import_module("tables")
sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("page", tables.TABLES)
def test_tables_are_made_from_the_committed_rows(page):
    assert tables.with_tables(page) == (ROOT / page).read_text()
