"""Texts for people: what grew, what was alive, how a plan turned out; the figures in them add up."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_memsave import MemoryReport
from lightning_memsave.core.remedies import remedies_for
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.core.units import MIB
from lightning_memsave.measuring.leak_detection import Growth, HeldTensors
from lightning_memsave.measuring.ledger import Measurement
from lightning_memsave.measuring.live_tensors import Alive
from lightning_memsave.planner.plan import Plan
from lightning_memsave.reporting.messages import growth_text, miss_text, outcome, post_mortem_text


def kind(category, num_bytes, where="head", count=2):
    return Alive(category=category, where=where, shape=(4, 8), dtype=torch.bfloat16, count=count, num_bytes=num_bytes)


KINDS = [
    kind("activations", 6 * MIB, "kept by ExpBackward0 after blocks.*"),
    kind("optimizer_state", 2 * MIB),
    kind("activations", 2 * MIB),
    kind("other", MIB, "held by Python"),
]


def post_mortem(kinds=KINDS, applied=(), fixed=(), measured=None, error="no more memory\nsecond line"):
    return post_mortem_text(kinds, applied, fixed, measured, error)


# ---------------------------------------------------------------------- out of memory
def test_what_was_alive_is_summed_by_category_and_listed():
    text = post_mortem()
    first, second, *_ = text.splitlines()
    assert first == "memsave: out of memory. no more memory"
    assert second == "Alive now: 11.0 MiB in tensors (activations 8.0 MiB, optimizer state 2.0 MiB, other 1.0 MiB)."
    assert "\n     6.0 MiB  activations, kept by ExpBackward0 after blocks.*: 2 x bfloat16 [4, 8]\n" in text
    assert "second line" not in text


def test_small_kinds_are_counted_together_and_no_byte_is_lost():
    kinds = [kind("data", (20 - i) * MIB, f"place {i}") for i in range(20)]
    lines = post_mortem(kinds).splitlines()
    shown = [line for line in lines if ", place " in line]
    assert len(shown) == 12
    (rest,) = [line for line in lines if line.endswith("smaller kinds")]
    assert rest.split() == [f"{sum(range(1, 9))}.0", "MiB", "8", "smaller", "kinds"]
    assert f"Alive now: {sum(range(1, 21))}.0 MiB" in lines[1]


def test_what_would_help_is_in_the_order_of_what_is_alive():
    lines = post_mortem().splitlines()
    advice = lines[lines.index("What would help, with what it works on:") + 1 :]
    expected = [("8.0 MiB  activations", "activations"), ("2.0 MiB  optimizer state", "optimizer_state")]
    assert [line.strip() for line in advice] == [
        f"{begin}: {remedy}" for begin, category in expected for remedy in remedies_for(category, ())
    ]


def test_what_is_on_or_refused_is_not_advised():
    text = post_mortem(applied=["checkpointing"], fixed=["manual optimization"])
    assert "`checkpointing=" not in text
    assert "optimizer_state=" in post_mortem()
    assert "optimizer_state=" not in post_mortem(applied=["optimizer_state"])


def test_lines_of_the_highest_step_are_told_where_one_was_measured():
    by_line = {f"net.py:{i} forward": (30 - i) * MIB for i in range(15)}
    text = post_mortem(measured=Measurement(peak_bytes=600 * MIB, by_line=by_line))
    assert "Highest measured step: 600.0 MiB. Its peak was made at:" in text
    assert [f"net.py:{i} forward" in text for i in range(15)] == [True] * 12 + [False] * 3
    assert "Highest measured step" not in post_mortem(measured=Measurement(peak_bytes=3))
    assert post_mortem([]).splitlines()[1] == "Alive now: 0 B in tensors ()."


# ---------------------------------------------------------------------- growth
def test_growth_of_a_peak_names_the_lines():
    growth = Growth(what="peak", figures_bytes=(MIB, 2 * MIB, 4 * MIB), by_line=(("net.py:3 forward", 3 * MIB),))
    first, second = growth_text(growth).splitlines()
    assert "the peak has grown in each of the last 3 measured steps: 1.0 MiB -> 2.0 MiB -> 4.0 MiB." in first
    assert second == "  3.0 MiB more made at net.py:3 forward"


def test_growth_of_what_is_held_names_the_tensors_and_what_lets_go():
    tensors = tuple(
        HeldTensors(count=4, num_bytes=(30 - i) * MIB, shape=(i, 2), dtype=torch.float32, line=f"net.py:{i} step")
        for i in range(20)
    )
    lines = growth_text(Growth(what="held", figures_bytes=(MIB, 2 * MIB), tensors=tensors)).splitlines()
    assert "1.0 MiB -> 2.0 MiB" in lines[0]
    assert lines[1] == "  4 x float32 [0, 2], 30.0 MiB, made at net.py:0 step"
    assert len(lines) == 1 + 12 + 1
    assert ".detach()" in lines[-1]


# ---------------------------------------------------------------------- predictions and plans
def report(peak, predicted=None):
    weights = {**dict.fromkeys(CATEGORIES, 0), "weights": predicted}
    return MemoryReport(
        peak_bytes=peak,
        by_category={"weights": peak},
        predicted_peak_bytes=predicted,
        predicted_by_category={} if predicted is None else weights,
    )


def test_a_miss_is_explained_where_it_is_much():
    assert miss_text(report(100 * MIB)) is None
    assert miss_text(MemoryReport(predicted_peak_bytes=5, predicted_by_category={"data": 5})) is None
    close = miss_text(report(102 * MIB, 100 * MIB))
    assert close == "memsave: peak predicted 100.0 MiB, measured 102.0 MiB (+2.0%)."
    far = miss_text(report(150 * MIB, 100 * MIB))
    assert (
        far == "memsave: peak predicted 100.0 MiB, measured 150.0 MiB (+50.0%): 50.0 MiB too little weights predicted."
    )
    below = miss_text(report(50 * MIB, 100 * MIB))
    assert below.endswith("(-50.0%): 50.0 MiB too much weights predicted.")


PLAN = Plan(
    recipe="lossless", techniques=(), budget="10MiB", budget_bytes=10 * MIB, baseline_bytes=45 * MIB,
    baseline_by_category={"weights": 10 * MIB, "activations": 30 * MIB}, peak_bytes=8 * MIB,
    by_category={"weights": 2 * MIB, "activations": 6 * MIB}, workspace_bytes=MIB,
)  # fmt: skip


def test_a_plan_without_a_measured_step_tells_what_was_predicted():
    text = outcome(PLAN, MemoryReport())
    assert "budget 10.0 MiB: plain step 40.0 MiB predicted, planned step 8.0 MiB predicted" in text
    assert text.endswith("no step was measured.")


def test_a_plan_that_was_measured_names_what_limits_it():
    split = {"weights": 2 * MIB, "activations": 6 * MIB}
    made = MemoryReport(peak_bytes=8 * MIB, by_category=split, baseline_peak_bytes=40 * MIB)
    text = outcome(PLAN, made)
    assert "8.0 MiB measured (+0.0%) and 1.0 MiB in kernels, 5.00x below the plain step" in text
    assert text.endswith("limited by activations (75% of the peak).")
    off = MemoryReport(peak_bytes=12 * MIB, by_category={"weights": 2 * MIB, "activations": 10 * MIB})
    assert "12.0 MiB measured (+50.0%: 4.0 MiB too little activations predicted)" in outcome(PLAN, off)
    beyond = replace(made, evaluation_peak_bytes=PLAN.budget_bytes + 2**20)
    validation = "Validation took 11.0 MiB, more than the budget."
    assert outcome(PLAN, beyond) == f"{text} {validation}"
    assert outcome(PLAN, replace(made, evaluation_peak_bytes=PLAN.budget_bytes)) == text
