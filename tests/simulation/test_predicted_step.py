"""Predictions as data, and what a device must have for them."""

from __future__ import annotations

import json
import math

import pytest

from lightning_memsave.core.report import CATEGORIES, Timeline
from lightning_memsave.core.units import GIB, MIB
from lightning_memsave.measuring.allocation_trace import Allocations
from lightning_memsave.measuring.module_attribution import TopTensor
from lightning_memsave.simulation import predicted_step
from lightning_memsave.simulation.predicted_step import CudaBytes, Prediction, on_cuda, prediction_of

TOP = TopTensor(
    num_bytes=8, count=2, shape=(1,), dtype="float32", category="data", line="a/b.py:3 step", module="(batch)"
)
FULL = Prediction(
    peak_bytes=9,
    workspace_bytes=4,
    by_category={"weights": 1, "data": 8},
    by_module={"(batch)": 8, "head": 1},
    timeline=Timeline(events=(0, 1), by_category={name: (0, 1) for name in CATEGORIES}),
    top=(TOP,),
    source="measured",
    flags=("a guess",),
    seconds=0.5,
    is_timed=True,
    num_operations=7,
    cuda=CudaBytes(allocated_bytes=512, reserved_bytes=2 * MIB, context_bytes=(1, 2)),
)


@pytest.mark.parametrize("made", [FULL, Prediction(peak_bytes=0)])
def test_a_prediction_is_data_both_ways(made):
    again = Prediction.from_dict(json.loads(made.to_json()))
    assert again == made
    assert again.as_dict() == made.as_dict()


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"peak_bytes": "9"}, "prediction.peak_bytes"),
        ({"source": "guessed"}, "prediction.source"),
        ({"cuda": {"allocated_bytes": 1}}, "prediction.cuda.reserved_bytes"),
        ({"top": [{**TOP.__dict__, "count": 1.5}]}, "prediction.top.0.count"),
        ({"timeline": {"events": ["0"], "by_category": {}}}, "prediction.timeline.events.0"),
        ({"by_category": {"data": None}}, "prediction.by_category.data"),
        ({"more": 1}, "prediction"),
    ],
)
def test_what_is_no_prediction_is_refused_by_its_place(change, place):
    with pytest.raises(ValueError, match=f"`{place}`"):
        Prediction.from_dict({**json.loads(FULL.to_json()), **change})


def test_on_cpu_the_peak_is_what_is_needed():
    made = Prediction(peak_bytes=100, workspace_bytes=50)
    assert made.needed_bytes == (100, 100)
    assert [made.fits(size) for size in (99, 100, 101)] == [False, True, True]


def test_on_cuda_the_context_leaves_a_range_where_nobody_knows():
    made = Prediction(peak_bytes=1, cuda=CudaBytes(allocated_bytes=5, reserved_bytes=1000, context_bytes=(10, 30)))
    assert made.needed_bytes == (1010, 1030)
    assert [made.fits(size) for size in (1009, 1010, 1029, 1030)] == [False, None, None, True]


def test_seconds_count_where_they_were_taken():
    assert Prediction(peak_bytes=1, seconds=0.5).measured_seconds == math.inf
    assert Prediction(peak_bytes=1, is_timed=True).measured_seconds == math.inf
    assert Prediction(peak_bytes=1, seconds=0.5, is_timed=True).measured_seconds == 0.5


STEP = Allocations(
    held=(100, 30),
    changes=((40, 2), (500, 3), (-500, 3), (200, 4), (-40, 2), (60, 5)),
    labels=(
        ("weights", "body"),
        ("data", "(batch)"),
        ("activations", "body"),
        ("temporary", "head"),
        ("gradients", "(backward)"),
        ("activations", "head"),
    ),
)


def test_a_step_amounts_to_its_highest_moment():
    made = prediction_of(STEP, {}, seconds=2.0, flags=("x",))
    assert made.peak_bytes == 100 + 30 + 40 + 500
    assert made.by_category == {
        **dict.fromkeys(CATEGORIES, 0),
        "weights": 100,
        "data": 30,
        "activations": 40,
        "temporary": 500,
    }
    assert list(made.by_module.items()) == [("head", 500), ("body", 140), ("(batch)", 30)]
    assert made.timeline.total_bytes == (130, 170, 670, 170, 370, 330, 390)
    assert (made.cuda, made.seconds, made.flags) == (None, 2.0, ("x",))
    assert sum(made.by_module.values()) == sum(made.by_category.values()) == made.peak_bytes


def test_modules_that_repeat_each_other_are_counted_together():
    labels = (("weights", "a.0"), ("weights", "a.1"), ("activations", "a.1"), ("data", "(batch)"))
    made = prediction_of(Allocations((1, 2, 4, 8), (), labels), {"a.0": "a.*", "a.1": "a.*"})
    assert made.by_place == {"(batch)": {"data": 8}, "a.*": {"weights": 3, "activations": 4}}
    assert made.by_module == {"(batch)": 8, "a.1": 6, "a.0": 1}


def test_on_cuda_small_blocks_are_rounded_to_512_and_taken_from_one_segment(monkeypatch):
    monkeypatch.setattr(predicted_step, "cublas_workspaces", lambda: ())
    made = prediction_of(STEP, {}, has_cuda=True)
    assert made.cuda == on_cuda(STEP)
    assert made.cuda.allocated_bytes == 4 * 512
    assert made.cuda.reserved_bytes == 2 * MIB
    assert 0 < made.cuda.context_bytes[0] < made.cuda.context_bytes[1] < 2 * GIB
    large = Allocations((3 * MIB,), ((3 * MIB, 1), (30 * MIB, 2), (-30 * MIB, 2), (-3 * MIB, 1)), (("data", ""),) * 3)
    assert on_cuda(large).allocated_bytes == 36 * MIB
    assert on_cuda(large).reserved_bytes == (20 + 30) * MIB
