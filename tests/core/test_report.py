from __future__ import annotations

from lightning_memsave import Applied, MemoryReport
from lightning_memsave.core.report import LOSS_CLASSES, worst_loss_class


def test_undo_happens_once_and_keep_forgets_the_way_back():
    calls = []
    applied = Applied(technique="a", summary="s", restore=lambda: calls.append(1))
    applied.undo()
    applied.undo()
    assert calls == [1]
    kept = Applied(technique="a", summary="s", restore=lambda: calls.append(2))
    kept.keep()
    kept.undo()
    assert calls == [1]


def test_the_worst_loss_class_wins_and_brings_its_reasons():
    applied = (
        Applied(technique="a", summary=""),
        Applied(technique="b", summary="", loss_class="unbiased", reasons=("noise",)),
    )
    report = MemoryReport(applied=applied)
    assert report.loss_class == "unbiased"
    assert report.loss_class_reasons == ("noise",)
    assert worst_loss_class(LOSS_CLASSES) == "changed"
    assert worst_loss_class([]) == "exact"


def test_what_was_not_measured_is_none_and_absent_from_metrics():
    report = MemoryReport()
    assert report.factor is None
    assert report.metrics() == {}
    full = MemoryReport(
        peak_bytes=4, by_category={"data": 4}, workspace_bytes=1, reserved_bytes=8, baseline_peak_bytes=8,
        baseline_source="measured", microbatch_size=2, step_seconds=0.5,
    )  # fmt: skip
    assert full.metrics() == {
        "memsave/peak_bytes": 4,
        "memsave/peak_data_bytes": 4,
        "memsave/workspace_bytes": 1,
        "memsave/reserved_bytes": 8,
        "memsave/factor": 2.0,
        "memsave/microbatch_size": 2,
        "memsave/step_seconds": 0.5,
    }


def measured(**changed):
    figures = {"peak_bytes": 2**20, "by_category": {"weights": 2**18, "activations": 3 * 2**18}}
    return MemoryReport(**{**figures, **changed})


def test_printed_a_report_is_a_table_of_before_and_after():
    report = measured(
        baseline_peak_bytes=2**22, baseline_source="predicted", step_seconds=1.08, baseline_step_seconds=1.0,
        baseline_by_category={"weights": 2**18, "activations": 2**22 - 2**18},
        next_setting='checkpointing="sqrt"', next_peak_bytes=2**19,
    )  # fmt: skip
    assert str(report).splitlines() == [
        "peak 1.0 MiB instead of 4.0 MiB, 4.00x less (baseline predicted) | exact | step +8%",
        "weights          256.0 KiB ->  256.0 KiB  ██",
        "activations        3.8 MiB ->  768.0 KiB  █████░░░░░░░░░░░░░░░░░░░",
        "exact: plain Lightning's result, but for rounding",
        'next: checkpointing="sqrt" (predicted: 512.0 KiB)',
    ]


def test_printed_a_report_without_baseline_has_what_was_measured():
    assert str(MemoryReport()).startswith("no step was measured: ")
    assert str(measured()).splitlines()[0] == "peak 1.0 MiB | exact"


def test_what_is_not_worth_its_time_is_said():
    slow = {"step_seconds": 1.6, "baseline_step_seconds": 1.0}
    worth = measured(baseline_peak_bytes=2**21, baseline_source="measured", **slow)
    assert "not worth it" not in str(worth)
    little = measured(baseline_peak_bytes=round(1.12 * 2**20), baseline_source="measured", **slow)
    assert "not worth it here: 1.12x less memory for 1.60x the time of a step" in str(little)
    more = measured(baseline_peak_bytes=round(0.98 * 2**20), baseline_source="measured")
    assert "these settings take more memory than plain Lightning here" in str(more)
