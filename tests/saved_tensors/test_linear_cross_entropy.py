"""The loss on a Linear's output, in chunks: which logits are recognised, and that the result is that of the whole."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memsave import ActivationCompression, Ledger
from lightning_memsave.saved_tensors import linear_cross_entropy as module
from lightning_memsave.techniques.activation_compression import open_store

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
    """The shapes of the inputs whose loss was answered."""
    seen, forward = [], module._LinearCrossEntropy.forward

    def counted(ctx, rows, *args):
        seen.append(tuple(rows.shape))
        return forward(ctx, rows, *args)

    monkeypatch.setattr(module._LinearCrossEntropy, "forward", counted)
    return seen


@pytest.fixture(params=[2**18, 7 * BATCH * TIME], ids=["at once", "7 classes at a time"])
def chunk_numel(request, monkeypatch):
    monkeypatch.setitem(module.CHUNK_NUMEL, "cpu", request.param)


def step(model, x, rows, store=None, **options):
    """The loss and the gradients of one step."""
    model.zero_grad()

    def loss_of():
        logits = rows(model(x))
        target = torch.arange(len(logits)) % logits.shape[1]
        target[::5] = -100
        return F.cross_entropy(logits, target, **options)

    if store is None:
        loss = loss_of()
    else:
        with store.scope():
            loss = loss_of()
    loss.sum().backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def both(model, x, rows, **options):
    store, _ = open_store(model, ActivationCompression(codecs=("linear-cross-entropy",)))
    return step(model, x, rows, **options), step(model, x, rows, store, **options)


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
def test_gradcheck(reduction, is_weighted, monkeypatch):
    monkeypatch.setitem(module.CHUNK_NUMEL, "cpu", 3 * 5)
    torch.manual_seed(0)
    shapes = {"rows": (5, 2), "weight": (7, 2), "bias": (7,)}
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes.values()]
    target = torch.tensor([0, 6, -100, 3, 3])
    by_class = torch.rand(7, dtype=torch.float64) + 0.5 if is_weighted else None

    def loss(*head):
        options = module.Options(by_class, -100, reduction, 0.1)
        return module._LinearCrossEntropy.apply(*head, F.linear(*head).detach(), target, options)

    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


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
def test_what_changes_between_head_and_loss_leaves_the_loss_to_torch(change, codecs, calls):
    torch.manual_seed(0)
    norm, head, x = nn.LayerNorm(64), nn.Linear(64, 1000), torch.randn(128, 64)
    store, _ = open_store(nn.Sequential(norm, head), ActivationCompression(codecs=codecs))
    with store.scope():
        h = norm(x)
        logits = head(h)
        for _ in range(3):
            x = (x + nn.functional.silu(h)).sigmoid()  # pushes what waits to be coded out
        change(head, h)
        F.cross_entropy(logits, torch.arange(128))
    assert calls == []


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
