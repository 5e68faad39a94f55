"""Models of papers against slow references in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.models.papers import dynamicconv, unrolled_lstm


@pytest.fixture
def make():
    def make(**changes):
        shape = {"width": 16, "hidden_width": 32, "num_heads": 2, "num_source_tokens": 20, "num_target_tokens": 20}
        kernels = {"encoder_kernels": (3, 5), "decoder_kernels": (3,)}
        torch.manual_seed(0)
        return dynamicconv.Translator(dynamicconv.DynamicConvConfig(**{**shape, **kernels, **changes}))

    return make


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_convolution_is_the_sum_over_taps(is_causal, is_dynamic):
    torch.manual_seed(0)
    module = dynamicconv.HeadConvolution(6, 5, 2, is_causal, is_dynamic, dropout=0.0).double()
    x = torch.randn(3, 7, 6, dtype=torch.float64)
    taps = (module.taps(x).view(3, 7, 2, 5) if is_dynamic else module.kernel.expand(3, 7, 2, 5)).softmax(-1)
    expected = torch.zeros_like(x)
    before = 4 if is_causal else 2
    for t in range(7):
        for k in range(5):
            s = t + k - before
            if 0 <= s < 7:
                for head in range(2):
                    channels = slice(3 * head, 3 * head + 3)
                    expected[:, t, channels] += taps[:, t, head, k, None] * x[:, s, channels]
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


def test_the_decoder_does_not_look_ahead(make):
    model = make().eval().model
    source, target = torch.randint(3, 20, (2, 6)), torch.randint(3, 20, (2, 8))
    changed = target.clone()
    changed[:, 5] = (changed[:, 5] - 3 + 1) % 17 + 3
    same = model(source, target) == model(source, changed)
    assert same[:, :5].all()
    assert not same[:, 5:].all()


def test_padding_changes_nothing(make):
    model = make().eval().double().model
    source, target = torch.randint(3, 20, (1, 6)), torch.randint(3, 20, (1, 8))
    padded = nn.functional.pad(source, (0, 3))
    torch.testing.assert_close(model(padded, target), model(source, target), rtol=1e-12, atol=1e-12)


def test_it_learns_to_copy(make):
    module = make(dropout=0.0, kernel_dropout=0.0, label_smoothing=0.0)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        words = torch.randint(3, 20, (32, 4), generator=generator)
        labels = nn.functional.pad(words, (0, 1), value=dynamicconv.END)
        optimizer.zero_grad()
        begun = nn.functional.pad(labels[:, :-1], (1, 0), value=dynamicconv.BEGIN)
        nn.functional.cross_entropy(module.model(labels, begun).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    said = module.eval().model.translate(labels)
    assert (said[:, :5] == labels).float().mean() > 0.9


def test_lstm_is_torchs_own():
    torch.manual_seed(0)
    model = unrolled_lstm.UnrolledLSTM(num_layers=2, width=8, num_tokens=11, chunk_length=3).double()
    tokens = torch.randint(0, 11, (4, 8))
    reference = nn.LSTM(8, 8, num_layers=2, batch_first=True).double()
    for layer, cell in enumerate(model.chunk.cells):
        for name, value in cell.named_parameters():
            getattr(reference, f"{name}_l{layer}").data = value.data
    logits = model.head(reference(model.embedding(tokens[:, :-1]))[0])
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(model(tokens), expected, rtol=1e-12, atol=1e-12)
