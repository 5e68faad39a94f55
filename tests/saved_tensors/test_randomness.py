"""Generators go on from where they were kept, and any number that is drawn is noticed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memsave.saved_tensors.randomness import Randomness, generators_in, is_generator

MINE, OF_NUMPY, OLD_OF_NUMPY, OF_PYTHON = (
    torch.Generator().manual_seed(3),
    np.random.default_rng(3),
    np.random.RandomState(3),
    random.Random(3),
)
DRAWS = {
    "torch": lambda: torch.rand(3).tolist(),
    "python": random.random,
    "numpy": lambda: np.random.rand(3).tolist(),  # noqa: NPY002
    "numpy, half of a pair": lambda: float(np.random.randn()),  # noqa: NPY002
    "a generator of torch": lambda: torch.rand(3, generator=MINE).tolist(),
    "a generator of numpy": lambda: OF_NUMPY.normal(size=3).tolist(),
    "an old one of numpy": lambda: float(OLD_OF_NUMPY.randn()),
    "one of python": OF_PYTHON.random,
}
PRIVATE = (MINE, OF_NUMPY, OLD_OF_NUMPY, OF_PYTHON)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("num_before", [0, 1])
def test_what_was_drawn_is_drawn_again(name, num_before):
    np.random.seed(0)  # noqa: NPY002  # so that no half of a pair is left
    for _ in range(num_before):
        DRAWS[name]()
    before = Randomness([], PRIVATE)
    assert before.equals(before.now())
    first = [DRAWS[name]()]
    assert not before.equals(before.now()), "a draw is noticed"
    first += [DRAWS[name]() for _ in range(2)]
    before.restore()
    assert [DRAWS[name]() for _ in range(3)] == first


@pytest.mark.parametrize("name", [name for name in DRAWS if "half" not in name])
def test_what_was_restored_is_as_it_was(name):
    before = Randomness([], PRIVATE)
    DRAWS[name]()
    after = before.now()
    before.restore()
    assert before.equals(before.now())
    assert not after.equals(before.now())


def test_states_of_other_generators_are_no_equals():
    assert not Randomness([], [MINE]).equals(Randomness([]))
    assert not Randomness([], [MINE]).equals(Randomness([], [OF_PYTHON]))
    assert Randomness([], [MINE]).private == [MINE]


def test_devices_without_memory_have_no_generator():
    assert Randomness([torch.device("cpu"), torch.device("meta")]).devices == frozenset()


def test_generators_leave_a_scope_as_they_came_even_by_an_error():
    before = Randomness([], PRIVATE)

    def draw_and_fail():
        for draw in DRAWS.values():
            draw()
        raise KeyError

    with pytest.raises(KeyError), Randomness.untouched(private=PRIVATE):
        draw_and_fail()
    assert before.equals(before.now())


@dataclass
class Pipeline:
    steps: list = field(default_factory=list)
    inner: object = None


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng, self.child = np.random.default_rng(0), nn.Dropout()
        self.child.rng = random.Random(1)


def test_generators_are_found_wherever_an_object_holds_them_each_once():
    rng, other = random.Random(0), torch.Generator()
    nested = Pipeline([{"flip": (rng, 3)}, "text"], Pipeline([rng], partial(print, other, key=rng)))
    nested.inner.itself = nested  # a cycle
    assert sorted(map(id, generators_in(nested))) == sorted([id(rng), id(other)])
    assert generators_in(Pipeline([torch.zeros(3), len, "a"])) == []


def test_of_a_module_its_own_attributes_are_looked_through():
    module = Noisy()
    assert generators_in(module) == [module.rng]
    found = generators_in(*module.modules())
    assert {id(each) for each in found} == {id(module.rng), id(module.child.rng)}


def test_a_generator_is_what_has_a_state_that_can_be_kept():
    assert all(map(is_generator, PRIVATE))
    for other in (random.SystemRandom(), np.random, torch, random, 3, iter([1])):
        assert not is_generator(other)


def test_half_of_a_pair_of_normal_numbers_comes_back_with_the_state_it_was_in():
    np.random.seed(0)  # noqa: NPY002  # the global generator is meant
    draw = np.random.randn
    draw()
    first = Randomness([])
    second_number = draw()
    Randomness([])
    first.restore()
    again = Randomness([])
    assert first.equals(again)
    assert draw() == second_number
    again.restore()
    assert draw() == second_number
