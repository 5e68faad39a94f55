"""Inside of torch.func's transforms and of forward mode: everything is left alone, as tensors may have no memory."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from lightning_memsave import Checkpointing, apply_checkpointing
from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore


def jvp(net, x):
    y, tangent = torch.func.jvp(net, (x,), (torch.ones_like(x),))
    return y.square().mean() + tangent.square().mean()


def dual(net, x):
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch.ones_like(x))))
        return y.square().mean() + tangent.square().mean()


def zero_tangent(net, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net(forward_ad.make_dual(x, torch._efficientzerotensor(x.shape)))).primal.mean()


def vmap(net, x):
    return torch.func.vmap(net)(x).square().mean()


USES = {f.__name__: f for f in (jvp, dual, zero_tangent, vmap)}
VAULTS = {
    "exact": lambda: SavedTensorStore(recompute=True, min_numel=1),
    "int8": lambda: SavedTensorStore(lossy=Fidelity.INT8, min_numel=1),
    "exact and int4": lambda: SavedTensorStore(lossy=Fidelity.INT4, recompute=True, fuse=True, min_numel=1),
}


def gradients(use, scope, change=lambda net: None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    change(net)
    with scope:
        loss = use(net, torch.randn(5, 8))
    loss.backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("kind", VAULTS)
def test_a_store_leaves_transforms_alone(name, kind):
    plain = gradients(USES[name], contextlib.nullcontext())
    for found, expected in zip(gradients(USES[name], VAULTS[kind]().scope()), plain, strict=True):
        assert (found is None) == (expected is None)
        assert found is None or (found - expected).norm() <= 0.3 * expected.norm()
        assert found is None or kind != "exact" or torch.equal(found, expected)


@pytest.mark.parametrize("name", USES)
def test_regions_are_called_as_usual(name):
    def change(net):
        apply_checkpointing(net, Checkpointing(regions=(("0",), ("3",))))

    plain = gradients(USES[name], contextlib.nullcontext())
    found = gradients(USES[name], contextlib.nullcontext(), change)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(found, plain, strict=True))
