"""State that a region reads besides its tensors: put back where it can be, noticed where it cannot."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memsave import Checkpointing, apply_checkpointing
from lightning_memsave.core.errors import RegionError
from tests.saved_tensors.region_nets import assert_same, outcome, samples

GLOBAL = {"scale": 1.0}


class Reads(nn.Module):
    """A block whose forward is a function of it."""

    number = 0

    def __init__(self, does, **state) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(8, 8), does
        vars(self).update(state)

    def forward(self, x):
        return self.does(self, x)


def python_noise(self, x):
    return (self.linear(x) * random.random()).tanh()


def numpy_noise(self, x):
    return (self.linear(x) * np.random.randn()).tanh()  # noqa: NPY002  # numpy makes two at once


def private_noise(self, x):
    return self.linear(x) * torch.rand(8, generator=self.generator)


def private_python_noise(self, x):
    return (self.linear(x) * self.augment.rng["flip"].random()).tanh()


def private_numpy_noise(self, x):
    return (self.linear(x) * float(self.rng.random())).tanh()


def counts(self, x):
    self.number += 1
    return (self.linear(x) * self.number).tanh()


def changes_from_the_third_call_on(self, x):
    self.number += 1
    if self.number > 2:
        self.scale = self.scale * 0.9
    return (self.linear(x) * self.scale).tanh()


def takes_a_scale(self, x):
    """A tensor that no graph is behind, replaced."""
    out = self.linear(x).tanh() * self.mean
    self.mean = 0.9 * self.mean + out.detach().mean()
    return out


class Augment:
    def __init__(self):
        self.rng = {"flip": random.Random(3)}


PUT_BACK = {
    "random": (python_noise, dict),
    "numpy": (numpy_noise, dict),
    "torch.Generator": (private_noise, lambda: {"generator": torch.Generator().manual_seed(1)}),
    "random.Random in an object": (private_python_noise, lambda: {"augment": Augment()}),
    "numpy.random.Generator": (private_numpy_noise, lambda: {"rng": np.random.default_rng(0)}),
    "numpy.random.RandomState": (private_numpy_noise, lambda: {"rng": np.random.RandomState(0)}),
    "a counter": (counts, lambda: {"number": 0}),
    "a counter of the class": (counts, dict),
    "a number that changes late": (changes_from_the_third_call_on, lambda: {"number": 0, "scale": 1.0}),
    "a tensor": (takes_a_scale, lambda: {"mean": torch.tensor(0.5)}),
}


@contextlib.contextmanager
def the_same_seeds():
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    yield


def assert_same_runs(plain, x, groups=(("0", "1"), ("2",)), num_steps=6):
    """Each model draws in the order in which it draws alone."""
    ours = copy.deepcopy(plain)
    apply_checkpointing(ours, Checkpointing(regions=groups))
    found = []
    for model in (plain, ours):
        with the_same_seeds():
            found.append([outcome(model, x) for _ in range(num_steps)] + [{"next": torch.tensor(random.random())}])
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("name", PUT_BACK)
def test_what_a_region_reads_is_put_back(name):
    does, state = PUT_BACK[name]
    plain = nn.Sequential(
        nn.Linear(8, 8), Reads(does, **state()), nn.Sequential(Reads(does, **state()), nn.Linear(8, 2))
    )
    assert_same_runs(plain, samples())


def test_calls_of_one_region_draw_from_generators_of_their_own():
    drops = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
    makes = [Reads(private_noise, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    assert_same_runs(
        nn.Sequential(drops, *makes, nn.Dropout(0.2)), samples(), groups=(("0", "1", "2", "3"), ("1", "2"))
    )


@dataclasses.dataclass
class State:
    hidden: torch.Tensor
    scales: list[float]
    counts: np.ndarray


class EditsObject(nn.Module):
    """A block that is given an object, and leaves its result in it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, state):
        state.hidden = self.linear(state.hidden).tanh() * state.scales.pop() * float(1 + state.counts[0])
        state.counts[0] += 1
        return state.hidden


