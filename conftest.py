"""README and docs: every Python block runs."""

from __future__ import annotations

from importlib.util import find_spec

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/**/*.md", "docs/*.md"]
).pytest()

# Imported for its doctests, files that need Triton would fail where there is none.
collect_ignore_glob = [] if find_spec("triton") else ["lightning_memsave/numerics/kernels/triton_*.py"]
