"""The loss on a Linear's output, in chunks: which logits are recognised, and that the result is that of the whole."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memsave import ActivationCompression, Ledger
from lightning_memsave.techniques.activation_compression import open_vault

BATCH, TIME, WIDTH, CLASSES = 4, 16, 8, 400
ROWS = {
    "all": lambda z: z.flatten(0, 1),
    "but the last": lambda z: z[:, :-1].flatten(0, 1),
    "but the last, contiguous": lambda z: z[..., :-1, :].contiguous().view(-1, CLASSES),
    "but the first": lambda z: z[:, 1:].reshape(-1, CLASSES),
    "every second of some": lambda z: z[1:, ::2].reshape(-1, CLASSES),
    "strided": lambda z: z.flatten(0, 1)[::3],
    "viewed twice": lambda z: z.view(2, BATCH * TIME // 2, CLASSES)[:, 3:].reshape(-1, CLASSES),
    "cast": lambda z: z.double().flatten(0, 1),
    "cast slices": lambda z: z[:, :-1].double().reshape(-1, CLASSES),
}
OTHERS = {
    "of some classes": lambda z: z[..., : CLASSES // 2].reshape(-1, CLASSES // 2),
    "other rows": lambda z: z.reshape(-1, CLASSES // 2),
    "scaled": lambda z: (2 * z).flatten(0, 1),
    "transposed": lambda z: z.transpose(0, 1).reshape(-1, CLASSES),
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


def head(dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES, bias=bias)).to(dtype)
    return model, torch.randn(BATCH, TIME, WIDTH, dtype=dtype)


@pytest.fixture
def calls(monkeypatch):
    """The shapes of the inputs that were computed in chunks."""
    seen, chunked = [], F.linear_cross_entropy

    def counted(rows, *args, **options):
        seen.append(tuple(rows.shape))
        return chunked(rows, *args, **options)

    monkeypatch.setattr(F, "linear_cross_entropy", counted)
    return seen


def step(model, x, rows, vault=None, **options):
    """The loss and the gradients of one step."""
    model.zero_grad()

    def loss_of():
        logits = rows(model(x))
        target = torch.arange(len(logits)) % logits.shape[1]
        target[::5] = -100
        return F.cross_entropy(logits, target, **options)

    if vault is None:
        loss = loss_of()
    else:
        with vault.scope():
            loss = loss_of()
    loss.sum().backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def both(model, x, rows, **options):
    vault, _ = open_vault(model, ActivationCompression(codecs=("linear-cross-entropy",)))
    return step(model, x, rows, **options), step(model, x, rows, vault, **options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", ROWS)
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
    vault, _ = open_vault(model, ActivationCompression(codecs=("linear-cross-entropy",)))
    target = torch.zeros(BATCH * TIME, dtype=torch.int64)
    with vault.scope():
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
    vault, _ = open_vault(model, ActivationCompression(codecs=("linear-cross-entropy",)))

    def gradient(model, x, scope):
        model.zero_grad()
        with scope:
            loss = F.cross_entropy(model(x).double(), target)
        loss.backward()
        return model[0].weight.grad.double().clone()

    exact = gradient(copy.deepcopy(model).double(), x.bfloat16().double(), contextlib.nullcontext())
    plain, ours = (gradient(model, x.bfloat16(), scope) for scope in (contextlib.nullcontext(), vault.scope()))
    assert len(calls) == 1
    assert (ours - exact).norm() <= 2 * (plain - exact).norm()


def test_float16_is_left_alone_as_a_scale_of_the_loss_would_come_too_late(calls):
    model, x = head(torch.float16)
    for rows in (lambda z: z.flatten(0, 1), lambda z: z.float().flatten(0, 1)):
        (_, plain), (_, ours) = both(model, x, rows)
        assert torch.equal(ours, plain)
    assert calls == []


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_own_loss_keeps_no_log_probabilities(dtype, is_tied, calls):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=2000, use_cache=False, tie_word_embeddings=is_tied)).to(
        dtype
    )
    ids = torch.randint(0, 2000, (4, 64))

    def peak(vault):
        model.zero_grad()
        with Ledger().watching(model, []) as ledger:
            if vault is None:
                loss = model(input_ids=ids, labels=ids).loss
            else:
                with vault.scope():
                    loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        return ledger.measurement.peak_bytes

    vault, _ = open_vault(model, ActivationCompression(codecs=("linear-cross-entropy",)))
    saved = peak(None) - peak(vault)
    assert calls
    assert saved >= 4 * 64 * 2000 * 4  # float32, as the loss casts
