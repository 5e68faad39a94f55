"""Noise that normalisations read: bounded row by row, or more bits are kept."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.numerics.kbit import coded_bytes
from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore
from tests.saved_tensors.nets import Data, data, gradients, relative_error


class Scaled(nn.Module):
    """Rows of very different sizes, made by a layer, go into a normalisation."""

    def __init__(self, width, sizes, norm):
        super().__init__()
        self.linear, self.norm, self.out = nn.Linear(width, width, bias=False), norm, nn.Linear(width, width)
        self.sizes = sizes  # [T, 1]

    def forward(self, x):
        return self.out(self.norm(self.linear(Data.apply(x)) * self.sizes))


def by_hand(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-30)


def in_channels(x):
    """LayerNorm over channels that lie apart in memory, as in convolutional networks."""
    apart = x.transpose(1, 2).contiguous().transpose(1, 2)
    return F.layer_norm(apart, x.shape[-1:], eps=1e-30)


NORMS = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-30),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-30),
    "rms_norm by hand": by_hand,
    "layer_norm over channels": in_channels,
    "group_norm": lambda x: F.group_norm(x.flatten(0, 1), 2, eps=1e-30).view_as(x),
    "instance_norm": lambda x: F.instance_norm(x, eps=1e-30),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True, eps=1e-30),
}


@pytest.mark.parametrize(("fidelity", "bound"), [(Fidelity.INT8, 0.02), (Fidelity.INT4, 0.3)])
@pytest.mark.parametrize("width", [16, 48, 64, 192, 320])
@pytest.mark.parametrize("name", NORMS)
def test_rows_of_any_size_get_gradients_of_their_own(name, width, fidelity, bound):
    """Each row's gradient as well: the small ones drown in the noise of large ones else."""
    torch.manual_seed(0)
    sizes = 10.0 ** torch.tensor([0.0, -6, 3, -3, 6, 0, -1, 2])[:, None]
    model = Scaled(width, sizes, NORMS[name])
    x = torch.randn(4, 8, width, requires_grad=True)
    plain, store = gradients(model, x), SavedTensorStore(lossy=fidelity, min_numel=1)
    found = gradients(model, x, store)
    assert relative_error(found, plain) < bound
    errors = (found["x"] - plain["x"]).norm(dim=2) / plain["x"].norm(dim=2)  # [4, 8]
    assert bool((errors < 3 * bound).all())
    assert store.tally.num_guarded == 0


@pytest.mark.parametrize("layout", ["planes", "small planes", "channels_last", "features"])
def test_channels_of_any_size_get_gradients_of_their_own(layout):
    """BatchNorm normalises by channel, wherever the elements of a channel lie."""
    torch.manual_seed(0)
    shape = {"features": (40, 32), "small planes": (10, 32, 2, 2)}.get(layout, (4, 32, 6, 6))
    kind = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    sizes = 10.0 ** torch.randint(-6, 7, (32,)).view(1, 32, *[1] * (len(shape) - 2))

    def run(store=None):
        torch.manual_seed(1)
        x = torch.randn(shape, requires_grad=True)
        scope = contextlib.nullcontext() if store is None else store.scope()
        with scope:
            y = F.batch_norm(
                (Data.apply(x) * sizes).contiguous(memory_format=kind), None, None, training=True, eps=1e-30
            )
        (y * torch.randn(shape)).sum().backward()
        return x.grad

    plain, store = run(), SavedTensorStore(lossy=Fidelity.INT4, min_numel=1)
    found = run(store)
    dims = [d for d in range(len(shape)) if d != 1]
    norm = functools.partial(torch.linalg.vector_norm, dim=dims)
    errors = norm(found - plain) / norm(plain)  # [32]
    assert 0 < errors.max() < 0.3
    assert store.tally.num_guarded == 0


@pytest.mark.parametrize(
    ("fidelity", "ratio", "kind"),
    [
        (Fidelity.INT2, 150, "int2"),
        (Fidelity.INT2, 250, "int8"),
        (Fidelity.INT4, 900, "int4"),
        (Fidelity.INT4, 1100, "int8"),
        (Fidelity.INT8, 15_000, "int8"),
        (Fidelity.INT8, 18_000, "raw"),
        (Fidelity.BF16, 50, "bf16"),
        (Fidelity.BF16, 80, "raw"),
    ],
)
def test_a_mean_far_above_the_deviation_takes_more_bits(fidelity, ratio, kind):
    """For each level, its mean may be 64 times a row's deviation."""
    store = SavedTensorStore(lossy=fidelity, min_numel=1)
    x = torch.randn(8, 256)
    x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True, correction=0)
    x[3] += ratio
    with store.scope():
        y = F.layer_norm(Data.apply(x.requires_grad_()), (256,), eps=0.0)
    assert store.tally.entries[kind] >= 1
    assert store.tally.num_guarded == (kind != fidelity.name.lower())
    y.sum().backward()


