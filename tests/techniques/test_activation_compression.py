"""Compressed against plain activations: bytes asserted, exact codecs bit-equal, lossy ones unbiased."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from lightning_memsave import ActivationCompression, Ledger, apply_activation_compression
from lightning_memsave.demo.model import WideResNet
from lightning_memsave.saved_tensors.codec_names import CODECS
from lightning_memsave.techniques.activation_compression import estimate_activation_compression, open_store
from tests.contracts.spec import Spec

SPEC = Spec(config=ActivationCompression(), loss_class="exact", bit_equal=True, shrinks="activations")

EXACT, INT8, INT4 = (ActivationCompression(codecs=(codec,)) for codec in ("exact", "int8", "int4"))
CHAIN = ActivationCompression(codecs=("int4-chain",))


# ---------------------------------------------------------------------------------------------------- models
def wide_resnet():
    images, labels = torch.randn(10, 3, 32, 32), torch.randint(0, 10, (10,))
    model = WideResNet()
    return model, lambda: F.cross_entropy(model(images), labels)


class Block(nn.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, width: int = 64, vocabulary: int = 64) -> None:
        super().__init__()
        self.embedding, self.drop = nn.Embedding(vocabulary, width), nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.drop(self.embedding(ids)))))


def gpt():
    model, ids = GPT(), torch.randint(0, 64, (4, 64))
    return model, lambda: F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 160}


def hf_gpt2():
    shape = {"n_layer": 2, "n_embd": 64, "n_head": 2, "n_positions": 64, "vocab_size": 100, "use_cache": False}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**shape, **special, loss_type="ForCausalLMLoss")).train()
    ids = torch.randint(0, 100, (4, 64))
    return model, lambda: model(input_ids=ids, labels=ids).loss


def llama():
    model = LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=1, vocab_size=2000, use_cache=False)).train()
    ids = torch.randint(0, 2000, (4, 64))
    return model, lambda: model(input_ids=ids, labels=ids).loss


def vit():
    model = ViTForImageClassification(ViTConfig(**TINY, image_size=32, patch_size=4, num_labels=10)).train()
    images, labels = torch.randn(4, 3, 32, 32), torch.randint(0, 10, (4,))
    return model, lambda: model(pixel_values=images, labels=labels).loss


MODELS = {f.__name__: f for f in (wide_resnet, gpt, hf_gpt2, llama, vit)}


def make(name, dtype=torch.float32):
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        return MODELS[name]()
    finally:
        torch.set_default_dtype(torch.float32)


def gradients(model, loss_of, store=None):
    """Of one step, with the same dropout masks each time."""
    model.zero_grad()
    torch.manual_seed(1)
    if store is None:
        loss = loss_of()
    else:
        with store.scope():
            loss = loss_of()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def tally(name, config):
    model, loss_of = make(name)
    store, _ = open_store(model, config)
    gradients(model, loss_of, store)
    return store.tally


# ---------------------------------------------------------------------------------------------------- exact
@pytest.mark.parametrize("name", MODELS)
def test_exact_gradients_are_the_same_bits(name):
    model, loss_of = make(name)
    store, _ = open_store(model, EXACT)
    buffers = [b.clone() for b in model.buffers()]
    plain = gradients(model, loss_of)
    after = [b.clone() for b in model.buffers()]
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.data.copy_(value)
    assert torch.equal(plain, gradients(model, loss_of, store))
    assert all(torch.equal(a, b) for a, b in zip(after, model.buffers(), strict=True))
    assert store.tally.entries["recomputed"] >= 6


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_linear_cross_entropy_is_exact_up_to_rounding(name, dtype, bound):
    model, loss_of = make(name, dtype)
    store, _ = open_store(model, ActivationCompression(codecs=("linear-cross-entropy",)))
    plain, ours = gradients(model, loss_of), gradients(model, loss_of, store)
    assert (ours - plain).norm() <= bound * plain.norm()


def test_linear_cross_entropy_keeps_no_log_probabilities():
    def peak(config):
        model, loss_of = make("llama")
        applied = apply_activation_compression(model, config) if config else None
        gradients(model, loss_of)
        model.zero_grad()
        with Ledger().watching(model, []) as ledger:
            gradients(model, loss_of)
        if applied:
            applied.undo()
        return ledger.measurement.peak_bytes

    log_probabilities = 4 * 64 * 2000 * 4
    assert peak(None) - peak(ActivationCompression(codecs=("linear-cross-entropy",))) >= log_probabilities


# ---------------------------------------------------------------------------------------------------- bytes
def test_bytes_kept_of_a_wide_resnet():
    """Ten images; the batch itself is not counted."""
    codecs = (*CODECS, "topk-0.1", "rows-0.3", "fewbit-3")
    kept = {codec: tally("wide_resnet", ActivationCompression(codecs=(codec,))) for codec in codecs}
    assert {t.plain_bytes for t in kept.values()} == {38_016_000}
    assert {codec: t.held_bytes for codec, t in kept.items()} == {
        "exact": 19_020_800,
        "bf16": 18_854_400,
        "int8": 9_637_160,
        "int4": 4_926_120,
        "int2": 2_570_600,
        "int4-chain": 2_586_280,
        "offload": 15_360,
        "linear-cross-entropy": 37_698_560,
        "topk-0.1": 22_051_488,
        "rows-0.3": 37_698_560,  # its one Linear has ten rows
        "fewbit-3": 37_698_560,
    }


ALONE = [(codec,) for codec in CODECS if codec not in ("offload", "linear-cross-entropy")]
SAMPLES = [("topk-0.1",), ("rows-0.3",), ("topk-0.1", "int4"), ("rows-0.3", "int8"), ("rows-0.3", "bf16")]


@pytest.mark.parametrize("codecs", [*ALONE, *SAMPLES, ("fewbit-3",)])
def test_estimate_is_the_measured_size(codecs):
    config = ActivationCompression(codecs=codecs)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 32))
    store, _ = open_store(model, config)
    x = torch.randn(100, 64)
    with store.scope():
        loss = model(x).sum()
    assert store.tally.num_held_elsewhere == 1  # the batch
    assert store.tally.held_bytes == sum(
        estimate_activation_compression(100 * width, config, row=width) for width in (128, 64)
    )
    loss.backward()


# ---------------------------------------------------------------------------------------------------- noise
@pytest.mark.parametrize("name", ["wide_resnet", "gpt", "llama"])
@pytest.mark.parametrize(
    "config", [INT8, INT4, CHAIN, ActivationCompression(codecs=("bf16",))], ids=lambda c: c.codecs[0]
)
def test_lossy_gradients_are_right_on_average(name, config):
    """The mean of N gradients is off by no more than their noise over the root of N: what bias there is, is smaller."""
    num = 8
    model, loss_of = make(name)
    store, applied = open_store(model, config)
    assert applied.loss_class == "approximate"
    plain = gradients(model, loss_of)
    drawn = torch.stack([gradients(model, loss_of, store) for _ in range(num)])
    noise = (drawn - drawn.mean(0)).square().sum(1).sum().div(num - 1).sqrt()
    assert 0 < noise < 0.4 * plain.norm()
    assert (drawn.mean(0) - plain).norm() < 1.3 * noise / num**0.5


@pytest.mark.parametrize("codecs", [("rows-0.8",), ("fewbit-3",), ("rows-0.8", "fewbit-3", "int8")])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_gradients_of_rows_and_levels_are_right_on_average(name, codecs):
    """One number says which rows of a layer are drawn, so chance itself varies more than with codes."""
    num = 32
    model, loss_of = make(name)
    store, _ = open_store(model, ActivationCompression(codecs=codecs))
    plain = gradients(model, loss_of)
    drawn = torch.stack([gradients(model, loss_of, store) for _ in range(num)])
    noise = (drawn - drawn.mean(0)).square().sum(1).sum().div(num - 1).sqrt()
    assert 0 < noise < 0.4 * plain.norm()
    assert (drawn.mean(0) - plain).norm() < 1.5 * noise / num**0.5
    assert store.consequences.loss_class == ("unbiased" if "int8" not in codecs else "approximate")


@pytest.mark.parametrize("codec", ["int2", "int4", "int8"])
@pytest.mark.parametrize("attend", ["function", "module"])
def test_gradients_of_sharp_attention_are_unbiased(attend, codec):
    """Scores scatter by 4, as training makes them: with noise in an exponent gradients would be 1.5 times too long."""
    torch.manual_seed(0)
    heads, size = 4, 32
    model = nn.MultiheadAttention(heads * size, heads, batch_first=True)
    with torch.no_grad():
        model.in_proj_weight.normal_(0, (heads * size) ** -0.5)
        model.in_proj_weight[: 2 * heads * size] *= 2
    x, weights = torch.randn(4, 64, heads * size), torch.randn(4, 64, heads * size)

    def loss_of():
        if attend == "module":
            return (model(x * 1, x * 1, x * 1, need_weights=False)[0] * weights).sum()
        q, k, v = F.linear(x, model.in_proj_weight).view(4, 64, 3, heads, size).permute(2, 0, 3, 1, 4)
        return (F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape) * weights).sum()

    plain = gradients(model, loss_of)
    store, _ = open_store(model, ActivationCompression(codecs=(codec,), min_numel=1))
    mean = torch.stack([gradients(model, loss_of, store) for _ in range(32)]).mean(0)
    assert 0 < (mean - plain).norm() < 0.03 * plain.norm()
    assert (mean @ plain / plain.square().sum() - 1).abs() < 0.01


ACTIVATIONS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "leaky_relu": F.leaky_relu,
    "prelu": lambda x: F.prelu(x, torch.full((16,), 0.25)),
    "abs": torch.abs,
    "elu": F.elu,
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "glu": lambda x: F.glu(x, 1).repeat(1, 2, 1, 1),
    "two masks of one tensor": lambda x: F.relu6(x) + F.hardtanh(x),
    "kinked twice": lambda x: F.leaky_relu(x) * F.relu6(x),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_bear_the_noise(name):
    """Exact codecs to the bit; at 4 bit no bias beyond the noise, whatever the function's kinks and curvature."""
    torch.manual_seed(0)
    model, images = nn.ModuleList([nn.Conv2d(3, 16, 3), nn.Conv2d(16, 4, 3)]), torch.randn(16, 3, 16, 16)

    def loss_of():
        return model[1](ACTIVATIONS[name](model[0](images))).square().mean()

    plain, num = gradients(model, loss_of), 64
    for codecs in (("exact",), ("offload",)):
        store, _ = open_store(model, ActivationCompression(codecs=codecs))
        assert torch.equal(plain, gradients(model, loss_of, store))
    store, _ = open_store(model, INT4)
    drawn = torch.stack([gradients(model, loss_of, store) for _ in range(num)])
    noise = (drawn - drawn.mean(0)).square().sum(1).sum().div(num - 1).sqrt()
    assert (drawn.mean(0) - plain).norm() < 1.4 * noise / num**0.5


def test_the_noise_grows_by_the_step_between_codes():
    model, loss_of = make("gpt")
    plain = gradients(model, loss_of)
    errors = []
    for codec in ("int8", "int4", "int2"):
        store, _ = open_store(model, ActivationCompression(codecs=(codec,)))
        errors.append(float((gradients(model, loss_of, store) - plain).norm()))
    assert 8 < errors[1] / errors[0] < 34  # 17 times coarser
    assert 2 < errors[2] / errors[1] < 10  # 5 times coarser


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_network_of_relus_has_the_same_bits_with_and_without_exact_beside_codes(codec):
    """Nothing in it is computed again from codes: rows of one are rows of both."""

    def trained(*codecs):
        torch.manual_seed(0)
        model = WideResNet(depth=10)
        apply_activation_compression(model, ActivationCompression(codecs=codecs))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        images, labels = torch.randn(3, 8, 3, 16, 16), torch.randint(0, 10, (3, 8))
        for step in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(images[step]), labels[step]).backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(trained(codec), trained("exact", codec))
