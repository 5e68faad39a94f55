from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_table_is_made_from_the_committed_rows(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import readme_table

    readme = (ROOT / "README.md").read_text()
    assert readme_table.START in readme
    assert readme_table.readme_with_table(readme) == readme
