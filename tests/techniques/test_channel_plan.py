"""A plan takes what gives most within its budget, and what it takes is what training takes."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import SparseUpdate, apply_sparse_update, plan_sparse_update
from lightning_memsave.techniques.sparse_update import GainMeter, partial_layers
from tests.techniques.sparse_update_subjects import convolutions, small
from tests.techniques.test_sparse_update import kept_bytes


def batches(num=3):
    generator = torch.Generator().manual_seed(3)
    images = [torch.randn(4, 1, 8, 8, generator=generator) for _ in range(num)]
    return [(x, torch.randint(0, 5, (4,), generator=generator)) for x in images]


def losses(model, found):
    return [lambda x=x, y=y: F.cross_entropy(model(x), y) for x, y in found]


def taken_bytes(model, x, y, state_bytes):
    """What training takes besides the network as it was: kept tensors, values of their own, gradients, state."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    values = sum(layer.values.nbytes for layer in partial_layers(model).values())
    return kept_bytes(lambda: F.cross_entropy(model(x), y), model, x) + values + trained * (4 + state_bytes)


@pytest.mark.parametrize("state_bytes", [0, 4, 8])
@pytest.mark.parametrize("budget", [0.1, 0.2, 0.4, 0.7, "64KiB"])
def test_what_is_planned_fits_the_budget_and_fills_it(budget, state_bytes):
    model, found = convolutions(), batches()
    whole_bytes = taken_bytes(model, *found[0], state_bytes) + found[0][0].nbytes  # kept, and not said to be there
    config = plan_sparse_update(model, losses(model, found), SparseUpdate(budget=budget), state_bytes=state_bytes)
    apply_sparse_update(model, config)
    room = SparseUpdate(budget=budget).budget_bytes(whole_bytes)
    taken = taken_bytes(model, *found[0], state_bytes)
    largest_channel = 4 * 64 * 4 + 32 * 9 * (8 + state_bytes)
    assert room - largest_channel < taken <= room


def test_gains_are_the_squares_of_gradients_and_costs_are_inputs():
    model, plain, found = small().double(), small().double(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    meter = GainMeter()
    for _ in range(2):
        meter.start(model)
        loss = model(found).square().sum()
        meter.end_forward()
        loss.backward()
        meter.end()
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    plain(found).square().sum().backward()
    dims = {"conv": 1, "dilated": 1, "line": 1, "linear": 1, "of_transformers": 0, "head": 1}
    assert set(meter.layers) == set(dims)
    for name, dim in dims.items():
        gradient = plain.get_submodule(name).weight.grad
        expected = gradient.square().sum([d for d in range(gradient.dim()) if d != dim])
        torch.testing.assert_close(meter.layers[name].gains, 2 * expected, rtol=1e-6, atol=0)
    assert {name: layer.kept_bytes for name, layer in meter.layers.items()} == {
        "conv": 2 * 3 * 144 * 8,
        "dilated": 2 * 8 * 36 * 8,
        "line": 2 * 12 * 36 * 8,
        "linear": 2 * 17 * 6 * 8,
        "of_transformers": 2 * 17 * 10 * 8,
        "head": 2 * 17 * 7 * 8,
    }
    positions = [meter.layers[name].position for name in dims]
    assert positions == sorted(positions)
    assert float(meter.biases["line"].gain) == pytest.approx(2 * float(plain.line.bias.grad.square().sum()))


def test_the_plan_is_that_of_a_slow_search():
    """Each earliest layer, each channel in its order, by hand."""
    model, found = convolutions(), batches(1)
    reference, (x, y) = copy.deepcopy(model), found[0]
    F.cross_entropy(reference(x), y).backward()
    named = {n: m for n, m in reference.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    inputs = {}
    for name, module in named.items():
        module.register_forward_hook(lambda m, args, _, name=name: inputs.__setitem__(name, args[0]))
    reference(x)
    room = SparseUpdate(budget="40KiB").budget_bytes(0)
    best = None
    for first in range(len(named)):
        behind = dict(itertools.islice(named.items(), first, None))
        frozen = copy.deepcopy(model)
        biases = {name: None for name in behind}
        apply_sparse_update(frozen, SparseUpdate(layers={next(iter(behind)): (0,)}, biases=tuple(biases)))
        one = inputs[next(iter(behind))][:, :1].numel() * 4  # of the channel that is there for the pattern
        left = room - (kept_bytes(lambda: F.cross_entropy(frozen(x), y), frozen, x) - one)  # noqa: B023 - 12 * sum(m.bias.numel() for m in behind.values())
        gain = sum(float(m.bias.grad.square().sum()) for m in behind.values())
        items = []
        for name, m in behind.items():
            cost = inputs[name][:, :1].numel() * 4 + m.weight[:, 0].numel() * 16
            gains = m.weight.grad.double().transpose(0, 1).flatten(1).square().sum(1)
            items += [(float(g) / cost, float(g), cost, name, channel) for channel, g in enumerate(gains)]
        chosen = {}
        for _, g, cost, name, channel in sorted(items, reverse=True):
            if g > 0 and cost <= left and left >= 0:
                left -= cost
                gain += g
                chosen.setdefault(name, []).append(channel)
        if chosen and (best is None or gain > best[0]):
            best = gain, {name: tuple(sorted(numbers)) for name, numbers in chosen.items()}, tuple(biases)
    config = plan_sparse_update(model, losses(model, found), SparseUpdate(budget="40KiB"))
    assert best is not None
    widths = {name: named[name].weight.shape[1] for name in best[1]}
    expected = {name: 1.0 if len(c) == widths[name] else c for name, c in best[1].items()}
    assert config.layers == expected
    assert config.biases == best[2]


def test_nothing_is_promised_below_the_least_that_training_takes():
    model = convolutions()
    with pytest.raises(ValueError, match=r"`sparse_update` must have room for .* and a channel \(training all of it"):
        plan_sparse_update(model, losses(model, batches()), SparseUpdate(budget=100))
    norm = nn.LayerNorm(4)
    with pytest.raises(ValueError, match=r"`sparse_update` must have room for a layer that can be trained in part"):
        plan_sparse_update(norm, [lambda: norm(torch.randn(2, 4)).square().sum()], SparseUpdate())


def test_gradients_that_are_not_finite_are_no_plan():
    model, ((x, y),) = convolutions(), batches(1)
    with pytest.raises(ValueError, match="`sparse_update` needs finite gradients to plan from"):
        plan_sparse_update(model, [lambda: F.cross_entropy(model(x), y) * torch.inf], SparseUpdate())


def test_inputs_have_the_bytes_of_autocast_and_a_batch_costs_nothing_but_its_channels():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(16, 8)
    meter = GainMeter()
    meter.start(model, [x])
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
    meter.end()
    assert [layer.kept_bytes for layer in meter.layers.values()] == [16 * 8 * 2, 16 * 8 * 2]
    meter.start(model, {"x": x})
    model(x)
    meter.end()
    assert [layer.kept_bytes for layer in meter.layers.values()] == [16 * 8 * 4, 16 * 8 * 4]
    assert meter.whole_bytes == 16 * 8 * 4  # what Tanh and the second layer share; the batch is there anyway
