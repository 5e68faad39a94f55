"""What rows are made, kept and compared with."""

from __future__ import annotations

import csv
import dataclasses
import doctest
import math
import re
from pathlib import Path

import pytest
from scipy import stats

from benchmarks import run
from benchmarks.harness import measurement, paired, parts
from benchmarks.models.generated import fractals, german_numbers
from benchmarks.models.papers import dynamicconv
from benchmarks.tables import record_tables

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(measurement, "RESULTS", tmp_path)
    return tmp_path


def test_a_row_takes_the_place_of_the_one_with_its_key(results):
    for setting, value in (("a", 1), ("b", 2), ("a", 3)):
        measurement.put_row("x", {"setting": setting, "value": value}, ("setting",))
    measurement.put_row("x", {"setting": "c", "value": 4, "more": 5}, ("setting",))
    found = measurement.read_rows("x")
    assert [(row["setting"], row["value"], row["more"]) for row in found] == [
        ("a", "3", ""),
        ("b", "2", ""),
        ("c", "4", "5"),
    ]
    assert measurement.read_rows("y") == []


def test_a_row_says_where_it_comes_from():
    environment = measurement.environment()
    assert re.fullmatch(r"[0-9a-f]{10}\+?", environment["commit"])
    assert {"date", "device", "torch", "lightning", "python"} < set(environment)


def test_the_interval_is_that_of_a_paired_t_test():
    values, baseline = [90.1, 88.0, 91.5, 89.9], [90.5, 88.9, 91.2, 90.6]
    comparison = paired.compare_pairs(values, baseline)
    referee = stats.ttest_rel(values, baseline, alternative="greater").confidence_interval(0.95)
    assert comparison.lower_bound == pytest.approx(referee.low, rel=1e-12)
    assert comparison.num_pairs == 4


def test_one_pair_shows_nothing():
    comparison = paired.compare_pairs([91.0], [90.0])
    assert comparison.half_width == math.inf
    assert comparison.verdict(0.4, 0.2) == "not shown"


def test_pairs_must_be_pairs():
    with pytest.raises(ValueError, match="must be pairs, got 2 and 1"):
        paired.compare_pairs([1.0, 2.0], [1.0])


def make_study(train):
    settings = {"baseline": {}, "lean": {"microbatch": 1}}
    return parts.Study(name="wrn_quality", model="m", settings=settings, size={"epochs": 2}, train=train)


def test_a_study_goes_on_where_it_stopped(results, monkeypatch):
    monkeypatch.setattr("sys.argv", ["quality", "--parts", "3"])
    seen = []

    def train(seed, arguments):
        seen.append((seed, arguments))
        return {"quality_value": 90.0 + seed - len(arguments), "cpu_seconds_run": 0.1}

    make_study(train).main()
    assert seen == [(0, {}), (0, {"microbatch": 1}), (1, {})]
    make_study(train).main()
    assert seen[3:] == [(1, {"microbatch": 1}), (2, {}), (2, {"microbatch": 1})]
    (line,) = make_study(train).summary()
    assert line == "lean: -1.00, half-width 0.00, 3 pairs: worse by more than 0.4 is not excluded"


def test_a_study_with_a_number_of_seeds_ends_and_its_rows_say_how_many_runs_it_has(results, monkeypatch):
    monkeypatch.setattr("sys.argv", ["quality", "--parts", "9"])
    study = make_study(lambda seed, arguments: {"quality_value": 90.0, "cpu_seconds_run": 0.1})
    dataclasses.replace(study, num_seeds=2).main()
    assert [(row["seed"], row["runs_planned"]) for row in study.rows()] == [("0", "4")] * 2 + [("1", "4")] * 2


def test_a_table_says_what_is_missing_and_whether_the_baseline_has_converged():
    def row(setting, seed, value, before):
        about = {"setting": setting, "seed": seed, "epochs": "2", "runs_planned": "4", "quality": "accuracy"}
        values = {"peak_bytes": "8", "quality_value": value, "quality_value_at_three_quarters": before}
        return about | values

    found = [row("baseline", "0", "90.5", "90.25"), row("lean", "0", "90.0", "80.0"), row("baseline", "1", "90", "90")]
    text = record_tables._study("wrn_quality", found, ("epochs",))
    assert text.startswith(
        "accuracy; 2 epochs: Partial, 3 of 4 runs. "
        "The last quarter of the steps gained the baseline 0.12; it has converged.\n\n|"
    )
    found.append(row("lean", "1", "91", "0"))
    found[0]["quality_value_at_three_quarters"] = "80"
    text = record_tables._study("wrn_quality", found, ("epochs",))
    assert text.startswith(
        "accuracy; 2 epochs: The last quarter of the steps gained the baseline 5.25; 0.3 would be converged.\n\n|"
    )


