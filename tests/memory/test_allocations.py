"""A step extended to other numbers of samples."""

import pytest

from lightning_memsave.memory.allocations import Allocations, extended

LABELS = (("weights", "body"), ("activations", "body"), ("temporary", "head"))


def step(n):
    """Weights, an activation per sample, and a matrix of all pairs of samples."""
    return Allocations((100,), ((8 * n, 1), (4 * n * n, 2), (-4 * n * n, 2), (-8 * n, 1)), LABELS)


def linear(n):
    return Allocations((100,), ((8 * n, 1), (-8 * n, 1)), LABELS[:2])


@pytest.mark.parametrize("wanted", [4, 7, 64])
def test_sizes_that_grow_with_the_samples_lie_on_a_line(wanted):
    assert extended({2: linear(2), 4: linear(4)}, wanted) == linear(wanted)


@pytest.mark.parametrize("wanted", [6, 17, 64])
def test_sizes_that_grow_with_the_square_need_a_third_step(wanted):
    assert extended({2: step(2), 4: step(4)}, wanted) is None
    assert extended({2: step(2), 4: step(4), 6: step(6)}, wanted) == step(wanted)


def test_cubes_are_not_extended():
    cubes = {n: Allocations((), ((n**3, 0), (-(n**3), 0)), LABELS[:1]) for n in (2, 4, 6)}
    assert extended(cubes, 8) is None


def test_steps_that_differ_are_not_extended():
    other = Allocations((100,), ((8, 1), (-8, 1), (8, 2)), LABELS)
    assert extended({1: step(1), 2: other}, 4) is None
    assert not step(1).is_like(other)
    assert step(1).is_like(step(2))
