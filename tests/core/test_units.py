"""Bytes as text, and text as bytes."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memsave.core.units import GIB, KIB, MIB, counted, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("7B", 7),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("3 MB", 3_000_000),
        ("3 mib", 3 * 1024 * 1024),
        (" 2GB ", 2_000_000_000),
        ("0.5GiB", 536_870_912),
        ("1.5 kib", 1536),
        (10**18, 10**18),
    ],
)
def test_sizes_are_read_in_powers_of_1000_and_of_1024(text, num_bytes):
    assert parse_bytes("budget", text) == num_bytes


@pytest.mark.parametrize(
    "value", ["", "GiB", "1 TiB", "-1GiB", "1e3", "1,5GiB", "1.GiB", "1 Gi B", "0", "0GiB", "0.4B", 0, -5, 1.5, True]
)
def test_what_is_no_positive_size_is_refused_by_name(value):
    with pytest.raises(ValueError, match=r"`budget` must be a positive size, got "):
        parse_bytes("budget", value)


@given(st.integers(-(2**50), 2**50))
def test_text_is_within_half_of_its_last_digit(num_bytes):
    number, unit = format_bytes(num_bytes).split()
    size = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}[unit]
    assert abs(Fraction(number) * size - num_bytes) <= (0 if unit == "B" else Fraction(size, 20))
    assert size == 1 or abs(Fraction(number)) >= 1
    assert unit == "GiB" or abs(Fraction(number)) < 1024


@given(st.integers(1, 2**50))
def test_text_is_read_back_within_its_last_digit(num_bytes):
    text = format_bytes(num_bytes)
    size = {"B": 0, "KiB": KIB, "MiB": MIB, "GiB": GIB}[text.split()[1]]
    assert abs(parse_bytes("budget", text) - num_bytes) <= size / 20 + 1


def test_what_was_not_measured_is_not_a_number():
    assert format_bytes(None) == "n/a"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 regions"), (1, "1 region"), (2, "2 regions"), (-1, "-1 regions"), (1000, "1000 regions")],
)
def test_one_thing_is_singular(number, text):
    assert counted(number, "region") == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**20, "1.0 MiB"), (3 * 2**30, "3.0 GiB"), (-2048, "-2.0 KiB")],
)
def test_units(num_bytes, text):
    assert format_bytes(num_bytes) == text
