"""The site of the docs: every page is in its navigation, and no link leads nowhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import lightning_memsave

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")


def paths_in(tree):
    for entry in tree:
        for value in entry.values():
            yield from paths_in(value) if isinstance(value, list) else [value]


def test_navigation_has_every_page_once():
    listed = list(paths_in(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == [page.relative_to(DOCS).as_posix() for page in PAGES]


def slugs(page):
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    dead = []
    for path, anchor in LINK.findall(page.read_text()):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in slugs(target)):
            dead.append(f"{path}#{anchor}" if anchor else path)
    assert dead == []


def test_reference_has_every_public_name_once():
    listed = re.findall(r"^::: lightning_memsave\.(\w+)$", (DOCS / "reference.md").read_text(), flags=re.M)
    assert sorted(listed) == sorted(lightning_memsave.__all__)


@pytest.mark.skipif(not find_spec("mkdocstrings_handlers"), reason="needs the extra `docs`")
def test_the_site_builds(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


spec = importlib.util.spec_from_file_location("recordings", ROOT / "docs" / "recordings.py")
recordings = importlib.util.module_from_spec(spec)
spec.loader.exec_module(recordings)
_LONG = ("A budget", "A budget that is too small for 6 blocks", "Runs compared")  # a minute each


@pytest.mark.parametrize(
    "title", [pytest.param(each, marks=[pytest.mark.slow] * (each in _LONG)) for each in recordings.RECORDINGS]
)
def test_the_recorded_console_is_what_runs_show(title):
    found = recordings.comparable(recordings.section(title))
    assert found in recordings.comparable(recordings.PAGE.read_text())


def test_the_recorded_console_has_these_sections():
    headings = re.findall(r"^## (.*)", recordings.PAGE.read_text(), flags=re.MULTILINE)
    assert headings == list(recordings.RECORDINGS)


def test_what_readme_shows_of_the_console_was_recorded():
    shown = re.findall(r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    assert len(shown) == 2
    assert all(text in (DOCS / "console.md").read_text() for text in shown)
