"""Logits that are rows of a Linear's output, and those that are something else."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import ActivationCompression
from lightning_memsave.techniques.activation_compression import open_store

from .head_nets import CLASSES, ROWS, WIDTH, both, head

OTHERS = {
    "of some classes": lambda z: z[..., : CLASSES // 2].reshape(-1, CLASSES // 2),
    "other rows": lambda z: z.reshape(-1, CLASSES // 2),
    "squared": lambda z: (z * z).flatten(0, 1),
    "narrower": lambda z: z.bfloat16().flatten(0, 1),
    "narrower in between": lambda z: z.bfloat16().float().flatten(0, 1),
    "sliced by no position": lambda z: torch.ops.aten.slice.Tensor(z, 2, None, CLASSES - 1).reshape(-1, CLASSES - 1),
}


def hooked(z):
    z.register_hook(lambda gradient: 3 * gradient)
    return z[:, :-1].flatten(0, 1)


def masked(z):
    with torch.no_grad():
        z[..., CLASSES // 2 :] = -1e4
    return z[:, :-1].contiguous().view(-1, CLASSES)


def masked_data(z):
    z.data[..., CLASSES // 2 :] = -1e4
    return z.double().flatten(0, 1)


TOUCHED = {"hooked": hooked, "masked": masked, "masked through .data": masked_data}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.usefixtures("chunk_numel")
def test_rows_of_a_linear_are_recognised(rows, bias, calls):
    model, x = head(bias=bias)
    (plain_loss, plain), (loss, ours) = both(model, x, ROWS[rows])
    assert calls == [(len(ROWS[rows](model(x))), WIDTH)]
    assert loss.dtype == plain_loss.dtype
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    assert (ours - plain).norm() <= 2e-6 * plain.norm()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", OTHERS | TOUCHED)
def test_other_logits_are_left_alone(rows, bias, calls):
    model, x = head(bias=bias)
    (plain_loss, plain), (loss, ours) = both(model, x, (OTHERS | TOUCHED)[rows])
    assert calls == []
    assert torch.equal(loss, plain_loss)
    assert torch.equal(ours, plain)


def test_other_orders_of_rows_are_recognised_before_they_exist(calls, is_deferred):
    model, x = head()
    (plain_loss, plain), (loss, ours) = both(model, x, lambda z: z.transpose(0, 1).reshape(-1, CLASSES))
    assert len(calls) == is_deferred
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    assert (ours - plain).norm() <= 2e-6 * plain.norm()


@pytest.mark.parametrize("has_autocast", [False, True])
def test_the_input_of_a_head_is_taken_before_it_is_coded(has_autocast, calls):
    """A lossy store codes what a normalisation before the head follows from; the head's gradient is exact still."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    model, x = nn.Sequential(*blocks, nn.LayerNorm(64), nn.Linear(64, 1000)), torch.randn(32, 4, 64)
    target = torch.arange(128)
    store, _ = open_store(model, ActivationCompression(codecs=("exact", "int4", "linear-cross-entropy")))

    def gradient(scope):
        model.zero_grad()
        with scope, torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            loss = F.cross_entropy(model(x).flatten(0, 1), target)
        loss.backward()
        return model[-1].weight.grad.clone()

    plain, ours = gradient(contextlib.nullcontext()), gradient(store.scope())
    assert len(calls) == 1
    assert (ours - plain).norm() <= (1e-2 if has_autocast else 1e-6) * plain.norm()
    assert store._calls.latest_input is None


@torch.no_grad()
def doubled(head, h):
    h.mul_(2)


@torch.no_grad()
def with_other_weights(head, h):
    head.weight.mul_(2)


@torch.no_grad()
def with_another_bias(head, h):
    head.bias.add_(1)


def with_other_data(head, h):
    head.weight.data = 2 * head.weight.data


@pytest.mark.parametrize("change", [doubled, with_other_weights, with_another_bias, with_other_data])
@pytest.mark.parametrize("codecs", [("linear-cross-entropy",), ("exact", "int4", "linear-cross-entropy")])
def test_what_changes_between_head_and_loss_leaves_the_loss_to_torch(change, codecs, calls, is_deferred):
    torch.manual_seed(0)
    norm, head, x = nn.LayerNorm(64), nn.Linear(64, 1000), torch.randn(128, 64)
    store, _ = open_store(nn.Sequential(norm, head), ActivationCompression(codecs=codecs))
    with store.scope():
        h = norm(x)
        logits = head(h)
        for _ in range(3):
            x = (x + nn.functional.silu(h)).sigmoid()  # pushes what waits to be coded out
        weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
        values = h.detach().clone()
        change(head, h)
        if is_deferred and change is not with_other_data:  # who asks for `.data` has the logits computed first
            with pytest.raises(RuntimeError, match="has changed"):
                F.cross_entropy(logits, torch.arange(128))
        else:
            loss = F.cross_entropy(logits, torch.arange(128))
    assert calls == []
    if not is_deferred or change is with_other_data:
        expected = F.cross_entropy(F.linear(values, weight, bias), torch.arange(128))
        torch.testing.assert_close(loss.detach(), expected)
