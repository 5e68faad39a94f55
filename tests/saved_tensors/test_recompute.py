"""Chains of recomputations: how deep they go, what they may start from, and what is kept for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.saved_tensors import Fidelity, SavedTensorStore
from lightning_memsave.saved_tensors.recompute import MAX_DEPTH
from tests.saved_tensors.nets import Block, Data, assert_same_bits, data, exact, gradients, parameter, same_bits


def test_the_depth_of_a_chain_is_bounded(monkeypatch):
    calls = []
    plain = torch.nn.functional.gelu
    weights = [parameter(8, 8) for _ in range(50)]

    def forward(h):
        total = 0
        for weight in weights:
            h = plain(h)
            total = total + h @ weight  # keeps h, which follows from the one before
        return total

    store = exact()
    leaf = torch.randn(4, 8, requires_grad=True)
    with store.scope():
        out = forward(Data.apply(leaf))
    depths = {entry.encoding.depth for entry in _entries_of(out) if entry.encoding.kind == "recomputed"}
    assert max(depths) == MAX_DEPTH
    assert store.tally.entries["raw"] == -(-51 // (MAX_DEPTH + 1))
    monkeypatch.setitem(torch.nn.functional.__dict__, "gelu", lambda *a, **k: calls.append(1) or plain(*a, **k))
    (grad,) = torch.autograd.grad(out.sum(), leaf)
    out = forward(Data.apply(leaf))
    assert torch.equal(torch.autograd.grad(out.sum(), leaf)[0], grad)


def _entries_of(out):
    """Entries that the graph behind `out` holds."""
    found, seen, nodes = [], set(), [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [n for n, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                kept = getattr(node, name)
                entry = getattr(getattr(kept, "data", None), "entry", None)
                found += [entry] if entry is not None else []
    return found


def test_nothing_is_kept_for_a_recomputation_alone():
    """exp keeps its result; its input would have to be kept only to compute the result again."""
    weight = parameter(8, 8)
    store = exact()
    tally = same_bits(lambda h: (h + 1.5) @ weight, torch.randn(15, 8), weight, store=store)
    assert tally.entries == {"raw": 1}  # h itself is kept by nobody else
    assert tally.held_bytes == 15 * 8 * 4


def test_a_mask_is_no_source():
    """relu keeps a bit of y: y + y cannot come from it, and y is not kept for that."""
    weight = parameter(8, 8)
    tally = same_bits(lambda h: (F.relu(h) + 1.5) @ weight, torch.randn(64, 8), weight)
    assert tally.entries == {"1-bit mask": 1, "raw": 1}


def test_a_lossy_source_is_no_source_for_what_is_not_linear_in_it():
    weight = parameter(8, 8)
    store = SavedTensorStore(lossy=Fidelity.INT4, recompute=True, min_numel=1)
    with store.scope():
        out = Data.apply(F.mish(data(64, 8)) @ weight)
    assert store.tally.entries == {"int4": 1, "int4 derivative": 1}
    with store.scope():
        h = data(64, 8)
        out = Data.apply((h @ weight) + (h * 2) @ weight)
        del h
    assert store.tally.entries == {"int4": 1, "recomputed": 1}
    out.sum().backward()


CURVED = {"gelu": F.gelu, "gelu, tanh": lambda h: F.gelu(h, approximate="tanh"), "silu": F.silu}


def two_layers(activation, store, x, first, second):
    with torch.enable_grad() if store is None else store.scope():
        out = Data.apply(activation(Data.apply(x) @ first) @ second)
    return torch.autograd.grad(out.square().sum(), [x, first, second])


@pytest.mark.parametrize("name", CURVED)
@pytest.mark.parametrize(("fidelity", "bound", "bias"), [(Fidelity.INT8, 0.01, 0.0005), (Fidelity.INT4, 0.2, 0.01)])
def test_an_activation_is_computed_again_from_one_code(name, fidelity, bound, bias):
    """Its input and its result take one code: at 8 bits 1.016 bytes per element of each row of 256, at 4 bits 0.516."""
    first, second = parameter(64, 256), parameter(256, 64)
    x = torch.randn(128, 64, requires_grad=True)
    with torch.no_grad():
        first.mul_(0.125)
    plain = two_layers(CURVED[name], None, x, first, second)
    store = SavedTensorStore(lossy=fidelity, recompute=True, min_numel=1)
    draws = [two_layers(CURVED[name], store, x, first, second) for _ in range(64)]
    kind, per_row = ("int8", 256 + 4) if fidelity == Fidelity.INT8 else ("int4", 128 + 4)
    assert store.tally.entries == {kind: 2, "recomputed": 1}
    assert store.tally.held_bytes == 128 * per_row + 128 * (per_row - 4) // 4 + 128 * 4  # of x: a row has 64
    for grad, *found in zip(plain, *draws, strict=True):
        assert all((g - grad).norm() < bound * grad.norm() for g in found)
        error = (sum((g - grad).square().sum() for g in found) / len(found) / grad.square().sum()).sqrt()
        mean = (sum(found) / len(found) - grad).norm() / grad.norm()
        assert mean.square() - error.square() / len(found) < bias**2, (mean, error)


def test_codes_of_two_bits_are_no_source_for_an_activation():
    store = SavedTensorStore(lossy=Fidelity.INT2, recompute=True, min_numel=1)
    with store.scope():
        out = Data.apply(F.gelu(data(64, 8)) @ parameter(8, 8))
    assert store.tally.entries == {"int2": 1, "int2 derivative": 1}
    out.sum().backward()


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_from_a_lossy_input_is_that_of_the_input(weight, bias):
    """The linear encoding, with the statistics of forward: 8 bits move the result by a few of its steps."""
    w, b = parameter(64) if weight else None, parameter(64) if bias else None
    linear, x = parameter(8, 64), torch.randn(32, 64) * 2 + 1
    grads = []
    for store in (SavedTensorStore(min_numel=1), SavedTensorStore(lossy=Fidelity.INT8, recompute=True, min_numel=1)):
        with store.scope():
            out = Data.apply(F.linear(F.layer_norm(Data.apply(x.clone().requires_grad_()), (64,), w, b), linear))
        grads.append(torch.autograd.grad(out.sum(), linear)[0])
    assert store.tally.entries["recomputed"] == 1
    assert float((grads[1] - grads[0]).norm() / grads[0].norm()) < 0.02


def test_a_block_keeps_half():
    """Two convolutions and two normalisations keep one tensor each: the normalisations' inputs; plain torch keeps 4."""
    model, x = nn.Sequential(nn.Conv2d(8, 8, 1), Block()), torch.randn(2, 8, 16, 16)
    plain, store = gradients(model, x), exact()
    assert_same_bits(gradients(model, x, store), plain)
    assert store.tally.entries == {"raw": 2, "recomputed": 2}
    assert store.tally.held_bytes == 2 * x.nbytes
    assert store.tally.plain_bytes == 4 * x.nbytes
