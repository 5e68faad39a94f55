"""Damaged and hostile folders of runs: what can be read is compared, the rest is named; nothing ends the comparison."""

from __future__ import annotations

import io
import json
import os
import random
import time
import warnings

import pytest
from rich.console import Console

from lightning_memsave.core.report import CATEGORIES, MemoryReport, Timeline
from lightning_memsave.planner.plan import Plan
from lightning_memsave.reporting.comparison import compare
from lightning_memsave.reporting.console import print_comparison, print_settings
from lightning_memsave.reporting.page import write_page
from lightning_memsave.reporting.runs import Run, read_runs
from lightning_memsave.simulation.predicted_step import Prediction
from tests.reporting.test_runs import entry, history, measured_row
from tests.reporting.test_wandb_run import log_of

NUM_MUTANTS = 120
GOOD = Run(name="good", report=MemoryReport(peak_bytes=600, by_category=dict.fromkeys(CATEGORIES, 100)))
ODD = ["", "inf", "-inf", "nan", "9" * 400, "9" * 5000, "1e999", "x", "-1", "[]", "{}", "null", "\x1b[2J", "0", "a,b,c"]


def csv_text():
    names = ["step", "loss", *measured_row(1)]
    rows = [[step, 1 / (1 + step), *measured_row(step).values()] for step in (1, 2)]
    return "\n".join(",".join(map(str, row)) for row in (names, *rows)) + "\n"


def json_text():
    timeline = Timeline(events=(1, 2), by_category={name: (1, 2) for name in CATEGORIES})
    report = MemoryReport(peak_bytes=6, by_category=dict.fromkeys(CATEGORIES, 1), timeline=timeline, step_seconds=0.5)
    run = Run(name="a", report=report, metrics={"loss": 0.5}, config={"lr": 0.1}, peaks=((1, 6),), loss_class="exact")
    return run.to_json()


