"""What may be done to logits that nobody has computed, so that their loss does without them."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
import transformers

from lightning_memsave import Ledger

from .scored_nets import BATCH, CLASSES, LOSSES, TIME, Scored, constants, some_ids, step, store_of


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_does_without_logits(name, bias, products):
    model = Scored(bias=bias)
    plain_loss, _, plain = step(model, LOSSES[name])
    loss, _, ours = step(model, LOSSES[name], store_of(model))
    assert products == []
    torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=0)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", ["shifted", "softcap", "constants"])
def test_gradients_of_gradients(name, products):
    model, ids = Scored(), some_ids()

    def second(scope):
        with scope:
            loss = LOSSES[name](model(ids), ids)
        first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), list(model.parameters()))

    for ours, plain in zip(second(store_of(model).scope()), second(contextlib.nullcontext()), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-11, atol=1e-14)
    assert products == []


@pytest.mark.parametrize("shape", [(CLASSES,), (BATCH, TIME, 1)])
def test_what_is_no_constant_of_each_class_reads_them(shape, products):
    """A gradient goes to it, or it differs from position to position."""
    model, added = Scored(), torch.ones(shape, dtype=torch.float64, requires_grad=len(shape) == 1)
    loss_of = lambda z, y: F.cross_entropy((z + added).flatten(0, 1), y.flatten())  # noqa: E731
    plain_loss, _, plain = step(model, loss_of)
    loss, _, ours = step(model, loss_of, store_of(model))
    assert len(products) == 1
    torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=0)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


def test_a_constant_is_the_one_that_was_added(products):
    model, constant = Scored(), constants(torch.zeros(1).double())

    def loss_of(z, y):
        scores = z + constant
        constant.add_(1.0 * torch.arange(CLASSES))
        loss = F.cross_entropy(scores.flatten(0, 1), y.flatten())
        constant.copy_(constants(z))
        return loss

    plain_loss, _, plain = step(model, loss_of)
    loss, _, ours = step(model, loss_of, store_of(model))
    assert products == []
    torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=0)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["shifted", "cast", "weighted", "softcap", "constants", "log_softmax"])
def test_under_autocast_it_is_as_near_as_plain_torch(name, dtype, products):
    """Against float64, of the same weights."""
    model = Scored(dtype)
    _, _, exact = step(copy.deepcopy(model).double(), LOSSES[name])
    loss_of = LOSSES[name]
    if name == "weighted":
        loss_of = lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), torch.arange(1.0, CLASSES + 1))  # noqa: E731
        _, _, exact = step(copy.deepcopy(model).double(), lambda z, y: loss_of(z.float(), y).double())
    plain_loss, _, plain = step(model, loss_of, dtype=torch.bfloat16)
    loss, _, ours = step(model, loss_of, store_of(model), dtype=torch.bfloat16)
    assert products == []
    assert loss.dtype == plain_loss.dtype
    torch.testing.assert_close(loss, plain_loss, rtol=4e-3 if name == "log_softmax" else 1e-5, atol=0)  # it rounds
    for a, b, c in zip(ours, plain, exact, strict=True):
        assert (a - c).norm() <= 1.2 * (b - c).norm()


VOCABULARY = 8000
SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": VOCABULARY}
LLAMA = {**SHAPE, "intermediate_size": 64, "num_key_value_heads": 2, "use_cache": False}
MODELS = {
    "GPT2": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2},
    "Llama": LLAMA,
    "Mistral": LLAMA,
    "Qwen2": {**LLAMA, "tie_word_embeddings": True},
    "Gemma": {**LLAMA, "head_dim": 16},
    "OPT": {**SHAPE, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
    "GPTNeoX": {**SHAPE, "intermediate_size": 64},
    "Phi": {**SHAPE, "intermediate_size": 64, "resid_pdrop": 0.0},
    "Gemma2": {**LLAMA, "head_dim": 16, "final_logit_softcapping": 0.5},
    "Cohere": {**LLAMA, "logit_scale": 0.7},
    "Granite": {**LLAMA, "logits_scaling": 1.7},
}


@pytest.mark.parametrize("name", MODELS)
def test_language_models_of_transformers_compute_no_logits(name, products):
    torch.manual_seed(0)
    kind = {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    model = getattr(transformers, kind)(getattr(transformers, f"{name}Config")(**MODELS[name])).eval()
    check_model(model, products)


def test_t5_computes_no_logits(products):
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16, decoder_start_token_id=0
    )
    check_model(transformers.T5ForConditionalGeneration(config).eval(), products)


def test_bart_computes_no_logits(products):
    torch.manual_seed(0)
    kinds = {f"{kind}_{what}": n for kind in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 64))}
    config = transformers.BartConfig(vocab_size=VOCABULARY, d_model=32, dropout=0.0, use_cache=False, **kinds)
    model = transformers.BartForConditionalGeneration(config).eval()
    model.final_logits_bias.normal_()
    check_model(model, products)


def check_model(model, products):
    ids = torch.randint(0, VOCABULARY, (4, 64))
    labels = ids.where(torch.arange(64) > 9, -100)

    def run(store):
        model.zero_grad()
        with Ledger().watching(model, []) as ledger:
            with store.scope() if store else contextlib.nullcontext():
                out = model(input_ids=ids, labels=labels)
            out.loss.backward()
        return out, [p.grad.clone() for p in model.parameters()], ledger.measurement.peak_bytes

    plain_out, plain, plain_peak = run(None)
    out, ours, peak = run(store_of(model))
    assert products == []
    logits = 4 * 63 * VOCABULARY * 4
    assert plain_peak - peak >= 2 * logits  # these, and the log-probabilities
    torch.testing.assert_close(out.loss, plain_out.loss, rtol=1e-6, atol=0)
    for a, b in zip(ours, plain, strict=True):
        assert (a - b).norm() <= 3e-6 * b.norm() + 1e-9
    assert torch.equal(out.logits.argmax(-1), plain_out.logits.argmax(-1))
    assert len(products) == 1


def test_log_probabilities_that_are_read_have_the_dtype_of_autocast(monkeypatch):
    """On CUDA it computes them in float32; here it is told to."""
    library = torch.library.Library("aten", "IMPL")

    def cast(x, dim, dtype=None):
        with torch.autocast("cpu", enabled=False):
            return torch.log_softmax(x.float(), dim, dtype=dtype)

    library.impl("log_softmax.int", cast, "AutocastCPU")
    try:
        model, entropy = Scored(torch.float32), lambda lp: -(lp.exp() * lp).sum(-1).mean()
        loss_of = lambda z, y: entropy(F.log_softmax(z, -1))  # noqa: E731
        plain_loss, _, plain = step(model, loss_of, dtype=torch.bfloat16)
        loss, _, ours = step(model, loss_of, store_of(model), dtype=torch.bfloat16)
    finally:
        library._destroy()
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("name", ["capped", "scaled"])
def test_logits_that_are_read_take_no_more_than_in_plain_torch(name):
    model, ids = Scored(torch.float32), some_ids()
    scored = {"capped": lambda z: 30 * torch.tanh(z / 30), "scaled": lambda z: z / 2}[name]

    def held(scope):
        with Ledger().watching(model, batch=ids) as ledger:
            with scope:
                z = scored(model(ids))
                loss = F.cross_entropy(z.flatten(0, 1), ids.flatten())
                z.argmax(-1)
            assert loss.isfinite()
            return ledger.live_bytes

    assert held(store_of(model).scope()) <= held(contextlib.nullcontext())
