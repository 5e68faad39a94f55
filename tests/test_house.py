"""Rules of the house: a light import, complete rooms, small files, true declarations."""

import ast
import inspect
import json
import re
import subprocess
import sys
import warnings
from itertools import combinations, pairwise
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

import lightning_memsave
from lightning_memsave.core import versions
from lightning_memsave.core.compatibility import COMPATIBILITY, SETTINGS, WAYS_OF_TRAINING
from lightning_memsave.techniques.registry import TECHNIQUES

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "lightning_memsave"
FILES = sorted([*SOURCE.rglob("*.py"), ROOT / "lightning_memsave_cli.py"])
STEMS = [technique.stem for technique in TECHNIQUES]


def relative(path):
    return path.relative_to(ROOT).as_posix()


LEAN_IMPORT = """
import json, logging, os, sys
root = logging.getLogger()
root_before = (list(root.handlers), root.level, root.disabled, logging.root.manager.disable)
import lightning.pytorch, pytorch_lightning, torch, torchmetrics
def levels():
    return {
        name: (logger.level, len(logger.handlers))
        for name, logger in logging.root.manager.loggerDict.items() if isinstance(logger, logging.Logger)
    }
before, threads = levels(), torch.get_num_threads()
brought_by_lightning = {"matplotlib", "transformers"} & set(sys.modules)
generator, environment = torch.get_rng_state(), dict(os.environ)
import lightning_memsave
after = levels()
print(json.dumps({
    "heavy": sorted(
        {"bitsandbytes", "wandb", "sklearn", "matplotlib", "transformers", "plotly", "wandb_workspaces"}
        & set(sys.modules) - brought_by_lightning
    ),
    "cuda": torch.cuda.is_initialized(),
    "root_changed": (list(root.handlers), root.level, root.disabled, logging.root.manager.disable) != root_before,
    "levels_changed": [name for name in before if after[name] != before[name]],
    "own_levels": [name for name in after if name.startswith("lightning_memsave") and after[name] != (0, 0)],
    "threads_changed": torch.get_num_threads() != threads,
    "random_state_changed": not torch.equal(torch.get_rng_state(), generator),
    "environment_changed": dict(os.environ) != environment,
    "files": os.listdir(),
}))
"""


def test_lean_import(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LEAN_IMPORT], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "heavy": [],
        "cuda": False,
        "root_changed": False,
        "levels_changed": [],
        "own_levels": [],
        "threads_changed": False,
        "random_state_changed": False,
        "environment_changed": False,
        "files": [],
    }


@pytest.mark.parametrize("stem", STEMS)
def test_technique_is_complete(stem):
    rooms = {
        "code": [f"lightning_memsave/techniques/{stem}.py", f"lightning_memsave/techniques/{stem}/__init__.py"],
        "test": [f"tests/techniques/test_{stem}.py"],
        "benchmark": [f"benchmarks/memory_time/bench_{stem}.py"],
        "page": [f"docs/techniques/{stem}.md"],
    }
    missing = [
        f"{room} ({' or '.join(paths)})"
        for room, paths in rooms.items()
        if not any((ROOT / path).is_file() for path in paths)
    ]
    rows = {frozenset((row.first, row.second)) for row in COMPATIBILITY}
    missing += [
        f"row of {stem} with {other} (core/compatibility.py)"
        for other in STEMS
        if other != stem and frozenset((stem, other)) not in rows
    ]
    assert not missing, f"{stem} lacks: {'; '.join(missing)}"


def test_techniques_have_one_name_each():
    assert len(set(STEMS)) == len(STEMS)
    rooms = {path.stem for path in (SOURCE / "techniques").iterdir() if not path.name.startswith("_")}
    shared = {"registry", "batchnorm"}  # the second by microbatching and tiling
    assert rooms - shared == set(STEMS), "a technique in the room that the registry does not list, or the reverse"


def test_compatibility_names_what_exists():
    known = {*STEMS, *SETTINGS, *WAYS_OF_TRAINING}
    for row in COMPATIBILITY:
        assert {row.first, row.second} <= known, row
        assert (row.refused_because is None) == (row.remedy is None), f"a refusal without a way out: {row}"
    pairs = [frozenset((row.first, row.second)) for row in COMPATIBILITY]
    assert all(len(pair) == 2 for pair in pairs)
    assert [sorted(a) for a, b in combinations(pairs, 2) if a == b] == [], "two rows for one pair"


def test_no_file_is_longer_than_500_lines():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in FILES}
    assert len(lengths) > 20
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def test_no_function_is_long():
    found, seen = [], 0
    for path in FILES:
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                seen += 1
                length = node.end_lineno - node.lineno + 1
                if length > 80 and "# noqa: C901" not in lines[node.lineno - 1]:
                    found.append(f"{relative(path)}:{node.lineno} {node.name} has {length} lines")
    assert seen > 100
    assert found == []


