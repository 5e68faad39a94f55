"""README and docs: every Python block runs."""

from __future__ import annotations

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/**/*.md", "docs/*.md"]
).pytest()
