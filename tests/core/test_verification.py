"""What a comparison of two steps says of a setting's claim."""

from __future__ import annotations

import math

import pytest

from lightning_memsave import Applied, MemoryReport
from lightning_memsave.core.verification import Verification


def verification(loss_class="exact", loss=0.0, gradients=None, buffers=None):
    applied = Applied(technique="x", summary="x", loss_class=loss_class)
    return Verification(
        plain=MemoryReport(peak_bytes=8),
        report=MemoryReport(peak_bytes=4, applied=(applied,)),
        loss_difference=loss,
        gradient_differences=gradients or {},
        buffer_differences=buffers or {},
        tolerance=1e-5,
    )


@pytest.mark.parametrize(
    ("differences", "largest"),
    [
        ({}, 0.0),
        ({"loss": 3.0, "gradients": {"a": 1.0}, "buffers": {"b": 2.0}}, 3.0),
        ({"loss": 1.0, "gradients": {"a": 1.0, "c": 4.0}, "buffers": {"b": 2.0}}, 4.0),
        ({"loss": 1.0, "gradients": {"a": 1.0}, "buffers": {"b": 2.0}}, 2.0),
        ({"gradients": {"a": math.inf}}, math.inf),
    ],
)
def test_the_largest_difference_is_of_loss_gradients_and_buffers(differences, largest):
    assert verification(**differences).largest_difference == largest


@pytest.mark.parametrize("place", ["loss", "gradients", "buffers"])
@pytest.mark.parametrize(
    ("loss_class", "difference", "holds"),
    [
        ("exact", 0.0, True),
        ("exact", 1e-5, True),
        ("exact", 1.1e-5, False),
        ("exact", math.inf, False),
        ("unbiased", 0.5, True),
        ("approximate", 100.0, True),
        ("changed", 1e30, True),
        ("unbiased", math.inf, False),
        ("changed", math.inf, False),
    ],
)
def test_exact_means_within_rounding_and_all_others_finite(loss_class, difference, holds, place):
    found = verification(loss_class, **{place: difference if place == "loss" else {"a": difference}})
    assert found.loss_class == loss_class
    assert found.holds is holds


def test_nothing_applied_claims_to_be_exact():
    made = verification()
    plain = Verification(plain=made.plain, report=made.plain, loss_difference=1e-3, tolerance=1e-5)
    assert plain.loss_class == "exact"
    assert not plain.holds


@pytest.mark.parametrize("loss_class", ["exact", "changed"])
def test_a_loss_that_is_no_number_holds_nothing(loss_class):
    assert not verification(loss_class, loss=math.nan, gradients={"a": 0.0}).holds