def compare_all(folder):
    """As `lightning-memsave compare` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        comparison = compare(read_runs([folder]))
    text = Console(file=io.StringIO(), width=100)
    print_comparison(comparison, text)
    print_settings(comparison, text)
    comparison.to_json()
    return comparison, text.file.getvalue()


@pytest.fixture
def folder(tmp_path):
    """With one run that is whole, and room for another."""
    (tmp_path / "good.json").write_text(GOOD.to_json())
    (tmp_path / "other").mkdir()
    return tmp_path


def flipped(content: bytes, choose: random.Random) -> bytes:
    place, kind = choose.randrange(len(content)), choose.randrange(4)
    inserted = choose.choice([b"\x00", b"\xff", b"\x1b]0;x\x07", b"[" * 5000, b",", b'"', b"\n", b"9" * 300])
    return [
        content[:place],
        content[:place] + bytes([choose.randrange(256)]) + content[place + 1 :],
        content[:place] + inserted + content[place:],
        content[:place] + content[place + choose.randrange(50) :],
    ][kind]


def odd_csv(choose):
    rows = [line.split(",") for line in csv_text().splitlines()]
    row = choose.choice(rows)
    row[choose.randrange(len(row))] = choose.choice(ODD)
    row += [choose.choice(ODD)] * choose.randrange(2)
    return "\n".join(map(",".join, rows)).encode()


def odd_json(choose):
    values = json.loads(json_text())
    holder = values
    while True:
        key = choose.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        inner = holder[key]
        if not isinstance(inner, (dict, list)) or not inner or choose.random() < 0.3:
            break
        holder = inner
    holder[key] = choose.choice([None, -1, 0, 2**63, 10**400, 1.5, float("inf"), True, "x", [], {}, [1], {"x": [None]}])
    return json.dumps(values).encode()


def odd_record(choose):
    row = {"trainer/global_step": 1, "loss": 0.5, **measured_row(1)}
    odd = [None, -1, 10**400, float("nan"), float("inf"), "x", [1], {"a": 1}, True]
    row[choose.choice(list(row))] = choose.choice(odd)
    start = entry(run={"run_id": "abc", "display_name": choose.choice(ODD)})
    return log_of((1, start), (1, entry(history=row)), (1, entry(history=row)[: choose.choice([5, 10**6])]))


KINDS = {
    "csv": ("metrics.csv", odd_csv),
    "json": ("run.json", odd_json),
    "record": ("run-20261101_000000-abc/run-abc.wandb", odd_record),
    "csv bytes": ("metrics.csv", lambda choose: flipped(csv_text().encode(), choose)),
    "json bytes": ("run.json", lambda choose: flipped(json_text().encode(), choose)),
    "log bytes": ("run-20261101_000000-abc/run-abc.wandb", lambda choose: flipped(history((1, 2)), choose)),
    "yaml bytes": ("hparams.yaml", lambda choose: flipped(b"lr: 0.1\nbetas: !!python/tuple [&a 0.9, *a]\n", choose)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_bad_run_does_not_end_the_comparison(kind, folder):
    name, make = KINDS[kind]
    path = folder / "other" / name
    path.parent.mkdir(exist_ok=True)
    (folder / "other" / "metrics.csv").write_text(csv_text())
    if kind not in ("csv", "csv bytes", "yaml bytes"):
        (folder / "other" / "metrics.csv").unlink()
    for number in range(NUM_MUTANTS):
        content = make(random.Random(number))
        path.write_bytes(content)
        start = time.perf_counter()
        try:
            comparison, text = compare_all(folder)
        except Exception as error:
            pytest.fail(f"mutant {number} of {kind}: {type(error).__name__}: {error}")
        assert "good" in {run.name for run in comparison.runs}
        assert not set(text) & {"\x1b", "\x07", "\x00", "\u202e"}
        assert time.perf_counter() - start < 60  # a hang
        if number % 100 == 0:
            write_page(comparison, folder / "page.html", "runs")


@pytest.mark.parametrize("kind", [MemoryReport, Plan, Prediction, Run])
def test_what_is_read_has_the_types_that_it_declares(kind):
    text = {
        MemoryReport: lambda: json.dumps(MemoryReport(peak_bytes=1, step_seconds=0.5).as_dict()),
        Plan: Plan(recipe="lossless", techniques=(), budget=9, budget_bytes=9, baseline_bytes=9, peak_bytes=3).to_json,
        Prediction: Prediction(peak_bytes=3, timeline=Timeline(events=(1,), by_category={"data": (1,)})).to_json,
        Run: json_text,
    }[kind]()
    read = (lambda values: kind.from_json(json.dumps(values))) if kind is Run else kind.from_dict
    values = json.loads(text)
    read(dict(values))
    for name, value in values.items():
        for other in (10**400, "nonsense", -1.5, [3], {"x": [None]}, None, True):
            if isinstance(other, type(value)) or name in ("config", "metrics"):
                continue
            try:
                found = read({**values, name: other})
            except ValueError as error:
                assert "got" in str(error)  # noqa: PT017
            else:
                assert getattr(found, name) == (tuple(other) if isinstance(other, list) else other)
                assert other in (None, -1.5) or isinstance(other, (list, str))


# ---------------------------------------------------------------------- files that hang, or lie elsewhere
def left_out(folder):
    with pytest.warns(UserWarning, match="Left out") as caught:
        (run,) = read_runs([folder])
    assert run.name == "good"
    return str(caught[0].message)


def test_a_pipe_is_no_run(folder):
    os.mkfifo(folder / "other" / "metrics.csv")
    os.mkfifo(folder / "other" / "pipe.json")
    assert "no regular file" in left_out(folder)


def test_a_device_is_no_run(folder):
    (folder / "other" / "metrics.csv").symlink_to("/dev/zero")
    assert "no regular file" in left_out(folder)


def test_references_of_settings_are_counted(folder):
    (folder / "other" / "metrics.csv").write_text(csv_text())
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]
    (folder / "other" / "hparams.yaml").write_text("\n".join(lines))
    assert "more than 20000 values" in left_out(folder)
    (folder / "other" / "hparams.yaml").write_text("a: &a [*a]")
    assert "more than 20000 values" in left_out(folder)
    (folder / "other" / "hparams.yaml").write_text("a: x\n" * 100_000)
    assert "bytes, more than" in left_out(folder)


@pytest.mark.parametrize("place", ["../secret.json", "/dev/zero", "link.json"])
def test_a_table_is_read_inside_of_its_run_alone(place, tmp_path):
    table = {"data": [[1, category, 7] for category in CATEGORIES]}
    folder = tmp_path / "run-20261101_000000-abc"
    (folder / "files").mkdir(parents=True)
    (folder / "secret.json").write_text(json.dumps(table))
    (folder / "files" / "link.json").symlink_to(folder / "secret.json")
    (folder / "files" / "table.json").write_text(json.dumps(table))
    for name, expected in ((place, None), ("table.json", (7,))):
        row = {"trainer/global_step": 1, **measured_row(1), "memsave/timeline_table.path": name}
        (folder / "run-abc.wandb").write_bytes(log_of((1, entry(history=row))))
        (run,) = read_runs([folder])
        found = run.report.timeline
        assert (found and found.by_category["data"]) == expected


def test_names_do_not_steer_the_terminal(folder):
    run = Run(
        name="\x1b]0;title\x07one\u202eeno\u200b",
        report=MemoryReport(peak_bytes=6),
        metrics={"test/acc\x1b[8m": 0.5},
        config={"note\x9b": "\x1b[2J", "list": ["\u2066x"]},
        applied=("a\x00b",),
    )
    (folder / "other" / "run.json").write_text(run.to_json())
    comparison, text = compare_all(folder)
    steering = {"\x1b", "\x07", "\x00", "\x9b", "\u202e", "\u200b", "\u2066"}
    assert not set(text) & steering
    assert not set(repr(comparison)) & steering
    write_page(comparison, folder / "page.html", "runs")
    assert not set((folder / "page.html").read_text("utf-8")) & (steering - {"\u200b"})  # plotly's own has some
    (folder / "other" / "run.json").write_text('{"format": "lightning-memsave run 1", "\x1b[2J": 1}')
    assert "\x1b" not in left_out(folder)
