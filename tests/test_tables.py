from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tables.write import TABLES, with_tables

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", TABLES)
def test_tables_are_made_from_the_committed_rows(page):
    assert with_tables(page) == (ROOT / page).read_text()
