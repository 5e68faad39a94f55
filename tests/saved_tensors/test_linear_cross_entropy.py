"""The loss on a Linear's output, in chunks: the result is that of the whole."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memsave import ActivationCompression, Ledger
from lightning_memsave.saved_tensors import linear_cross_entropy as module
from lightning_memsave.saved_tensors.logits_form import Form, Map
from lightning_memsave.techniques.activation_compression import open_store

from .head_nets import BATCH, CLASSES, ROWS, TIME, both, head


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_cast_loss_keeps_its_digits(reduction, is_weighted, calls):
    """Logits of bfloat16, cast to float32 as transformers does: the loss must not be rounded to bfloat16."""
    model, x = head(torch.bfloat16)
    weight = torch.rand(CLASSES) + 0.5 if is_weighted else None
    rows = lambda z: z[:, :-1].float().reshape(-1, CLASSES)  # noqa: E731  # as in the table
    (plain_loss, plain), (loss, ours) = both(model, x, rows, reduction=reduction, weight=weight)
    assert len(calls) == 1
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=1e-6)
    assert (ours.float() - plain.float()).norm() <= 2e-2 * plain.float().norm()


def test_arguments_that_do_not_fit_are_refused_in_torchs_words(calls):
    model, x = head()
    store, _ = open_store(model, ActivationCompression(codecs=("linear-cross-entropy",)))
    target = torch.zeros(BATCH * TIME, dtype=torch.int64)
    with store.scope():
        logits = model(x)
        with pytest.raises(ValueError, match="batch_size"):
            F.cross_entropy(logits[:, :-1].flatten(0, 1), target)
        with pytest.raises(RuntimeError, match="weight tensor"):
            F.cross_entropy(logits.flatten(0, 1), target, weight=torch.ones(CLASSES + 5))
    assert calls == []


def test_an_infinite_loss_stays_infinite(calls):
    model, x = head(torch.bfloat16)
    with torch.no_grad():
        model[2].bias[7] = -torch.inf
    (plain_loss, _), (loss, _) = both(model, x, lambda z: z.float().flatten(0, 1), reduction="none")
    assert calls
    assert plain_loss.isinf().any()
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_classes", [100, 1000, 10_000])
def test_gradients_in_bfloat16_are_rounded_a_few_times_only(num_classes, calls):
    """Against float64: no worse than twice what plain bfloat16 is off."""
    torch.manual_seed(0)
    x, target = torch.randn(1024, 16), torch.randint(num_classes, (1024,))
    model = nn.Sequential(nn.Linear(16, num_classes)).bfloat16()
    store, _ = open_store(model, ActivationCompression(codecs=("linear-cross-entropy",)))

    def gradient(model, x, scope):
        model.zero_grad()
        with scope:
            loss = F.cross_entropy(model(x).double(), target)
        loss.backward()
        return model[0].weight.grad.double().clone()

    exact = gradient(copy.deepcopy(model).double(), x.bfloat16().double(), contextlib.nullcontext())
    plain, ours = (gradient(model, x.bfloat16(), scope) for scope in (contextlib.nullcontext(), store.scope()))
    assert len(calls) == 1
    assert (ours - exact).norm() <= 2 * (plain - exact).norm()


def test_float16_takes_a_scaled_loss(calls):
    """Against float64: gradients that would be zero without the scale."""
    model, x = head(torch.float16)
    exact_model, scale = copy.deepcopy(model).double(), 2.0**14
    target = torch.arange(BATCH * TIME)

    def gradient(model, x, scope, scale):
        model.zero_grad()
        with scope:
            loss = F.cross_entropy(model(x).flatten(0, 1).to(torch.promote_types(x.dtype, torch.float32)), target)
        (loss * scale).backward()
        return model[2].weight.grad.double() / scale

    store, _ = open_store(model, ActivationCompression(codecs=("linear-cross-entropy",)))
    exact = gradient(exact_model, x.double(), contextlib.nullcontext(), 1.0)
    plain = gradient(model, x, contextlib.nullcontext(), scale).clone()
    ours = gradient(model, x, store.scope(), scale)
    assert len(calls) == 1
    assert (ours - exact).norm() <= 1.1 * (plain - exact).norm()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.usefixtures("chunk_numel")
def test_every_option_of_the_loss(reduction, is_weighted, label_smoothing, calls):
    model, x = head(torch.float64)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    options["weight"] = torch.rand(CLASSES, dtype=torch.float64) + 0.5 if is_weighted else None
    (plain_loss, plain), (loss, ours) = both(model, x, ROWS["all"], **options)
    assert len(calls) == 1
    torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype, calls):
    """Weights of float32, or of bfloat16 as low precision has them; against float64."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2000)).to(dtype)
    x, target = torch.randn(128, 64), torch.randint(2000, (128,))
    store, _ = open_store(model, ActivationCompression(codecs=("linear-cross-entropy",)))

    def found(model, x, scope, enabled=True):
        model.zero_grad()
        with scope, torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = F.cross_entropy(model(x), target, label_smoothing=0.1)
        loss.backward()
        return loss, torch.cat([p.grad.flatten().double() for p in model.parameters()])

    _, exact = found(copy.deepcopy(model).double(), x.double(), contextlib.nullcontext(), enabled=False)
    plain_loss, plain = found(model, x, contextlib.nullcontext())
    loss, ours = found(model, x, store.scope())
    assert len(calls) == 1
    assert loss.dtype == plain_loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain_loss, rtol=1e-5, atol=0)
    assert (ours - exact).norm() <= 1.1 * (plain - exact).norm()


