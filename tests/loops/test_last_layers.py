"""Losses that are nearly means: gradients with respect to the inputs of the last layers tell them from means."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import MemSave
from lightning_memsave.loops.last_layers import InputGradient, LastLayers, compare
from tests.loops.loss_runs import Base, applied, fit
from tests.loops.loss_runs import compare as compare_runs

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
    report, apart, messages = compare_runs(make(), batches(seed))
    assert apart == 0
    assert "Batches are not cut" in messages[0]
    assert applied(report) is None


@pytest.mark.parametrize("make", [DiceOfSamples, Unweighted])
@pytest.mark.parametrize("seed", range(3))
def test_means_of_samples_that_are_alike_are_cut(make, seed):
    torch.manual_seed(seed)
    report, apart, messages = compare_runs(make(), batches(seed))
    assert 0 < apart < 1e-5
    assert not messages
    assert report.loss_class == "exact"


def test_a_layer_in_front_of_others_is_none_of_the_last_and_a_branch_has_one_of_its_own():
    torch.manual_seed(0)
    net = nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(4, 2), "other": nn.Linear(4, 1)})
    layers, x = LastLayers(net), torch.randn(5, 3)
    with layers.apart():
        h = net["body"](x).tanh()
        loss = net["head"](h).square().mean() + net["other"](input=h).exp().mean()
    first, second = layers.gradients(loss)
    h = net["body"](x).tanh().detach()
    for found, term in (first, net["head"]), (second, net["other"]):
        h.requires_grad_()
        y = term(h)
        (expected,) = torch.autograd.grad(y.square().mean() if term is net["head"] else y.exp().mean(), h)
        torch.testing.assert_close(found.values, h)
        torch.testing.assert_close(found.gradient, expected)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(not each._forward_pre_hooks for each in net.modules())
    assert layers.gradients(loss) == []


def test_blocks_without_gradients_stay_so_and_what_is_one_tensor_stays_one():
    seen = []

    class Both(nn.Linear):
        def forward(self, x, y=None):
            seen.append((x is y, x.requires_grad))
            return super().forward(x)

    layer = Both(3, 2)
    layers, x = LastLayers(layer), torch.randn(5, 3)
    with layers.apart():
        y = layer(x, y=x)
        with torch.no_grad():
            layer(x, y=x)
    assert seen == [(True, True), (True, False)]
    assert len(layers.gradients(y.sum())) == 1


def test_gradients_are_compared_of_samples_in_the_same_order_along_whatever_dimension():
    values, gradient = torch.randn(3, 5, 2), torch.randn(3, 5, 2)
    whole, sizes = [InputGradient(values, gradient)], [2, 3]
    parts = [
        [InputGradient(values[:, :2], 2 * gradient[:, :2])],
        [InputGradient(values[:, 2:], 4 * gradient[:, 2:])],
    ]
    assert compare(whole, parts, sizes, [0.5, 0.25]) == (0, 0)
    assert compare(whole, parts, sizes, [0.5, 0.5]).of_gradients > 0.5
    assert compare(whole, parts[::-1], sizes[::-1], [0.25, 0.5]) is None, "another order"
    assert compare(whole, [parts[0], []], sizes, [0.5, 0.25]) is None, "another number of calls"
    assert compare(whole, [parts[0], parts[0]], sizes, [0.5, 0.25]) is None, "other samples"
    assert compare([InputGradient(values, 0 * gradient)], parts, sizes, [0, 0]) is None, "no gradient"
    assert compare([], [[], []], sizes, [0.5, 0.25]) is None


def test_views_of_a_sample_may_lie_behind_those_of_all_samples():
    one, two = torch.randn(5, 2), torch.randn(5, 2)
    whole = [InputGradient(torch.cat([one, two]), torch.cat([two, one]))]
    parts = [
        [InputGradient(torch.cat([one[rows], two[rows]]), torch.cat([two[rows], one[rows]]))]
        for rows in (slice(0, 2), slice(2, 5))
    ]
    assert compare(whole, parts, [2, 3], [1, 1]) == (0, 0)


class Branched(Segments):
    """A second head, which is called last."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        h = self.net[1](self.net[0](batch[0]))
        loss = self.loss(self.net[2](input=h), batch[1])
        return loss + 0.1 * F.cross_entropy(self.other(h.mean((2, 3))), torch.arange(len(h)) % 2)

    loss = Dice.loss


class TwoViews(Segments):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return Dice.loss(self, self.net(torch.cat([x, x.flip(-1)])), torch.cat([y, y.flip(-1)]))


@pytest.mark.parametrize("make", [Branched, TwoViews])
@pytest.mark.parametrize("seed", range(4))
def test_other_heads_keywords_and_views_hide_no_ratio(make, seed):
    torch.manual_seed(seed)
    _, apart, messages = compare_runs(make(), batches(seed))
    assert apart == 0
    assert "Batches are not cut" in messages[0]


class Scripted(Unweighted):
    def __init__(self):
        super().__init__()
        self.net[0] = torch.jit.script(self.net[0])


class Checkpointed(Unweighted):
    """Dropout behind the last layer, in a block that backward makes again."""

    def training_step(self, batch, batch_idx):
        h = self.net[1](self.net[0](batch[0]))
        z = torch.utils.checkpoint.checkpoint(
            lambda h: F.dropout(self.net[2](h), 0.3, self.training), h, use_reentrant=False
        )
        return self.loss(z, batch[1])


class Hooked(Unweighted):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.net[2].register_full_backward_hook(self.count)

    def count(self, *args):
        self.calls += 1


@pytest.mark.filterwarnings("ignore:Microbatches change the result")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # plain torch's, of scripted modules
@pytest.mark.parametrize("make", [Scripted, Checkpointed, Hooked])
def test_where_gradients_do_not_tell_losses_decide(make):
    torch.manual_seed(0)
    memsave = MemSave(microbatch=4)
    fit(make(), batches(0), memsave)
    assert memsave.report.microbatch_size == 4


def test_hooks_of_the_user_do_not_run():
    torch.manual_seed(0)
    module, memsave = Hooked(), MemSave(microbatch=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(module, batches(0), memsave)
    assert module.calls == 4


@pytest.mark.parametrize("dtype", ["32-true", "bf16-true"])
def test_weights_of_16_bits_are_compared_as_float32(dtype):
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Dice(), batches(3), MemSave(microbatch=4), precision=dtype)
    assert any("Batches are not cut" in str(each.message) for each in caught)
