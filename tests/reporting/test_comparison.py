"""Which metric is quality, which runs are on the front, and what JSON says."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from lightning_memsave import MemoryReport
from lightning_memsave.reporting.comparison import compare
from lightning_memsave.reporting.runs import Run


def run(name, peak_bytes=None, config=None, baseline=None, **metrics):
    report = MemoryReport(
        peak_bytes=peak_bytes,
        by_category={} if peak_bytes is None else {"weights": peak_bytes},
        baseline_peak_bytes=baseline,
        baseline_source=None if baseline is None else "measured",
    )
    return Run(name=name, report=report, metrics=metrics, config=config or {})


def beaten(points, lower):
    """The slow referee: a run is beaten when another is at least as good in both and better in one."""
    out = set()
    for i, (peak, value) in enumerate(points):
        for other_peak, other in points:
            no_worse = other <= value if lower else other >= value
            if other_peak <= peak and no_worse and (other_peak, other) != (peak, value):
                out.add(i)
    return out


@pytest.mark.parametrize("better", ["higher", "lower"])
@pytest.mark.parametrize(
    "points",
    [
        [(10, 0.5)],
        [(10, 0.5), (10, 0.5)],
        [(10, 0.5), (10, 0.6), (9, 0.6)],
        [(1, 0.1), (2, 0.3), (3, 0.2), (4, 0.9), (5, 0.9), (5, 0.1)],
        [(1 + (7 * i) % 11, (5 * i) % 13) for i in range(40)],
    ],
)
def test_front_is_what_nothing_beats(points, better):
    runs = [run(str(i), peak, quality=float(value)) for i, (peak, value) in enumerate(points)]
    front = compare(runs, "quality", better).front
    assert set(front) == set(range(len(points))) - beaten(points, better == "lower")
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)


def test_runs_without_peak_or_quality_are_not_on_the_front():
    runs = [run("a", 5, acc=0.5), run("b", None, acc=0.9), run("c", 1), run("d", 1, acc=math.nan)]
    comparison = compare(runs)
    assert comparison.front == (0,)
    (quality,) = [row for row in comparison.rows if row.heading == "acc"]
    assert quality.texts == ("0.5", "0.9", "n/a", "n/a")


@pytest.mark.parametrize(
    ("metrics", "chosen", "lower"),
    [
        (["train/loss", "val/loss"], "val/loss", True),
        (["val_loss", "val_acc", "train_acc"], "val_acc", False),
        (["val/accuracy", "test/accuracy"], "test/accuracy", False),
        (["test_perplexity", "train_perplexity"], "test_perplexity", True),
        (["MulticlassAccuracy/val/accuracy"], "MulticlassAccuracy/val/accuracy", False),
        (["grad_norm", "glossary"], None, None),
        ([], None, None),
    ],
)
def test_quality_is_chosen_by_its_name(metrics, chosen, lower):
    quality = compare([run("a", 1, **dict.fromkeys(metrics, 0.5))]).quality
    assert (quality and quality.name) == chosen
    assert (quality and quality.lower_is_better) == lower


def test_direction_can_be_said():
    quality = compare([run("a", 1, score_loss=1.0)], "score_loss", "higher").quality
    assert quality.direction == "higher is better"


def test_unknown_metric_names_those_that_are_there():
    with pytest.raises(ValueError, match=r"`metric` must be .*, got 'speed'\. There are \['acc', 'loss'\]\."):
        compare([run("a", 1, acc=0.5), run("b", 1, loss=0.5)], "speed")


def test_first_run_is_the_baseline_of_those_without():
    comparison = compare([run("a", 100), run("b", 50), run("c", 50, baseline=1000), run("d")])
    assert [each.report.factor for each in comparison.runs] == [1.0, 2.0, 20.0, None]
    assert [each.report.factor for each in compare([run("a"), run("b", 50)]).runs] == [None, None]


PLAIN = {"memsave": {"recipe": "measure", "every": 200}}


def test_a_run_that_changes_nothing_is_the_baseline_wherever_it_stands():
    comparison = compare([run("a", 50), run("b", 200, PLAIN), run("c", 100, PLAIN), run("d", 20)])
    assert [each.report.factor for each in comparison.runs] == [4.0, 1.0, 1.0, 10.0]
    timed = [
        replace(each, report=replace(each.report, step_seconds=s))
        for each, s in zip(comparison.runs, (3.0, 2.0, 9.0, 1.0), strict=True)
    ]
    assert next(row.values for row in compare(timed).rows if row.key == "step_time_ratio") == (1.5, 1.0, 4.5, 0.5)
    alone = compare([run("a", 200, PLAIN)]).runs[0].report
    assert (alone.factor, alone.baseline_source) == (1.0, "measured")


NO_BASELINE = 'No baseline: add one by training once with `MemSave("measure")` and naming that run first.'


@pytest.mark.parametrize(
    ("runs", "is_known"),
    [
        ([run("plain, by CSV"), run("a", 50)], False),
        ([run("a", 50)], False),
        ([run("plain, by CSV"), run("a", 50, baseline=100)], True),
        ([run("a", 100), run("b", 50)], True),
        ([run("plain, by CSV"), run("a", 50), run("b", 100, PLAIN)], True),
    ],
)
def test_without_a_baseline_one_sentence_stands_for_the_factors(runs, is_known):
    comparison = compare(runs)
    assert ("factor" in [row.heading for row in comparison.rows]) == is_known
    assert (NO_BASELINE in comparison.notes) == (not is_known)


def test_a_run_without_a_peak_has_no_baseline():
    assert compare([run("a", 100), run("b")]).runs[1].report.baseline_peak_bytes is None


@pytest.mark.parametrize(
    ("runs", "is_once"),
    [
        ([run("a", 2, {"lr": 1}, acc=0.5), run("b", 1, {"lr": 2}, acc=0.5)], True),
        ([run("a", 2, {"lr": 1, "seed": 0}, acc=0.5), run("b", 1, {"lr": 1, "seed": 1}, acc=0.5)], False),
        ([run("a", 2, {"seed": 0}, acc=0.5), run("b", 1, {"speed": 1}, acc=0.5)], True),
        ([run("plain", acc=0.5), run("plain (2)", acc=0.6)], False),
        ([run("a", acc=0.5), run("b", acc=0.6)], True),
        ([run("a", 2, acc=0.5), run("b", 1)], False),
        ([run("a", 2), run("b", 1)], False),
    ],
)
def test_where_each_setting_was_run_once_the_noise_is_said_to_be_unknown(runs, is_once):
    note = "Each setting was run once, with one seed, so whether differences in acc are more than noise is not known."
    assert (note in compare(runs).notes) == is_once


def test_equal_settings_are_not_listed():
    settings = {"a": {"b": 1, "c": None}, "d": [1, 2]}
    others = {"a": {"b": 2}, "d": [1, 2], "e": {}}
    assert compare([run("x", 1, settings), run("y", 1, others)]).differences == {"a.b": ("1", "2"), "e": ("", "{}")}


def test_json_has_every_figure_as_measured():
    text = compare([run("<a>", 2**24 + 1, acc=1 / 3), run("b", acc=math.inf)]).to_json()
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    first, second = document["runs"]
    assert document["quality"] == {"metric": "acc", "better": "higher is better"}
    assert first["name"] == "<a>"
    assert first["peak_bytes"] == first["weights_bytes"] == 2**24 + 1
    assert first["acc"] == 1 / 3
    assert first["on_front"] is True
    assert second["peak_bytes"] is second["acc"] is second["factor"] is None


def test_quality_is_what_most_runs_have_logged():
    runs = [run(str(i), peak_bytes=i, **{"val/accuracy": 0.5}) for i in range(1, 4)]
    runs.append(run("4", peak_bytes=4, **{"val/accuracy": 0.5, "test/accuracy": 0.9}))
    assert compare(runs).quality.name == "val/accuracy"
    assert compare(runs[3:]).quality.name == "test/accuracy"