def test_the_guard_reads_running_statistics_in_eval_mode():
    def kept(mean):
        store = SavedTensorStore(lossy=Fidelity.INT4, min_numel=1)
        weight = nn.Parameter(torch.ones(4))
        with store.scope():
            y = F.batch_norm(data(8, 4, 256), torch.full((4,), mean), torch.ones(4), weight, None, training=False)
        assert y.requires_grad
        return store.tally.entries

    assert kept(0.0)["int4"] == 1
    assert kept(5000.0)["int8"] == 1


def test_what_was_coded_before_a_normalisation_reads_it_is_coded_anew():
    def run(store=None):
        torch.manual_seed(0)
        first, second = nn.Linear(48, 48), nn.Linear(48, 48)
        sizes = 10.0 ** torch.tensor([0.0, -6, 3, -3])[:, None]
        h = first(data(6, 4, 48)) * sizes
        early = second(h) * torch.randn(6, 4, 48)
        loss = (F.layer_norm(h, (48,), eps=1e-30) * torch.randn(6, 4, 48)).sum() + early.mean() * 1e-9
        return first, second, loss

    plain_first, _, loss = run()
    loss.backward()
    store = SavedTensorStore(lossy=Fidelity.INT4, min_numel=1)
    with store.scope():
        first, _, loss = run()
    loss.backward()
    assert (first.weight.grad - plain_first.weight.grad).norm() < 0.3 * plain_first.weight.grad.norm()
    assert store.tally.held_bytes >= coded_bytes(6 * 4 * 48, 4, row=48)


def test_a_normalisation_never_reads_a_lossy_recomputation():
    """a + b is computed again from codes of a and b, whose noise does not know how small the sum is."""

    def run():
        torch.manual_seed(0)
        one, other = nn.Linear(64, 64), nn.Linear(64, 64)
        x = data(8, 64)
        a = one(x)
        b = other(x) * 0.001 - a.detach()
        pair = a * 1.0, b * 1.0
        kept = pair[0] * torch.randn(8, 64), pair[1] * torch.randn(8, 64)
        loss = (F.layer_norm(pair[0] + pair[1], (64,)) * torch.randn(8, 64)).sum() + 1e-9 * sum(k.sum() for k in kept)
        return [one, other], loss

    models, loss = run()
    loss.backward()
    plain = [model.weight.grad for model in models]
    store = SavedTensorStore(lossy=Fidelity.INT4, recompute=True, min_numel=1)
    with store.scope():
        models, loss = run()
    loss.backward()
    for model, expected in zip(models, plain, strict=True):
        assert (model.weight.grad - expected).norm() < 0.3 * expected.norm()


def test_weights_that_are_normalised_are_left_alone():
    """Weight standardisation: noise in a weight would go through every layer below."""
    weight, store = nn.Parameter(torch.randn(8, 3, 3, 3)), SavedTensorStore(lossy=Fidelity.INT4, min_numel=1)
    images = torch.randn(2, 3, 8, 8, requires_grad=True)
    with store.scope():
        standard = F.batch_norm(weight.view(1, 8, -1), None, None, training=True).view_as(weight)
        by_hand = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), keepdim=True)
        y = F.conv2d(Data.apply(images), standard) + F.conv2d(Data.apply(images), by_hand)
    assert store.tally.entries["int4"] == 2  # both inputs
    assert store.tally.plain_bytes - 2 * images.nbytes < weight.nbytes
    y.sum().backward()


def test_sharp_attention_keeps_bfloat16():
    def kept(change=lambda q: q, **options):
        store = SavedTensorStore(lossy=Fidelity.INT4, min_numel=1)
        with store.scope():
            query, key, value = (data(2, 4, 16, 32) for _ in range(3))
            y = F.scaled_dot_product_attention(change(query), key, value, **options)
            del query, key, value
        y.sum().backward()
        return store.tally.entries

    assert kept()["int8"] >= 3
    assert kept(scale=32**-0.5)["int8"] >= 3
    assert kept(scale=1.0)["bf16"] >= 3
    assert kept(lambda q: (q * 32**-0.5).transpose(1, 2).transpose(1, 2), scale=1.0)["int8"] >= 3
