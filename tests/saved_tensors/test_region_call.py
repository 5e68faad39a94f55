"""What cannot be repeated is refused or raises, with advice."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from lightning_memsave import (
    Checkpointing,
    apply_checkpointing,
)
from lightning_memsave.core.errors import RegionError
from tests.saved_tensors.region_nets import Block, Impure, assert_same_steps, samples, sequential, with_regions


def draws_from_python(self, x):
    for _ in range(GENERATOR.randint(1, 50)):
        x = self.linear(x).tanh()
    return x


def draws_a_shape(self, x):
    return self.linear(x).repeat(GENERATOR.randint(1, 10**6) % 977 + 1, 1).tanh()


GENERATOR = random.Random(5)


def train(model):
    for _ in range(5):
        model(samples()).sum().backward()


@pytest.mark.parametrize("does", [draws_from_python, draws_a_shape])
def test_a_region_that_does_something_else_raises_with_advice(does):
    model = nn.Sequential(nn.Linear(8, 8), Impure(does))
    apply_checkpointing(model, Checkpointing(regions=[["0", "1"]]))
    with pytest.raises(RegionError, match=r"checkpointed region kept .* run again: `0` \(Linear\), `1` \(Impure\)"):
        train(model)


@pytest.mark.parametrize("which", ["0.weight", "1.up.weight"])
def test_a_parameter_changed_between_forward_and_backward_raises(which):
    """Plain torch raises where a gradient is computed from the parameter; here all that are computed with are."""
    for regions_of_it in ([["0", "1"]], [["0"], ["1"]], [["0", "1"], ["0"], ["1"]]):
        model = nn.Sequential(nn.Linear(8, 8), Block())
        apply_checkpointing(model, Checkpointing(regions=regions_of_it))
        loss = model(samples(False)).square().sum()
        with torch.no_grad():
            model.get_parameter(which).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_input_changed_between_forward_and_backward_raises():
    for requires_grad in (True, False):
        model = with_regions(sequential(), [["0", "1"], ["2", "3"]])
        x = samples(requires_grad)
        loss = model(x).sum()
        x.data = x.data.clone()  # no change in place, as far as anybody counts
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_weights_that_were_lent_for_the_forward_are_those_of_the_repetition():
    plain, x = sequential(0.0), samples()
    ours, results = with_regions(plain, [["0", "1", "2"], ["3"]]), []
    lent = {name: torch.randn_like(p, requires_grad=True) for name, p in plain.named_parameters()}
    for model in (plain, ours):
        loss = torch.func.functional_call(model, lent, x).square().sum()
        results.append(torch.autograd.grad(loss, [x, *lent.values()]))
    assert all(map(torch.equal, *results))


def grows(self, x):
    self.history.append(1)
    return self.linear(x)


def edits(self, x):
    return self.linear(x.mul_(2))


def edits_a_view(self, x):
    x[0] = 0
    return self.linear(x)


@pytest.mark.parametrize(("does", "message"), [
    (grows, "changes an attribute that is no buffer.*history"),
    (edits, "edits its input in place"),
    (edits_a_view, "edits its input in place"),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
@pytest.mark.parametrize("groups", [[["0", "1"]], [["1"]], [["0", "1"], ["1"]]])
def test_a_module_that_does_not_bear_a_second_run_is_refused(does, message, groups):
    model = nn.Sequential(nn.Linear(8, 8), Impure(does))
    apply_checkpointing(model, Checkpointing(regions=groups))
    with pytest.raises(ValueError, match=message):
        train(model)


def fills_an_attribute(self, x):
    if self.cache is None:
        self.cache = torch.arange(8.0)
    return self.linear(x) * self.cache


def fills_a_table(self, x):
    if x.shape not in self.table:
        self.table[x.shape] = torch.arange(8.0)
    return self.linear(x) * self.table[x.shape]


@pytest.mark.parametrize("does", [fills_an_attribute, fills_a_table])
def test_a_cache_that_is_filled_once_is_no_change(does):
    plain = nn.Sequential(nn.Linear(8, 8), Impure(does))
    assert_same_steps(plain, with_regions(plain, [["0", "1"]]), samples(), num_steps=3)
