"""The benchmarks of predictions and of budgets, again: what their tables claim holds for the code as it is."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from benchmarks.memory_time import bench_planner, bench_prediction

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


ROWS_OF_TABLES_ARE_READ = [("byte GPT", "everything")]
"""A sparse embedding makes only the rows dense that a batch names; shapes do not tell which."""


def rows(name):
    with (ROOT / "benchmarks" / "results" / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("model", "setting"), [(row["model"], row["setting"]) for row in rows("prediction")])
def test_predicted_peaks_are_within_one_per_cent(model, setting):
    found = bench_prediction.row(model, setting)
    assert abs(found["error_percent"]) <= (1.5 if (model, setting) in ROWS_OF_TABLES_ARE_READ else 1)


@pytest.mark.parametrize(
    ("model", "recipe", "budget"), [(row["model"], row["setting"], row["budget"]) for row in rows("planner")]
)
def test_budgets_are_kept_and_what_a_refusal_names_is_enough(model, recipe, budget):
    make, batch = bench_planner.subjects()[model]
    row, found = bench_planner.honesty_row(model, make, batch, budget, recipe)
    if isinstance(found, int):
        row, _ = bench_planner.honesty_row(model, make, batch, found, recipe)
    assert row["within_budget"]
