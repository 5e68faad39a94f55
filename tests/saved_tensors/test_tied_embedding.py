"""A table that embeds and scores: its gradient is that of plain torch, and two tables at most."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave import ActivationCompression, Ledger
from lightning_memsave.saved_tensors import linear_cross_entropy as module
from lightning_memsave.techniques.activation_compression import open_store

from .head_nets import BATCH, CLASSES, TIME, WIDTH


class Tied(nn.Module):
    """A table that embeds and scores."""

    def __init__(self, dtype=torch.float64, num_tokens=CLASSES):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.middle = nn.Embedding(num_tokens, WIDTH).to(dtype), nn.Linear(WIDTH, WIDTH).to(dtype)

    def forward(self, tokens):
        return F.linear(self.middle(self.table(tokens)), self.table.weight)


def tied_gradients(store, loss_of=None, model=None, **options):
    model = model or Tied()
    tokens = torch.arange(BATCH * TIME).view(BATCH, TIME) * 5 % CLASSES
    with store.scope() if store else contextlib.nullcontext():
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(-1), label_smoothing=0.1)
        loss = loss if loss_of is None else loss_of(model, tokens, loss)
    return torch.autograd.grad(loss, [*model.parameters()], **options), loss, model


LOSSES = {
    "the loss": None,
    "another lookup": lambda model, tokens, loss: loss + model.table(tokens + 1).square().sum(),
    "another head": lambda model, tokens, loss: (
        loss + F.cross_entropy(F.linear(model.table(tokens), model.table.weight).flatten(0, 1), tokens.flatten())
    ),
    "two losses of one head": lambda model, tokens, loss: (
        loss + 2 * F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_tied_table(name, calls):
    store, _ = open_store(Tied(), ActivationCompression(codecs=("linear-cross-entropy",)))
    ours, plain = (tied_gradients(v, LOSSES[name])[0] for v in (store, None))
    assert calls
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


def test_a_tied_table_whose_embedding_has_no_backward(calls):
    """What is behind the head is frozen, or only the head's part is asked for."""
    store, _ = open_store(Tied(), ActivationCompression(codecs=("linear-cross-entropy",)))

    def gradients(store):
        model, tokens = Tied(), torch.arange(BATCH * TIME)
        with store.scope() if store else contextlib.nullcontext():
            h = model.middle(model.table(tokens)).detach().requires_grad_()
            loss = F.cross_entropy(F.linear(h, model.table.weight), tokens)
        return torch.autograd.grad(loss, [model.table.weight, h])

    for a, b in zip(gradients(store), gradients(None), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)
    assert calls


def test_a_tied_table_twice_backwards(calls):
    store, _ = open_store(Tied(), ActivationCompression(codecs=("linear-cross-entropy",)))
    first, loss, model = tied_gradients(store, retain_graph=True)
    second = torch.autograd.grad(loss, [*model.parameters()])
    assert calls
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_gradients_of_gradients_of_a_tied_table(calls):
    store, _ = open_store(Tied(), ActivationCompression(codecs=("linear-cross-entropy",)))

    def second(store):
        first, _, model = tied_gradients(store, create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), [*model.parameters()])]

    for ours, plain in zip(second(store), second(None), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-14)
    assert calls


def tied_parts(store, embed=None, between=lambda e: e):
    """A tied model's loss, another one of its embedding, and what they are made of."""
    model, tokens = Tied(), torch.arange(BATCH * TIME)
    with store.scope() if store else contextlib.nullcontext():
        e = (embed or F.embedding)(tokens, model.table.weight)
        h = model.middle(between(e))
        loss = F.cross_entropy(F.linear(h, model.table.weight), tokens.roll(-1))
        other = e.square().sum()
    return model.table.weight, e, h, loss, other


def raises(_):
    raise KeyError("in the middle of a backward pass")


