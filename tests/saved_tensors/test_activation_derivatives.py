"""Codes of derivatives: what they decode to has the derivative that was coded, on average."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore
from lightning_memsave.saved_tensors.activation_derivatives import derivative_of
from lightning_memsave.saved_tensors.call_site import Call
from tests.saved_tensors.nets import Data

ACTIVATIONS = {
    "gelu": (F.gelu, {}),
    "gelu, tanh": (F.gelu, {"approximate": "tanh"}),
    "silu": (F.silu, {}),
    "mish": (F.mish, {}),
    "elu": (F.elu, {}),
    "softplus": (F.softplus, {}),
    "softplus, flat": (F.softplus, {"beta": 0.1}),
    "softplus, steep": (F.softplus, {"beta": 5.0, "threshold": 30.0}),
}
KEPT_AS_VALUES = {
    "hardswish, which jumps": (F.hardswish, {}),
    "in place": (F.silu, {"inplace": True}),
    "elu with a kink": (F.elu, {"alpha": 0.5}),
    "softplus with a jump": (F.softplus, {"threshold": 2.0}),
}


def derivative(function, x, store=None, **settings):
    """Of each element, as autograd finds it."""
    leaf = x.clone().requires_grad_()
    if store is None:
        out = function(Data.apply(leaf), **settings)
    else:
        with store.scope():
            out = function(Data.apply(leaf), **settings)
    (found,) = torch.autograd.grad(out.sum(), leaf)
    return found.double()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_derivative_is_that_of_some_value(name):
    function, settings = ACTIVATIONS[name]
    found = derivative_of(Call(function.__name__, (None,), settings))
    x = torch.linspace(-100, 100, 20_001)
    expected = derivative(function, x, **settings)
    again = derivative(function, found.invert(found(x)), **settings)
    off = (again - expected).abs()
    assert off.max() < 4e-4


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_mean_of_many_draws_is_the_derivative_but_for_its_ends(name):
    """Off by chance, and by the part of a range that is rounded outwards, of which 1 % is more than there is."""
    function, settings = ACTIVATIONS[name]
    torch.manual_seed(0)
    x, store, draws = torch.randn(2048) * 3, SavedTensorStore(lossy=Fidelity.INT4, min_numel=1), 400
    expected = derivative(function, x, **settings)
    drawn = torch.stack([derivative(function, x, store, **settings) for _ in range(draws)])
    assert store.tally.entries["int4 derivative"] == 1
    chance = drawn.var(0).sum().sqrt() / draws**0.5
    assert (drawn.mean(0) - expected).norm() < 1.2 * chance + 0.005 * len(x) ** 0.5


@pytest.mark.parametrize("name", KEPT_AS_VALUES)
def test_others_keep_their_input(name):
    function, settings = KEPT_AS_VALUES[name]
    assert derivative_of(Call(function.__name__, (None,), settings)) is None