def test_a_loss_of_no_sample_is_nan(calls):
    model, x = head()
    store, _ = open_store(model, ActivationCompression(codecs=("linear-cross-entropy",)))
    with store.scope():
        loss = F.cross_entropy(model(x).flatten(0, 1), torch.full((BATCH * TIME,), -100))
    assert calls
    assert loss.isnan()


def test_two_backwards_and_gradients_of_gradients(calls):
    model, x = head(torch.float64)
    store, _ = open_store(model, ActivationCompression(codecs=("linear-cross-entropy",)))
    target = torch.arange(BATCH * TIME) % CLASSES
    weights = [*model.parameters()]

    def loss_of(scope):
        with scope:
            return F.cross_entropy(model(x).flatten(0, 1), target, label_smoothing=0.1)

    def second(scope):
        first = torch.autograd.grad(loss_of(scope), weights, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), weights)

    for ours, plain in zip(second(store.scope()), second(contextlib.nullcontext()), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-14)
    loss = loss_of(store.scope())
    once = torch.autograd.grad(loss, weights, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(once, torch.autograd.grad(loss, weights), strict=True))
    assert len(calls) == 2


def test_what_is_kept_and_what_backward_makes(calls):
    """Log-sums are kept; backward makes the gradients and a few chunks, where plain torch makes 41 MB twice."""
    model, target = nn.Linear(16, 40_000, bias=False), torch.arange(256)
    h = torch.randn(256, 16, requires_grad=True)
    store, _ = open_store(model, ActivationCompression(codecs=("linear-cross-entropy",)))
    with Ledger().watching(model, batch=h) as ledger:
        with store.scope():
            loss = F.cross_entropy(model(h), target, label_smoothing=0.1)
        kept = ledger.live_bytes - model.weight.nbytes - h.nbytes
    assert calls
    assert kept == loss.nbytes + 256 * (8 + 4) + 4  # targets, log-sums, divisor
    with Ledger().watching(model, batch=h) as ledger:
        loss.backward()
    made = ledger.measurement.peak_bytes - ledger.measurement.held_bytes - model.weight.nbytes - 2 * h.nbytes
    assert 0 < made <= 3 * 4 * module.CHUNK_NUMEL["cpu"]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("is_curved", [False, True])
def test_gradcheck(reduction, is_weighted, is_curved, monkeypatch):
    monkeypatch.setitem(module.CHUNK_NUMEL, "cpu", 3 * 5)
    torch.manual_seed(0)
    shapes = {"rows": (5, 2), "weight": (7, 2), "bias": (7,)}
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes.values()]
    target = torch.tensor([0, 6, -100, 3, 3])
    by_class = torch.rand(7, dtype=torch.float64) + 0.5 if is_weighted else None

    form = Form(1, torch.float64)
    if is_curved:
        for func, *args in (torch.mul, 2), (torch.add, torch.arange(7.0, dtype=torch.float64)), (torch.tanh,):
            form = form.then(Map(func, tuple(args)), torch.float64)

    def loss(*head):
        options, logits = module.Options(by_class, -100, reduction, 0.1), F.linear(*head).detach()
        return module._LinearCrossEntropy.apply(*head, form if is_curved else logits, target, options)

    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_own_loss_keeps_no_log_probabilities(dtype, is_tied, calls):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=2000, use_cache=False, tie_word_embeddings=is_tied)).to(
        dtype
    )
    ids = torch.randint(0, 2000, (4, 64))

    def peak(store):
        model.zero_grad()
        with Ledger().watching(model, []) as ledger:
            if store is None:
                loss = model(input_ids=ids, labels=ids).loss
            else:
                with store.scope():
                    loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        return ledger.measurement.peak_bytes

    store, _ = open_store(model, ActivationCompression(codecs=("linear-cross-entropy",)))
    saved = peak(None) - peak(store)
    assert calls
    assert saved >= 4 * 64 * 2000 * 4  # float32, as the loss casts