def test_a_study_of_some_settings(results, monkeypatch):
    monkeypatch.setattr("sys.argv", ["quality", "--parts", "2", "--only", "lean"])
    seen = []

    def train(seed, arguments):
        seen.append((seed, arguments))
        return {"quality_value": 90.0, "cpu_seconds_run": 0.1}

    make_study(train).main()
    assert seen == [(0, {"microbatch": 1}), (1, {"microbatch": 1})]


@pytest.mark.parametrize(
    ("quality", "peak_bytes", "complaint"),
    [
        (90.0, 7, None),
        (92.8, 7, None),  # baselines 90 and 92 scatter by 1.41
        (92.9, 7, "wrn_quality: seed 0, baseline: +2.9 of 2.8"),
        (90.0, 8, "wrn_quality: seed 0, baseline: +0 of 2.8"),
    ],
)
def test_a_run_that_is_made_again_is_held_against_its_row(results, monkeypatch, quality, peak_bytes, complaint):
    def train(seed, arguments):
        return {"quality_value": 90.0 + 2 * seed, "peak_bytes": 7, "cpu_seconds_run": 0.1}

    monkeypatch.setattr("sys.argv", ["quality", "--parts", "4"])
    make_study(train).main()
    again = make_study(lambda seed, arguments: {"quality_value": quality, "peak_bytes": peak_bytes})
    before = again.rows()
    monkeypatch.setattr("sys.argv", ["quality", "--again", "1"])
    with pytest.raises(SystemExit) as ended:
        again.main()
    assert ended.value.code == complaint
    assert again.rows() == before


def test_a_part_that_fails_leaves_the_others(results, monkeypatch):
    monkeypatch.setattr("sys.argv", ["quality", "--parts", "2"])

    def train(seed, arguments):
        if arguments:
            raise KeyboardInterrupt
        return {"quality_value": 1.0, "cpu_seconds_run": 0.1}

    with pytest.raises(KeyboardInterrupt):
        make_study(train).main()
    assert next(make_study(train).missing(["lean"])) == (0, "lean")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.csv")), ids=lambda path: path.stem)
def test_rows_are_told_apart(path):
    with path.open() as file:
        keys = [run._key(row) for row in csv.DictReader(file)]
    assert keys
    assert len(set(keys)) == len(keys)


def test_bytes_that_differ_from_the_commit_are_named():
    row = {"model": "m", "setting": "s", "microbatch": "4", "peak_bytes": "1000", "cpu_time_ratio": "1.0"}
    assert run.differences([row], [{**row, "cpu_time_ratio": "2.0"}]) == []
    assert run.differences([row], [row, {**row, "microbatch": "5", "peak_bytes": "7"}]) == []  # a new row
    assert run.differences([row], []) == ["m s 4: no row any more"]
    assert run.differences([row], [{**row, "peak_bytes": "1001"}]) == ["m s 4: peak_bytes 1001, committed 1000"]
    plan = {"model": "m", "setting": "lossless", "budget": "0.5x", "budget_bytes": "9", "peak_bytes": "8"}
    assert run.differences([plan], [{**plan, "peak_bytes": "9"}]) == []  # another plan, that keeps its budget too
    assert run.differences([plan], [{**plan, "peak_bytes": "10"}]) == [
        "m lossless 0.5x 9: peak_bytes 10 is over the budget"
    ]
    allocated = {**row, "allocated_bytes": "2000"}
    assert run.differences([allocated], [{**allocated, "allocated_bytes": "2010"}]) == []
    assert len(run.differences([allocated], [{**allocated, "allocated_bytes": "2011"}])) == 1


@pytest.mark.parametrize("module", [paired, run, fractals, german_numbers, dynamicconv])
def test_examples_in_docstrings_hold(module):
    tried = doctest.testmod(module)
    assert tried.attempted
    assert not tried.failed
