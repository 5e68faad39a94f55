"""Losses that are nearly means: gradients by what the last layer is given tell them from means."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.loops import last_layer as layers
from lightning_memsave.loops.last_layer import Given, LastLayer
from tests.loops.loss_runs import Base, applied, compare

PIXELS = 64


class Segments(Base):
    """Samples that are nearly alike: noise, whose masks have nearly the same share of each class."""

    num_classes = 1

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, self.num_classes, 1))

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[0]), batch[1])


class Dice(Segments):
    def loss(self, z, y):
        p = z.sigmoid()
        return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


class DiceOfSamples(Segments):
    def loss(self, z, y):
        p, y = z.sigmoid().flatten(1), y.flatten(1)
        return (1 - 2 * (p * y).sum(1) / (p.sum(1) + y.sum(1))).mean()


class Weighted(Segments):
    num_classes = 3

    def loss(self, z, y):
        return F.cross_entropy(z, y[:, 0].long(), weight=torch.arange(1.0, 4.0))


class WithoutValue(Segments):
    """A statistic of the batch minus itself, which has a gradient alone."""

    def loss(self, z, y):
        centred = (z - z.mean(0)).square().mean()
        return F.binary_cross_entropy_with_logits(z, y) + centred - centred.detach()


class Unweighted(Segments):
    num_classes = 3

    def loss(self, z, y):
        return F.cross_entropy(z, y[:, 0].long())


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 3, PIXELS, PIXELS, generator=generator)
    return [(x, (torch.rand(16, 1, PIXELS, PIXELS, generator=generator) > 0.7).float())]


@pytest.mark.parametrize("make", [Dice, Weighted, WithoutValue])
@pytest.mark.parametrize("seed", range(6))
def test_ratios_of_sums_over_a_batch_are_told_from_means_of_samples_that_are_alike(make, seed):
    torch.manual_seed(seed)
    report, apart, messages = compare(make(), batches(seed))
    assert apart == 0
    assert "Batches are not cut" in messages[0]
    assert applied(report) is None


@pytest.mark.parametrize("make", [DiceOfSamples, Unweighted])
@pytest.mark.parametrize("seed", range(3))
def test_means_of_samples_that_are_alike_are_cut(make, seed):
    torch.manual_seed(seed)
    report, apart, messages = compare(make(), batches(seed))
    assert 0 < apart < 1e-5
    assert not messages
    assert report.loss_class == "exact"


def test_the_graph_begins_at_the_layer_that_was_called_last():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.Softmax(-1))
    layer, x = LastLayer(net), torch.randn(5, 3)
    with torch.no_grad():
        with layer.watched():
            net(x)
        with layer.differentiated():
            y = net(x)
    assert y.requires_grad
    (given,) = layer.given(y[:, 0].square().sum())
    h = net[1](net[0](x)).detach().requires_grad_()
    (expected,) = torch.autograd.grad(net[3](net[2](h))[:, 0].square().sum(), h)
    torch.testing.assert_close(given.gradient, expected)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(not each._forward_pre_hooks for each in net.modules())
    assert LastLayer(net).given(y.sum()) == []


def test_gradients_are_compared_of_samples_in_the_same_order_along_whatever_dimension():
    values, gradient = torch.randn(3, 5, 2), torch.randn(3, 5, 2)
    whole = [Given(values, gradient)]
    parts = [[Given(values[:, :2], 2 * gradient[:, :2])], [Given(values[:, 2:], 4 * gradient[:, 2:])]]
    assert layers.compare(whole, parts, [0.5, 0.25]) == (0, 0)
    assert layers.compare(whole, parts, [0.5, 0.5]).of_gradients > 0.5
    assert layers.compare(whole, parts[::-1], [0.25, 0.5]) is None, "another order"
    assert layers.compare(whole, [parts[0], []], [0.5, 0.25]) is None, "another number of calls"
    assert layers.compare(whole, [parts[0], parts[0]], [0.5, 0.25]) is None, "other samples"
    assert layers.compare([Given(values, 0 * gradient)], parts, [0, 0]) is None, "no gradient"
    assert layers.compare([], [[], []], [0.5, 0.25]) is None
