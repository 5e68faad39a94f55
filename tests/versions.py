"""Run the tests on other versions of torch and Lightning: python tests/versions.py [--subset] torch==2.11.0 ...

Each version gets an environment of its own under `.versions/`, which borrows every other package from `.venv`. What
came of it, by room, is a row of `benchmarks/results/versions.csv`, from which `docs/compatibility.md` is written.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "benchmarks" / "results" / "versions.csv"
_ROOMS = "numerics core vault memory planner techniques strategies callbacks contracts reporting demo"
ROOMS = _ROOMS.split()
SUBSET = {
    "numerics": ["tests/numerics"],
    "vault": ["tests/vault"],
    "memory": ["tests/memory"],
    "techniques": [
        "tests/techniques/test_optimizer_state_formats.py",
        "tests/techniques/test_activation_compression.py",
    ],
    "strategies": ["tests/strategies/test_first_forward.py", "tests/strategies/test_lightning_features.py"],
    "contracts": ["tests/contracts"],
}
"""What stands closest to private names."""
BESIDE = {"torch==2.14.1": ["torchvision==0.29.1"]}
"""What is installed with a version."""
COLUMNS = ("package", "version", "python", "selection", "room", "passed", "failed", "skipped")


def environment(requirement: str) -> Path:
    """The Python of an environment with this package, and all others of this one."""
    folder = ROOT / ".versions" / requirement.replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        wanted = [requirement, *BESIDE.get(requirement, ())]
        if requirement.startswith("lightning=="):  # under both names; the rest is borrowed
            wanted = ["--no-deps", requirement, f"pytorch-{requirement}"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(f"{ROOT / 'src'}\n{sysconfig.get_path('purelib')}\n")
        (folder / "ready").touch()
    return python


def counts(python: Path, paths: list[str]) -> dict[str, int]:
    """How many tests passed, failed and were skipped."""
    report = python.parent.parent / "report.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-m", "not slow and not gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    subprocess.run([*command, "-n", "2", "--dist", "worksteal", *paths], cwd=ROOT, env=os.environ | {"PYTHONPATH": ""})
    suite = ElementTree.parse(report).getroot()[0]
    total, failed, skipped = (
        sum(int(suite.get(name, 0)) for name in names) for names in (["tests"], ["failures", "errors"], ["skipped"])
    )
    return {"passed": total - failed - skipped, "failed": failed, "skipped": skipped}


def main() -> None:
    """Replace the rows of the versions that are named; exit with 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requirements", nargs="+", help="for example torch==2.11.0 or lightning==2.5.6")
    parser.add_argument("--subset", action="store_true", help="only what stands closest to private names")
    options = parser.parse_args()
    known = list(csv.DictReader(ROWS.open())) if ROWS.exists() else []
    num_failed = 0
    for requirement in options.requirements:
        package, _, version = requirement.partition("==")
        python = environment(requirement)
        rooms = SUBSET if options.subset else {room: [f"tests/{room}"] for room in ROOMS}
        known = [row for row in known if (row["package"], row["version"]) != (package, version)]
        for room, paths in rooms.items():
            found = counts(python, paths)
            num_failed += found["failed"]
            selection = "subset" if options.subset else "all"
            where = (package, version, "{}.{}".format(*sys.version_info), selection, room)
            known.append({**dict(zip(COLUMNS, where, strict=False)), **{key: str(n) for key, n in found.items()}})
            print(requirement, room, found, flush=True)
            with ROWS.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(known)
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
