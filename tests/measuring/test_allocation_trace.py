"""A step extended to other numbers of samples."""

from fractions import Fraction

import pytest

from lightning_memsave.measuring.allocation_trace import Allocations, extended

LABELS = (("weights", "body"), ("activations", "body"), ("temporary", "head"))


def step(n, queue=0):
    """Weights, an activation per sample, and a matrix of all pairs of samples, a queue beside them."""
    pairs = 4 * (n + queue) ** 2
    return Allocations((100,), ((8 * n, 1), (pairs, 2), (-pairs, 2), (-8 * n, 1)), LABELS)


def linear(n):
    return Allocations((100,), ((8 * n, 1), (-8 * n, 1)), LABELS[:2])


@pytest.mark.parametrize("make", [linear, step, lambda n: step(n, queue=96)])
@pytest.mark.parametrize("wanted", [200, 300, 512])
def test_sizes_lie_on_lines_and_parabolas(make, wanted):
    assert extended([make(64), make(128), make(192)], Fraction(wanted, 64)) == make(wanted)


def test_sizes_that_are_rounded_up_are_on_a_line():
    steps = [Allocations((8 * (n // 8 + 1),), (), LABELS[:1]) for n in (63, 126, 189)]
    assert abs(extended(steps, Fraction(8)).held[0] - 504) <= 16


@pytest.mark.parametrize("sizes", [(5000, 12000, 15000), (8000, 27000, 1000), (1000, 8000, 27000)])
def test_what_data_select_and_what_grows_faster_is_not_extended(sizes):
    assert extended([Allocations((), ((size, 0), (-size, 0)), LABELS[:1]) for size in sizes], Fraction(8)) is None


def test_steps_that_differ_are_not_extended():
    other = Allocations((100,), ((8, 1), (-8, 1), (8, 2)), LABELS)
    assert extended([step(1), other, step(3)], Fraction(4)) is None
    assert not step(1).is_like(other)
    assert step(1).is_like(step(2))
