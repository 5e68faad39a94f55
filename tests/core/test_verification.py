"""What a comparison of two steps says of a setting's claim."""

from __future__ import annotations

import math

import pytest

from lightning_memsave import Applied, MemoryReport
from lightning_memsave.core.verification import Noise, Verification


def verification(loss_class="exact", loss=0.0, gradients=None, buffers=None, noise=None):
    applied = Applied(technique="x", summary="x", loss_class=loss_class)
    return Verification(
        plain=MemoryReport(peak_bytes=8),
        report=MemoryReport(peak_bytes=4, applied=(applied,)),
        loss_difference=loss,
        gradient_differences=gradients or {},
        buffer_differences=buffers or {},
        tolerance=1e-5,
        noise=noise,
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
    assert found.holds is (holds and (loss_class, place) != ("unbiased", "loss"))  # its noise is in backward alone


def noise(mean_size, chance, size=0.2):
    return Noise(codecs=("int4",), num_draws=4, size=size, mean_size=mean_size, chance=chance)


@pytest.mark.parametrize(
    ("found", "bias"),
    [(noise(0.2, 0), 0.2), (noise(0.1, 1), 0.0), (noise(0.05, 1), 0.0), (noise(0.15, 0), (0.05 / 3) ** 0.5)],
)
def test_the_bias_is_what_the_mean_has_beyond_the_noise_over_the_root_of_the_draws(found, bias):
    assert found.bias == pytest.approx(bias, abs=1e-9)


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        (noise(0.1, 0.5), True),
        (noise(0.2, 1e-3), True),
        (noise(0.2, 1e-9), False),
        (noise(1e-5, 1e-9, size=1.5e-5), True),  # a bias below what rounding alone may make
        (noise(math.nan, math.nan, size=math.nan), False),
    ],
)
def test_unbiased_means_that_the_mean_is_off_by_chance_or_rounding_alone(found, holds):
    assert verification("unbiased", gradients={"a": 0.2}, noise=found).holds is holds
    assert verification("approximate", gradients={"a": 0.2}, noise=found).holds


def test_nothing_applied_claims_to_be_exact():
    made = verification()
    plain = Verification(plain=made.plain, report=made.plain, loss_difference=1e-3, tolerance=1e-5)
    assert plain.loss_class == "exact"
    assert not plain.holds


@pytest.mark.parametrize("loss_class", ["exact", "changed"])
def test_a_loss_that_is_no_number_holds_nothing(loss_class):
    assert not verification(loss_class, loss=math.nan, gradients={"a": 0.0}).holds