class OfObjects(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([EditsObject() for _ in range(3)])

    def forward(self, x):
        state = State(x, [0.5, 2.0, 1.5], np.zeros(1))
        for block in self.blocks:
            block(state)
        return state.hidden


class TakesAnIterator(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scales, generator):
        return self.linear(x).tanh() * next(scales) * torch.rand(8, generator=generator)


class OfIterators(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([TakesAnIterator() for _ in range(3)])

    def forward(self, x):
        scales, generator = iter([0.5, 2.0, 1.5]), torch.Generator().manual_seed(3)
        for block in self.blocks:
            x = block(x, scales, generator)
        return x


@pytest.mark.parametrize("model", [OfObjects, OfIterators])
@pytest.mark.parametrize("groups", [(("blocks.0", "blocks.1"), ("blocks.2",)), (("blocks.0",), ("blocks.1",))])
def test_objects_that_a_region_is_given_are_as_they_were(model, groups):
    assert_same_runs(model(), samples(), groups)


def train(model, num_steps):
    for _ in range(num_steps):
        model(samples()).square().sum().backward()


def reads_a_global(self, x):
    GLOBAL["scale"] *= 0.9
    return (self.linear(x) * GLOBAL["scale"]).tanh()


def counts_in_its_class(self, x):
    Reads.number += 1
    return (self.linear(x) * Reads.number).tanh()


GENERATOR = torch.Generator().manual_seed(0)


def draws_a_mask_from_a_global_generator(self, x):
    """The mask is kept by the last operation, and takes no gradient."""
    return self.linear(x) * torch.rand(8, generator=GENERATOR)


@pytest.mark.parametrize("does", [reads_a_global, counts_in_its_class, draws_a_mask_from_a_global_generator])
def test_a_repetition_that_computes_other_values_raises_and_names_the_module(does):
    model = nn.Sequential(nn.Linear(8, 8), Reads(does))
    apply_checkpointing(model, Checkpointing(regions=[["1"]]))
    with pytest.raises(RegionError, match=r"computed other values .* `1` \(Reads\)"):
        model(samples()).square().sum().backward()


def starts_late(self, x):
    GLOBAL["calls"] = GLOBAL.get("calls", 0) + 1
    return (self.linear(x) * (1.0 if GLOBAL["calls"] <= 20 else GLOBAL["calls"])).tanh()


def test_a_change_that_comes_late_is_noticed_later():
    GLOBAL.pop("calls", None)
    model = nn.Sequential(nn.Linear(8, 8), Reads(starts_late))
    apply_checkpointing(model, Checkpointing(regions=[["1"]]))
    with pytest.raises(RegionError, match="computed other values"):
        train(model, 40)


def fills_a_deque(self, x):
    self.history.append(float(x.detach().mean()))
    return self.linear(x).tanh() * (1 + sum(self.history))


def counts_in_an_array(self, x):
    self.counts[0] += 1
    return self.linear(x).tanh() * float(self.counts[0])


def counts_deep_inside(self, x):
    self.nested["a"][0]["b"] += 1
    return self.linear(x).tanh() * self.nested["a"][0]["b"]


def counts_in_an_object(self, x):
    self.state.hidden += 1
    return self.linear(x).tanh() * self.state.hidden


@pytest.mark.parametrize(
    ("does", "state"),
    [
        (fills_a_deque, {"history": deque([0.0], 4)}),
        (counts_in_an_array, {"counts": np.zeros(1)}),
        (counts_deep_inside, {"nested": {"a": [{"b": 1}]}}),
        (counts_in_an_object, {"state": State(1, [], None)}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_attribute_that_changes_inside_is_refused_by_name(does, state):
    model = nn.Sequential(nn.Linear(8, 8), Reads(does, **copy.deepcopy(state)))
    apply_checkpointing(model, Checkpointing(regions=[["1"]]))
    with pytest.raises(ValueError, match=f"changes an attribute that is no buffer.*`{next(iter(state))}`"):
        train(model, 2)


def makes_a_list_anew(self, x):
    self.anchors = [anchor.to("cpu") for anchor in self.anchors]
    return self.linear(x).tanh() * self.anchors[0].mean()


def test_an_attribute_that_is_made_anew_with_what_it_held_is_no_change():
    model = nn.Sequential(nn.Linear(8, 8), Reads(makes_a_list_anew, anchors=[torch.ones(3), torch.ones(2)]))
    plain = copy.deepcopy(model)
    apply_checkpointing(model, Checkpointing(regions=[["1"]]))
    for each in (plain, model):
        torch.manual_seed(0)
        train(each, 3)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


class Sums(nn.Module):
    """Adds to a tensor that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.total = nn.Linear(4, 4), torch.zeros(())

    def forward(self, x):
        self.total += x.detach().sum()
        return self.linear(x)


def test_an_attribute_that_is_edited_in_place_is_refused_in_the_first_call_already():
    model = nn.Sequential(Sums(), Sums())
    apply_checkpointing(model, Checkpointing())
    with pytest.raises(ValueError, match=r"changes an attribute that is no buffer.*`total`"):
        model(torch.ones(2, 4, requires_grad=True))
