"""Papers' names keep what the papers promise: bytes by formula, bits where they are exact, means where they are not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from lightning_memsave import ActivationCompression
from lightning_memsave.numerics.kbit import coded_bytes
from lightning_memsave.saved_tensors.codec_names import ALIASES, explained
from lightning_memsave.techniques.activation_compression import open_store, summarize, what_happened


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def gradients(model, x, config=None):
    """Of all parameters, with the store's tally; the result is weighted, so that no sum hides an error."""
    model.zero_grad()
    torch.manual_seed(1)
    store = None
    if config is None:
        out = model(x)
    else:
        store, applied = open_store(model, config)
        with store.scope():
            out = model(x)
        applied.undo()
    out = out[0] if isinstance(out, tuple) else out
    (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}, None if store is None else store.tally


def named(alias):
    return ActivationCompression(codecs=(alias,), min_numel=1)


def mlp(activation):
    return nn.Sequential(nn.Linear(32, 128), activation, nn.Linear(128, 16))


# ------------------------------------------------------------------------------- what a name is
@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_what_it_stands_for_and_says_so(alias):
    codecs, operations = ALIASES[alias]
    model, x = mlp(nn.GELU()), torch.randn(64, 32)
    spelled = ActivationCompression(codecs=codecs, operations=operations, min_numel=1)
    (ours, tally), (theirs, expected) = gradients(model, x, named(alias)), gradients(model, x, spelled)
    assert tally == expected
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert named(alias).is_exact == spelled.is_exact
    _, applied = open_store(model, named(alias))
    assert applied.summary == explained(alias) == f"{alias} ({', '.join([*codecs, *_said(operations)])})"
    assert summarize(named(alias), tally).startswith(f"{explained(alias)}: ")


def _said(operations):
    return [f"{name} in {codec}" for name, codec in operations.items()]


def test_operations_that_are_named_go_before_those_of_an_alias():
    config = ActivationCompression(codecs=("mesa", "offload"), operations={"softmax": "exact"})
    assert config.all_operations == {"softmax": "exact"}
    assert config.written_out == ("int8", "offload")
    with pytest.raises(ValueError, match=r"one lossy one at most, got .'mesa', 'int4'"):
        ActivationCompression(codecs=("mesa", "int4"))


# ------------------------------------------------------------------------------- DropIT
def test_dropit_is_the_weights_gradient_of_the_largest_tenth_and_nothing_else():
    """Elements with the largest magnitudes of a layer's whole input, over all samples, as torch finds them."""
    model, images = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)), torch.randn(2, 3, 12, 12)
    plain, _ = gradients(model, images)
    found, tally = gradients(model, images, named("dropit"))
    hidden = model[0](images).detach()
    kept = hidden.abs().flatten().topk(round(0.1 * hidden.numel())).indices
    dropped = torch.zeros_like(hidden).flatten().index_copy(0, kept, hidden.flatten()[kept]).view_as(hidden)
    out = F.conv2d(dropped, model[1].weight, model[1].bias)
    (expected,) = torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), model[1].weight)
    assert torch.equal(found["1.weight"], expected)
    assert all(torch.equal(found[name], plain[name]) for name in plain if name != "1.weight")
    assert tally.held_bytes == 4 * len(kept) + hidden.numel() // 8


# ------------------------------------------------------------------------------- Inverted Activations
@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.SiLU()])
def test_inverted_keeps_one_tensor_of_an_activation_to_the_bit(activation):
    """4 bytes per element instead of 8; the paper keeps 4 and a bit, and has an error."""
    model, x = mlp(activation), torch.randn(64, 32)
    plain, _ = gradients(model, x)
    found, tally = gradients(model, x, named("inverted"))
    assert (tally.plain_bytes, tally.held_bytes) == (8 * 64 * 128, 4 * 64 * 128)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 96), nn.Linear(96, 16)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_inverted_keeps_two_tensors_of_swiglu_to_the_bit():
    """Of gate, silu(gate), up and their product; the paper keeps three and a bit."""
    model, x = SwiGLU(), torch.randn(64, 32)
    plain, _ = gradients(model, x)
    found, tally = gradients(model, x, named("inverted"))
    assert (tally.plain_bytes, tally.held_bytes) == (4 * 4 * 64 * 96, 2 * 4 * 64 * 96)
    assert all(torch.equal(found[name], plain[name]) for name in plain)


