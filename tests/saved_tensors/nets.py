"""Subjects of the store's tests, and their referee: plain autograd with the same random numbers."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn

from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore


class Data(torch.autograd.Function):
    """The same numbers, no longer a leaf: what is computed from weights alone is left alone."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def data(*shape, dtype=torch.float32):
    """A tensor that needs a gradient and is no weight."""
    return Data.apply(torch.randn(*shape, dtype=dtype, requires_grad=True))


def exact(**options):
    return SavedTensorStore(recompute=True, min_numel=1, **options)


def int8(**options):
    return SavedTensorStore(lossy=Fidelity.INT8, min_numel=1, **options)


def int4(**options):
    return SavedTensorStore(lossy=Fidelity.INT4, min_numel=1, **options)


def gradients(model, x, store=None, autocast=False):
    """Loss, all gradients and buffers of one step of a copy; the loss stands outside of the scope."""
    torch.manual_seed(1)
    model = copy.deepcopy(model)
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    scope = contextlib.nullcontext() if store is None else store.scope()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), scope:
        out = model(x)
        out = out[0] if isinstance(out, tuple) else out
    loss = out.float().square().mean() if not out.is_complex() else out.abs().square().mean()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach(), "x": x.grad, **grads, **{n: b.clone() for n, b in model.named_buffers()}}


def same_bits(function, x, *parameters, store=None, autocast=False, layout=None):
    """The store's tally, after its gradients were found equal to plain autograd's, to the bit."""
    store, both = store or exact(), []
    for scope in (torch.enable_grad(), store.scope()):
        torch.manual_seed(3)
        leaf = x.clone(memory_format=layout or torch.preserve_format).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), scope:
            out = Data.apply(function(Data.apply(leaf)))
        both.append(torch.autograd.grad(out.float().square().sum(), [leaf, *parameters]))
    assert all(torch.equal(a, b) for a, b in zip(*both, strict=True))
    return store.tally


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape))


def assert_same_bits(ours, plain):
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        assert (ours[name] is None) == (value is None), name
        assert value is None or torch.equal(ours[name], value), name


def relative_error(ours, plain):
    a, b = (torch.cat([g[n].view(-1) for n in plain if g[n] is not None and n != "loss"]) for g in (ours, plain))
    return float((a - b).norm() / b.norm())


class Block(nn.Module):
    """BatchNorm, ReLU and convolution around a residual sum."""

    def __init__(self, width=8, inplace=False, norm=nn.BatchNorm2d):
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.relu = nn.ReLU(inplace)

    def forward(self, x):
        y = self.conv1(self.relu(self.norm1(x)))
        return x + self.conv2(self.relu(self.norm2(y)))


def cnn(**options):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        *(Block(**options) for _ in range(2)),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(5),
    )


class Attention(nn.Module):
    """A transformer block with dropout, causal or with a mask."""

    def __init__(self, width=16, heads=2, p=0.1):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.heads, self.p = nn.Linear(width, 3 * width), nn.Linear(width, width), heads, p
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width), nn.Dropout(p))

    def forward(self, x, mask=None):
        b, t, _ = x.shape
        q, k, v = (s.view(b, t, self.heads, -1).transpose(1, 2) for s in self.qkv(self.norm1(x)).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, self.p, is_causal=mask is None)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))
