"""Inside of torch.func's transforms and of forward mode: everything is left alone, as tensors may have no memory."""

from __future__ import annotations

import contextlib

import lightning as L
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from lightning_memsave import Checkpointing, MemSave, NoEffectWarning, Sparsity, apply_checkpointing, apply_sparsity
from lightning_memsave.measuring.storages import storages
from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore
from tests.harness import assert_same_run, fit


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


class Mapped(L.LightningModule):
    """Calls its blocks under `vmap`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))

    def body(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x

    def training_step(self, batch, batch_idx):
        return torch.func.vmap(self.body)(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("method", ["sqrt", "recursive", "blocks"])
def test_regions_are_left_alone_as_well(method):
    data = [torch.randn(8, 16, 32) for _ in range(3)]
    plain = fit(Mapped(), data)
    says = contextlib.nullcontext() if method == "blocks" else pytest.warns(NoEffectWarning, match="had no effect")
    with says:  # calls in a transform are no candidates for a plan
        ours = fit(Mapped(), data, MemSave(checkpointing=method, summary=False))
    assert_same_run(plain, ours, 0)


def test_storages_of_what_a_transform_has_wrapped_are_not_told():
    found = []
    torch.func.vmap(lambda row: found.append(list(storages(row))) or row)(torch.randn(2, 3))
    assert found == [[]]


def test_sparse_weights_are_dense_ones_under_vmap_and_a_clear_error_where_they_are_differentiated():
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 64), torch.randn(5, 32)
    model = nn.Sequential(layer)
    apply_sparsity(model, Sparsity(sparsity=0.5, min_size=1))
    torch.func.vmap(model)(x).square().sum().backward()
    weight = layer.layout.dense(layer.values.detach()).requires_grad_()
    plain = nn.functional.linear(x, weight, layer.bias.detach()).square().sum()
    expected = layer.layout.compact(torch.autograd.grad(plain, weight)[0])
    assert torch.allclose(layer.values.grad, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"Sparse weights cannot be differentiated by torch\.func"):
        torch.func.grad(lambda given: model(given).square().sum())(x)
