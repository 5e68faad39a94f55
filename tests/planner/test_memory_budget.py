"""Budgets as a user writes them, and what a step needs of one."""

from __future__ import annotations

import pytest

from lightning_memsave import MemSave
from lightning_memsave.planner.memory_budget import Budget, machine_bytes, needed_bytes
from lightning_memsave.simulation.predicted_step import CudaBytes, Prediction


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("8GiB", 8 * 2**30),
        (512, 512),
        ("60%", 1200),
        ("0.25x", 100),
        (" 1x ", 400),
        ("100%", 2000),
        ("2.5 MB", 2500000),
    ],
)
def test_a_budget_is_bytes_of_the_device_or_of_the_plain_step(text, num_bytes):
    assert Budget(text).in_bytes(400, 2000) == num_bytes


@pytest.mark.parametrize("text", ["0%", "101%", "1.5x", "0x", -1, 0, "much", 0.5, True, "x", None])
def test_other_budgets_are_refused_by_name(text):
    with pytest.raises(ValueError, match=r"`budget` must be"):
        MemSave(budget=text) if text is not None else Budget(text)


def test_a_percentage_needs_a_device_that_tells_its_memory():
    with pytest.raises(ValueError, match="does not tell its memory"):
        Budget("60%").in_bytes(400, None)
    assert machine_bytes() > 2**28


@pytest.mark.parametrize("value", ["8G", 0.5, "0.5", -1, "much"])
def test_a_budget_that_is_none_is_refused_with_the_ways_to_say_it(value):
    with pytest.raises(ValueError, match=r'budget.*"8GiB", "50%" or "0.5x"'):
        Budget(value)


def test_what_is_needed_is_what_the_budget_means():
    assert needed_bytes(Prediction(peak_bytes=10, workspace_bytes=3)) == 13
    cuda = CudaBytes(allocated_bytes=10, reserved_bytes=20)
    assert needed_bytes(Prediction(peak_bytes=10, cuda=cuda)) == 20