# ------------------------------------------------------------------------------- In-place ABN
@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.01), nn.ReLU(), nn.ELU(), nn.Identity()])
def test_inplace_abn_keeps_one_tensor_of_norm_and_activation_to_the_bit(activation):
    """Half of what torch keeps, with BatchNorm's own weights and running statistics, and any activation."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), activation, nn.Conv2d(8, 4, 3))
    with torch.no_grad():
        model[1].weight.copy_(torch.linspace(-1, 1, 8))  # of any sign, and none of them is changed
    images, buffers = torch.randn(2, 3, 14, 14), [b.clone() for b in model.buffers()]
    plain, _ = gradients(model, images)
    after = [b.clone() for b in model.buffers()]
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    found, tally = gradients(model, images, named("inplace-abn"))
    num, reads_input = 2 * 8 * 12 * 12, isinstance(activation, nn.ELU | nn.LeakyReLU)
    assert tally.plain_bytes == 4 * num * (3 if reads_input else 2)
    signs = num // 8 if isinstance(activation, nn.LeakyReLU) else 0  # of what it reads, which costs less than a norm
    assert tally.held_bytes == 4 * num + signs
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert all(torch.equal(a, b) for a, b in zip(after, model.buffers(), strict=True))


# ------------------------------------------------------------------------------- Tempo
def test_tempo_keeps_of_a_bert_layer_what_the_paper_keeps_to_the_bit():
    """One tensor each of GELU, of a LayerNorm and of the dropped probabilities; the paper's mask of GELU is not needed.

    Behind the layer's input: query, key, value, probabilities, the context, two inputs of LayerNorm, GELU's input,
    and dropout's noise as bits.
    """
    batch, time, width, heads = 4, 32, 64, 4
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": heads}
    layer = BertLayer(BertConfig(**shape, attn_implementation="eager")).train()
    model, x = nn.Sequential(nn.Linear(width, width), layer), torch.randn(batch, time, width)
    plain, _ = gradients(model, x)
    found, tally = gradients(model, x, named("tempo"))
    tokens, scores = batch * time, batch * heads * time * time
    wide = 1 + 3 + 1 + 2 + 4  # the layer's input, and what is told above, in widths of a token
    noise = (scores + 2 * tokens * width) // 8
    statistics = 2 * 2 * 4 * tokens
    assert tally.held_bytes == 4 * (wide * tokens * width + scores) + noise + statistics
    assert all(torch.equal(found[name], plain[name]) for name in plain)


# ------------------------------------------------------------------------------- Mesa
class Attention(nn.Module):
    """Eager attention whose scores have a standard deviation of `sharpness`."""

    def __init__(self, sharpness):
        super().__init__()
        self.qkv, self.out = nn.Linear(128, 384, bias=False), nn.Linear(128, 128)
        with torch.no_grad():
            self.qkv.weight.normal_(0, 128**-0.5)
            self.qkv.weight[:256] *= sharpness**0.5

    def forward(self, x):
        q, k, v = self.qkv(x).view(4, 64, 3, 4, 32).permute(2, 0, 3, 1, 4)
        probabilities = (q @ k.mT * 32**-0.5).softmax(-1)
        return self.out((probabilities @ v).transpose(1, 2).reshape(x.shape))


def test_mesa_keeps_everything_in_8_bits():
    """Query, key, value and context in rows of a token, probabilities in rows of a query."""
    _, tally = gradients(Attention(1), torch.randn(4, 64, 128), named("mesa"))
    assert dict(tally.entries) == {"int8": 5}
    assert tally.held_bytes == 4 * coded_bytes(4 * 64 * 128, 8, row=128) + coded_bytes(4 * 4 * 64 * 64, 8, row=64)
    _, without = gradients(Attention(1), torch.randn(4, 64, 128), ActivationCompression(codecs=("int8",), min_numel=1))
    assert dict(without.entries) == {"int8": 4, "raw": 1}


@pytest.mark.parametrize("sharpness", [1, 2, 4])
def test_mesas_gradients_are_right_on_average_with_sharp_attention(sharpness):
    model, x, num = Attention(sharpness), torch.randn(4, 64, 128), 64
    plain = torch.cat([g.flatten() for g in gradients(model, x)[0].values()])
    config = named("mesa")
    store, applied = open_store(model, config)
    drawn = []
    for _ in range(num):
        model.zero_grad()
        with store.scope():
            out = model(x)
            loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum()
        loss.backward()
        drawn.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    drawn = torch.stack(drawn)
    noise = (drawn - plain).square().sum(1).mean().sqrt()
    mean = drawn.mean(0)
    assert 0 < noise < 0.02 * plain.norm()
    assert (mean - plain).norm() < 1.1 * noise / num**0.5
    assert abs(mean @ plain / plain.square().sum() - 1) < 1e-4
    assert what_happened(applied, config, store).loss_class == "approximate"
