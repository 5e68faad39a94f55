"""Levels of derivatives: the best ones, the bytes, and the mean of many draws."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from lightning_memsave.saved_tensors import DifferentiatedTwiceError, Fidelity, SavedTensorStore
from lightning_memsave.saved_tensors.activation_derivatives import Derivative
from lightning_memsave.saved_tensors.derivative_levels import Levels, _table, best_levels
from tests.saved_tensors.nets import Data
from tests.saved_tensors.test_activation_derivatives import ACTIVATIONS, KEPT_AS_VALUES, derivative

GELU = Derivative("gelu", ("none",))


def few_bits(bits, **options):
    return SavedTensorStore(derivative_bits=bits, min_numel=1, **options)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_bytes_are_those_of_the_bits_and_of_a_table(bits):
    store = few_bits(bits)
    derivative(F.gelu, torch.randn(10_001), store)
    assert dict(store.tally.entries) == {f"fewbit-{bits}": 1}
    assert store.tally.held_bytes == -(-10_001 * bits // 8) + 4 * 2**bits


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_mean_of_many_draws_is_the_derivative(name, bits):
    """With values far outside of what levels were chosen for."""
    function, settings = ACTIVATIONS[name]
    torch.manual_seed(0)
    x, store, draws = torch.randn(2048) * 3, few_bits(bits), 200
    expected = derivative(function, x, **settings)
    drawn = torch.stack([derivative(function, x, store, **settings) for _ in range(draws)])
    chance = drawn.var(0).sum().sqrt() / draws**0.5
    assert 0 < (drawn.mean(0) - expected).norm() < 1.1 * chance + 1e-5 * len(x) ** 0.5
    assert len(drawn.unique()) <= 2**bits
    assert store.consequences.loss_class == "unbiased"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_levels_are_derivatives_in_the_dtype_of_the_values(dtype):
    """x* is rounded to the dtype first; what is left is the rounding of the derivative itself."""
    torch.manual_seed(0)
    x, store, draws = torch.randn(2048).to(dtype), few_bits(2), 200
    expected = derivative(F.gelu, x.double())
    drawn = torch.stack([derivative(F.gelu, x, store) for _ in range(draws)])
    chance = drawn.var(0).sum().sqrt() / draws**0.5
    assert (drawn.mean(0) - expected).norm() < 1.1 * chance + torch.finfo(dtype).eps * len(x) ** 0.5


@pytest.mark.parametrize("name", ["gelu", "silu", "mish"])
def test_the_first_and_last_level_are_the_ends_of_the_derivative(name):
    found = Derivative(name, ("none",) if name == "gelu" else ())
    every = found(torch.linspace(-20, 20, 400_001, dtype=torch.float64))
    for bits in (1, 2, 3, 4):
        inputs, values = _table(Levels(found, bits), torch.float32, torch.device("cpu"))
        assert torch.equal(values, found(inputs))
        assert bool((values.diff() > 0).all())
        assert abs(float(values[0] - every.min())) < 1e-6
        assert abs(float(values[-1] - every.max())) < 1e-6


def square_error(derivatives, weights, levels):
    above = torch.bucketize(derivatives, levels).clamp(1, len(levels) - 1)
    low, high = levels[above - 1], levels[above]
    return float((weights * (high - derivatives) * (derivatives - low)).sum())


@pytest.mark.parametrize("num", [3, 4])
def test_no_other_levels_are_better(num):
    """Among all of a grid that is as fine as the one they were chosen from, or coarser."""
    x = torch.linspace(-8, 8, 2001, dtype=torch.float64)
    d, weights = GELU(x), torch.exp(-x.square() / 2)
    ends = GELU.ends
    grid = torch.linspace(*ends, {3: 601, 4: 61}[num], dtype=torch.float64).tolist()[1:-1]
    found = square_error(d, weights, best_levels(d, weights, ends, num))
    others = (sorted([*ends, *inner]) for inner in itertools.combinations(grid, num - 2))
    least = min(square_error(d, weights, torch.tensor(levels, dtype=torch.float64)) for levels in others)
    assert found <= least * (1 + 1e-9)
    even = square_error(d, weights, torch.linspace(*ends, num, dtype=torch.float64))
    assert found <= even * (1 + 1e-9)


def test_each_bit_lowers_the_error():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    expected = derivative(F.gelu, x)
    errors = [float((derivative(F.gelu, x, few_bits(bits)) - expected).norm()) for bits in (1, 2, 3, 4)]
    assert all(2 * after < before for before, after in itertools.pairwise(errors))


@pytest.mark.parametrize("lossy", [Fidelity.EXACT, Fidelity.BF16, Fidelity.INT4])
def test_it_holds_beside_any_codec(lossy):
    store = few_bits(3, lossy=lossy)
    derivative(F.silu, torch.randn(2048), store)
    assert dict(store.tally.entries) == {"fewbit-3": 1}


@pytest.mark.parametrize("name", KEPT_AS_VALUES)
def test_others_keep_their_input(name):
    function, settings = KEPT_AS_VALUES[name]
    x, store = torch.randn(2048), few_bits(3)
    assert torch.equal(derivative(function, x, store, **settings), derivative(function, x, **settings))
    assert dict(store.tally.entries) == {"raw": 1}


def test_what_somebody_else_reads_is_kept_as_it_is():
    x, store, found = torch.randn(2048), few_bits(3), []
    for scope in (torch.enable_grad(), store.scope()):
        leaf = x.clone().requires_grad_()
        with scope:
            h = Data.apply(leaf)
            out = F.gelu(h) + h * h
            del h  # else it is held anyway
        found.append(torch.autograd.grad(out.sum(), leaf)[0])
    assert torch.equal(*found)
    assert dict(store.tally.entries) == {"raw": 1}


def test_what_is_not_a_number_stays_none():
    x = torch.randn(2048)
    x[7] = torch.nan
    assert bool(derivative(F.gelu, x, few_bits(2)).isnan().all())


def test_a_second_derivative_is_refused_with_the_way_out():
    leaf = torch.randn(2048, requires_grad=True)
    with few_bits(3).scope():
        out = F.gelu(Data.apply(leaf))
    with pytest.raises(DifferentiatedTwiceError, match=r"activations='fewbit-3'.*operations=\{'gelu': 'exact'\}"):
        torch.autograd.grad(out.sum(), leaf, create_graph=True)
    with few_bits(3, overrides={"gelu": Fidelity.EXACT}).scope():
        out = F.gelu(Data.apply(leaf))
    (first,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    assert torch.autograd.grad(first.sum(), leaf)[0].norm() > 0
