from __future__ import annotations

import pytest

from lightning_memsave import Applied, MemoryReport
from lightning_memsave.core.report import LOSS_CLASSES, worst_loss_class
from lightning_memsave.core.units import format_bytes


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


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**20, "1.0 MiB"), (3 * 2**30, "3.0 GiB"), (-2048, "-2.0 KiB")],
)
def test_units(num_bytes, text):
    assert format_bytes(num_bytes) == text
