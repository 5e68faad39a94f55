"""Optimizer state of factors, in the layout of a dense model and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memsave import LowRank, apply_low_rank
from lightning_memsave.techniques.low_rank import low_rank_layers
from lightning_memsave.techniques.low_rank.factored_state import FACTORED, from_dense_layout, to_dense_layout

MAKERS = {
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
}
LEFT_OUT = ("NAdam", "Rprop")
"""Their state is not zero before a first step: that of a product is not written."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 2))


def stepped(module, optimizer, num=3):
    for _ in range(num):
        optimizer.zero_grad()
        module(torch.linspace(-1, 1, 100).view(5, 20)).square().sum().backward()
        optimizer.step()
    return module


def low_rank(name):
    low = model()
    apply_low_rank(low, LowRank(rank=3))
    layers = low_rank_layers(low).values()
    return low, MAKERS[name](low.parameters()), {layer.factors: layer.dense_shape for layer in layers}


@pytest.mark.parametrize("name", MAKERS)
def test_a_dense_model_goes_on_with_what_is_its_own_and_starts_the_rest(name):
    low, optimizer, shapes = low_rank(name)
    stepped(low, optimizer)
    own = copy.deepcopy(optimizer.state_dict())
    written = to_dense_layout(optimizer, optimizer.state_dict(), shapes)
    dense, fresh = model(), model()
    for each in (dense, fresh):
        each.load_state_dict(low.state_dict())
    going_on, new = MAKERS[name](dense.parameters()), MAKERS[name](fresh.parameters())
    going_on.load_state_dict(written)
    stepped(dense, going_on, 1), stepped(fresh, new, 1)
    for number in (0, 2):  # products
        assert (number in written["state"]) == (name not in LEFT_OUT)
        ours, theirs = list(dense.parameters())[number], list(fresh.parameters())[number]
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    for number in (1, 3, 4, 5):  # biases, and the last weight, which is dense
        assert written["state"][number].keys() == own["state"][number].keys()
        assert not torch.equal(list(dense.parameters())[number], list(fresh.parameters())[number])
    assert optimizer.state_dict()["state"].keys() == own["state"].keys(), "what was written is a copy"


@pytest.mark.parametrize("name", MAKERS)
def test_there_and_back_is_the_same_state(name):
    low, optimizer, shapes = low_rank(name)
    stepped(low, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    back = from_dense_layout(optimizer, to_dense_layout(optimizer, optimizer.state_dict(), shapes), shapes)
    assert FACTORED not in back
    assert back["param_groups"] == before["param_groups"]
    assert back["state"].keys() == before["state"].keys()
    for number, state in before["state"].items():
        torch.testing.assert_close(back["state"][number], state, rtol=0, atol=0)


def test_moments_of_a_dense_weight_and_of_another_rank_are_left_out():
    low, optimizer, shapes = low_rank("AdamW, amsgrad")
    dense = model()
    own = MAKERS["AdamW, amsgrad"](dense.parameters())
    stepped(dense, own)
    read = from_dense_layout(optimizer, own.state_dict(), shapes)
    assert read["state"].keys() == {1, 3, 4, 5}
    stepped(low, optimizer)
    other = model()
    apply_low_rank(other, LowRank(rank=2))
    layers = low_rank_layers(other).values()
    others = MAKERS["AdamW, amsgrad"](other.parameters())
    written = to_dense_layout(optimizer, optimizer.state_dict(), shapes)
    read = from_dense_layout(others, written, {layer.factors: layer.dense_shape for layer in layers})
    assert read["state"].keys() == {1, 3, 4, 5}
    others.load_state_dict(read)
    stepped(other, others)


def test_what_is_not_torchs_layout_is_left_alone():
    _, optimizer, shapes = low_rank("SGD")
    stand_in = {"anything": 1}
    assert to_dense_layout(optimizer, stand_in, shapes) is stand_in
    assert from_dense_layout(optimizer, stand_in, shapes) is stand_in