def test_what_waited_in_a_pass_that_failed_is_not_added_to_another(calls):
    store, _ = open_store(Tied(), ActivationCompression(codecs=("linear-cross-entropy",)))
    weight, _, h, loss, other = tied_parts(store)
    h.register_hook(raises)
    with pytest.raises(KeyError):
        torch.autograd.grad(loss, weight, retain_graph=True)
    found = torch.autograd.grad(other, weight)[0]
    plain = tied_parts(None)
    torch.testing.assert_close(found, torch.autograd.grad(plain[-1], plain[0])[0], rtol=1e-12, atol=0)
    assert calls


def test_passes_that_ask_for_parts_of_a_tied_graph(calls):
    """One after the other through one graph; none leaves something to the next."""
    store, _ = open_store(Tied(), ActivationCompression(codecs=("linear-cross-entropy",)))

    def passes(store):
        weight, e, h, loss, other = tied_parts(store)
        asked = (
            (loss, e),
            (other, weight),
            (loss, weight),
            (loss, weight),
            (loss, h),
            (other + loss, weight),
            (loss, e),
        )
        return [torch.autograd.grad(of, to, retain_graph=True)[0] for of, to in asked]

    for ours, plain in zip(passes(store), passes(None), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-14)
    assert calls


@pytest.mark.parametrize("options", [{"sparse": True}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_kinds_of_embeddings_of_a_tied_table(options, calls):
    store, _ = open_store(Tied(), ActivationCompression(codecs=("linear-cross-entropy",)))

    def gradient(store):
        weight, *_, loss, other = tied_parts(store, lambda tokens, weight: F.embedding(tokens, weight, **options))
        return torch.autograd.grad(loss + other, weight)[0]

    torch.testing.assert_close(gradient(store), gradient(None), rtol=1e-11, atol=1e-14)
    assert calls


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_an_embedding_to_which_no_gradient_comes_is_told(calls):
    store, _ = open_store(Tied(), ActivationCompression(codecs=("linear-cross-entropy",)))
    weight, *_, loss, _ = tied_parts(store, between=NoGradient.apply)
    with pytest.raises(RuntimeError, match=r"Leave .* out"):
        torch.autograd.grad(loss, weight)
    assert calls


def test_heads_of_one_table_wait_together(calls):
    """Eight losses of one table hold no more tables than one."""
    store, _ = open_store(Tied(), ActivationCompression(codecs=("linear-cross-entropy",)))
    model, tokens = Tied(torch.float32, 40_000), torch.arange(64)

    def peak(num_losses):
        model.zero_grad()
        with store.scope():
            h = model.middle(model.table(tokens))
            losses = [F.cross_entropy(F.linear(h, model.table.weight), tokens + i) for i in range(num_losses)]
        with Ledger().watching(model) as ledger:
            sum(losses).backward()
        return ledger.measurement.peak_bytes

    assert peak(8) < peak(2) + 0.1 * model.table.weight.nbytes
    assert peak(8) < 3.2 * model.table.weight.nbytes + 3 * 4 * module.CHUNK_NUMEL["cpu"]


def test_a_graph_of_a_tied_table_dies(calls):
    store, _ = open_store(Tied(), ActivationCompression(codecs=("linear-cross-entropy",)))
    gc.disable()
    try:
        with Ledger() as ledger:
            before = ledger.live_bytes
            tied_gradients(store)
            assert ledger.live_bytes == before
    finally:
        gc.enable()
    assert calls


def test_gradients_of_a_tied_table_are_two_at_most(calls):
    """Plain torch has three of them where the engine adds two."""
    model, tokens = Tied(torch.float32, 40_000), torch.arange(64)
    table_bytes = model.table.weight.nbytes

    def peak(store):
        model.zero_grad()
        with store.scope() if store else contextlib.nullcontext():
            loss = F.cross_entropy(model(tokens), tokens)
        with Ledger().watching(model) as ledger:
            loss.backward()
        return ledger.measurement.peak_bytes

    store, _ = open_store(model, ActivationCompression(codecs=("linear-cross-entropy",)))
    assert peak(None) >= 4 * table_bytes  # the weight is one
    assert 3 * table_bytes < peak(store) < 3.1 * table_bytes + 3 * 4 * module.CHUNK_NUMEL["cpu"]
    assert calls
