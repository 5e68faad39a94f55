"""Run the tests on other versions of torch and Lightning: python tests/versions.py [--subset] torch==2.11.0 torch ...

Each version gets an environment of its own under `.versions/`, which borrows every other package from `.venv`; `torch`
alone is the newest that pip finds. What came of it, by room, is a row of `benchmarks/results/versions.csv` with
`--record`, from which `docs/compatibility.md` is written.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
ROWS = ROOT / "benchmarks" / "results" / "versions.csv"
ROOMS = ("core", "torch_internals", "numerics", "saved_tensors", "measuring", "simulation", "techniques", "planner")
ROOMS += ("loops", "strategies", "prediction", "callbacks", "api", "contracts", "reporting", "demo")
SUBSET = {
    **{room: [f"tests/{room}"] for room in ROOMS[:6]},
    "techniques": [
        *("tests/techniques/test_quantized.py", "tests/techniques/test_activation_compression.py"),
        *("tests/techniques/test_int8_parameter.py", "tests/techniques/test_int8_uses.py"),
        "tests/techniques/test_batchnorm.py",  # compiled
    ],
    "loops": ["tests/loops/test_batch_structure.py"],
    "strategies": ["tests/strategies/test_lightning_features.py"],
    "contracts": ["tests/contracts"],
}
"""What stands closest to private names."""
USERS = {
    "transformers": {
        "saved_tensors": [
            "test_zoo.py",
            "test_checkpoint_regions.py",
            "test_linear_cross_entropy.py",
            "test_arguments.py",
        ],
        "planner": ["test_architectures.py"],
        "loops": [
            *("test_loss_reduction.py", "test_microbatch_loop.py", "test_batch_snapshot.py", "test_batch_cutter.py"),
            *("test_sample_noise.py", "test_microbatch_record.py", "test_merged_metrics.py", "test_merged_outputs.py"),
            *("test_deferred_logs.py", "test_recovery_of_odd_runs.py"),
        ],
        "strategies": ["test_peft.py"],
    },
    "peft": {"strategies": ["test_peft.py"]},
    "torchmetrics": {
        "loops": [
            *("test_microbatch_loop.py", "test_planned_checkpointing.py", "test_evaluation.py"),
            *("test_merged_metrics.py", "test_deferred_logs.py", "test_step_effects.py"),
        ]
    },
}
"""The tests that use a package, which run on other versions of it."""
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
        if requirement.startswith("lightning=="):  # under both names
            wanted = [requirement, f"pytorch-{requirement}"]
        if not requirement.startswith(("torch==", "transformers")) and requirement != "torch":
            wanted.insert(0, "--no-deps")  # which are borrowed, torch among them
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *wanted], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "borrowed.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
        (folder / "ready").touch()
    return python


def installed_in(python: Path, package: str) -> tuple[str, str, str]:
    """The package, its version, and Python's."""
    code = "import sys, importlib.metadata as m; print(m.version(sys.argv[1]), *sys.version_info[:2])"
    done = subprocess.run([python, "-c", code, package], check=True, capture_output=True, text=True)
    version, *numbers = done.stdout.split()
    return package, version.partition("+")[0], ".".join(numbers)


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
    """Test the versions that are named, replace their rows if asked to, and exit with 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("requirements", nargs="+", help="for example torch==2.11.0, torch, or lightning==2.5.6")
    parser.add_argument("--subset", action="store_true", help="only what stands closest to private names")
    parser.add_argument("--record", action="store_true", help="write rows")
    parser.add_argument("--remove", action="store_true", help="delete each environment after its tests")
    options = parser.parse_args()
    known = list(csv.DictReader(ROWS.open())) if ROWS.exists() else []
    num_failed = 0
    for requirement in options.requirements:
        python = environment(requirement)
        package = requirement.partition("==")[0]
        installed = installed_in(python, package)
        rooms = SUBSET if options.subset else {room: [f"tests/{room}"] for room in ROOMS}
        if package in USERS:
            rooms = {room: [f"tests/{room}/{name}" for name in names] for room, names in USERS[package].items()}
        known = [row for row in known if (row["package"], row["version"], row["python"]) != installed]
        for room, paths in rooms.items():
            found = counts(python, paths)
            num_failed += found["failed"]
            selection = "its users" if package in USERS else "subset" if options.subset else "all"
            where = (*installed, selection, room)
            known.append({**dict(zip(COLUMNS, where, strict=False)), **{key: str(n) for key, n in found.items()}})
            print(*installed, room, found, flush=True)
            if not options.record:
                continue
            with ROWS.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(known)
        if options.remove:
            shutil.rmtree(python.parent.parent)
    sys.exit(1 if num_failed else 0)


if __name__ == "__main__":
    main()