FACTORIES = {
    *("arange", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "tensor", "tril_indices", "triu_indices", "zeros"),
}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_tensor_that_is_made_says_where(path):
    """Without `device=` it lies on the program's default device, and a C kernel would write there."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in FACTORIES}:
            assert {"device", None} & {keyword.arg for keyword in node.keywords}, f"{relative(path)}:{node.lineno}"


def test_no_module_is_named_for_no_job():
    names = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [relative(path) for path in SOURCE.rglob("*") if path.stem.strip("_") in names] == []


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX"])
def test_nothing_is_left_undone(word):
    found = [
        f"{relative(path)}:{number}"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"\b{word}\b", line)
    ]
    assert found == []


def test_public_names_are_sorted_and_complete():
    names = lightning_memsave.__all__
    assert names == sorted(set(names))
    imported = {
        name
        for name, value in vars(lightning_memsave).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("lightning_memsave.")
    }
    assert imported - set(names) <= {"check_names", "check_versions", "register_strategies"}


@pytest.mark.parametrize("name", lightning_memsave.__all__)
def test_public_name_has_a_docstring(name):
    value = getattr(lightning_memsave, name)
    doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert doc, f"{name} has no docstring"
    assert not doc.startswith(f"{name}("), f"{name} has only the docstring that dataclass writes"


def declared(package):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (requirement,) = [text for text in project["dependencies"] if re.match(r"[\w-]+", text)[0] == package]
    low, high = re.fullmatch(rf"{package}>=([\d.]+),<([\d.]+)", requirement).groups()
    return tuple(tuple(int(part) for part in bound.split(".")) for bound in (low, high))


@pytest.mark.parametrize("package", ["torch", "lightning"])
def test_the_tested_range_is_the_declared_one(package):
    low, (major, minor) = versions.TESTED[package]
    assert (low, (major, minor + 1)) == declared(package)


def test_every_checked_package_is_known_here():
    assert set(versions.TESTED) == {"torch", "lightning"}


def pretended(monkeypatch, package, found):
    real = versions.version
    monkeypatch.setattr(versions, "version", lambda name: found if name == package else real(name))


@pytest.mark.parametrize("package", versions.TESTED)
def test_an_older_version_is_refused_with_a_remedy(monkeypatch, package):
    low, _ = versions.TESTED[package]
    for found in (f"{low[0]}.{low[1] - 1}.9", f"{low[0] - 1}.99.0"):
        pretended(monkeypatch, package, found)
        with pytest.raises(ImportError, match=rf"needs {package} >= [\d.]+, found {found}.*pip install '{package}>="):
            versions.check_versions()


@pytest.mark.parametrize("package", versions.TESTED)
def test_a_newer_version_is_told_of(monkeypatch, package):
    _, (major, minor) = versions.TESTED[package]
    for found in (f"{major}.{minor + 1}.0", f"{major}.{minor + 1}.0.dev20260101+cu130", f"{major + 1}.0.0"):
        pretended(monkeypatch, package, found)
        with pytest.warns(
            versions.UntestedVersionWarning, match=rf"is tested with {package} .* and this is {found[:3]}"
        ):
            versions.check_versions()


@pytest.mark.parametrize("package", versions.TESTED)
def test_a_version_inside_the_range_is_silent(monkeypatch, package):
    (_, low), (major, high) = versions.TESTED[package]
    for found in (f"{major}.{low}.0", f"{major}.{low}.0+cpu", f"{major}.{low}.0a0+git1234", f"{major}.{high}.99"):
        pretended(monkeypatch, package, found)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            versions.check_versions()


def test_package_version_is_a_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", lightning_memsave.__version__)


_FRAGMENT = re.compile(
    r"(After|As|At|Before|Beside|Between|By|For|From|In|Inside|Of|On|Per|Since|Than|To|Under|Until|With|Within|Without"
    r"|Both|He|It|One of|Our|That|Them|These|They|This|Those|Who|Whoever|Whose|Which"
    r"|Called|Done|Found|Given|Held|Kept|Known|Made|Seen|Taken|Told|Where)\b"
)
"""Begins of a sentence that needs another one above it: a preposition, a pronoun, a participle."""


def _documented(tree):
    """The docstrings of a module, its classes and functions, and the texts below attributes."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield node.lineno if hasattr(node, "lineno") else 1, ast.get_docstring(node) or ""
        statements = getattr(node, "body", None)
        for first, second in pairwise(statements if isinstance(statements, list) else []):
            is_text = isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
            if isinstance(first, (ast.Assign, ast.AnnAssign)) and is_text and isinstance(second.value.value, str):
                yield second.lineno, second.value.value


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_a_docstring_begins_with_a_verb_or_a_noun(path):
    found = [(line, text) for line, text in _documented(ast.parse(path.read_text())) if _FRAGMENT.match(text)]
    assert found == []
