"""Modules of which is known whether they treat the entries of a dimension independently, and why not.

The test was written with `ZOO` at hand. The cases of `held_out` came afterwards: no bound, no clause is tuned on them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, LlamaConfig, MixtralConfig, T5Config
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.t5.modeling_t5 import T5LayerFF

D = 16
TEXT, IMAGE = (4, 22, D), (4, D, 22, 6)


class Case(NamedTuple):
    """A call, and what is known of it."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    """Shape of its input; of two dimensions, tokens."""
    dim: int
    why_not: str = ""
    """A part of the reason; empty where entries are independent."""


class Of(nn.Module):
    """`function(modules, x)`."""

    def __init__(self, function: Callable[[Any, Tensor], Any], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.inner = function, nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.inner, x)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(64, D))

    def forward(self, x):
        return x + self.p[: x.shape[1]]


class AmaxQuantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        scale = x.abs().amax() / 127
        return self.linear((x / scale).round() * scale)


class RarelyMixed(nn.Module):
    def forward(self, x):
        return x - x.mean(1, keepdim=True) if bool(x.abs().max() > 50) else x * 2


class ExpertChoice(nn.Module):
    """Experts choose tokens: the largest of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(D, 2), nn.Linear(D, D)

    def forward(self, x):
        index = self.router(x)[..., 0].topk(3, dim=1).indices[..., None].expand(-1, -1, D)
        return x.clone().scatter_add_(1, index, self.expert(x.gather(1, index)))


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean())
        return self.linear(x)


class _NormOfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (gradient.norm() + 1e-6)


def attention(dropout: float) -> GPT2Attention:
    return GPT2Attention(GPT2Config(n_embd=D, n_head=2, attn_pdrop=dropout, resid_pdrop=dropout), layer_idx=0)


def mixtral() -> nn.Module:
    config = MixtralConfig(hidden_size=D, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32)
    module = MixtralSparseMoeBlock(config)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return module


def spectral() -> nn.Module:
    return Of(lambda inner, x: inner[0](x), nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)))


def weight_normed() -> nn.Module:
    return Of(lambda inner, x: inner[0](x), nn.utils.parametrizations.weight_norm(nn.Linear(D, D)))


def vector_quantised(inner, x):
    return inner[0].weight[torch.cdist(x, inner[0].weight[None]).argmin(-1)] + x - x.detach()


def llama() -> LlamaConfig:
    return LlamaConfig(hidden_size=D, num_attention_heads=2, num_key_value_heads=2, intermediate_size=40)


def conv_norm(norm: nn.Module, kernel: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(D, D, kernel, padding=kernel // 2), norm, nn.ReLU())


OUTPUTS, SPREADS, SHAPES = "slices have other outputs", "a NaN in one entry reaches others", "fails with"
ZOO = [
    Case("MLP of GPT-2, dropout", lambda: GPT2MLP(64, GPT2Config(n_embd=D, resid_pdrop=0.1)), TEXT, 1),
    Case("MLP of Llama", lambda: LlamaMLP(llama()), TEXT, 1),
    Case("feed-forward layer of T5", lambda: T5LayerFF(T5Config(d_model=D, d_ff=40)), TEXT, 1),
    Case(
        "intermediate of BERT",
        lambda: BertIntermediate(BertConfig(hidden_size=D, num_attention_heads=2, intermediate_size=40)),
        TEXT,
        1,
    ),
    Case("RMSNorm of Llama", lambda: LlamaRMSNorm(D), TEXT, 1),
    Case(
        "two dropouts",
        lambda: nn.Sequential(nn.Linear(D, 40), nn.Dropout(0.2), nn.GELU(), nn.Linear(40, D), nn.Dropout(0.1)),
        TEXT,
        1,
    ),
    Case("1x1 convolutions", lambda: nn.Sequential(nn.Conv2d(D, 32, 1), nn.ReLU(), nn.Conv2d(32, 3, 1)), IMAGE, 2),
    Case(
        "1x1 convolution and BatchNorm in evaluation",
        lambda: nn.Sequential(nn.Conv2d(D, D, 1), nn.BatchNorm2d(D)).eval(),
        IMAGE,
        2,
    ),
    Case("convolution along the other dimension", lambda: nn.Conv2d(D, D, (1, 3), padding=(0, 1)), IMAGE, 2),
    Case("block with BatchNorm in evaluation, samples", lambda: conv_norm(nn.BatchNorm2d(D)).eval(), IMAGE, 0),
    Case("convolution and GroupNorm, samples", lambda: conv_norm(nn.GroupNorm(4, D)), IMAGE, 0),
    Case(
        "encoder layer, samples", lambda: nn.TransformerEncoderLayer(D, 2, 32, dropout=0.1, batch_first=True), TEXT, 0
    ),
    Case("nearest code", lambda: Of(vector_quantised, nn.Embedding(8, D)), TEXT, 1),
    Case("weight norm", weight_normed, TEXT, 1),
    Case(
        "attention and MLP of GPT-2, samples",
        lambda: Of(
            lambda inner, x: x + inner[1](inner[0](x)[0]),
            attention(0.1),
            GPT2MLP(64, GPT2Config(n_embd=D, resid_pdrop=0.1)),
        ),
        TEXT,
        0,
    ),
    Case("spectral norm", spectral, TEXT, 1, "changes its buffer `inner.0.parametrizations.weight.0._u`"),
    Case("mixture of experts that reads its choices", mixtral, TEXT, 1, "reads values"),
    Case("attention along positions", lambda: Of(lambda i, x: i[0](x)[0], attention(0.0)), TEXT, 1, OUTPUTS),
    Case("3x3 convolution along rows", lambda: nn.Conv2d(D, D, 3, padding=1), IMAGE, 2, OUTPUTS),
    Case("BatchNorm, rows", lambda: nn.BatchNorm2d(D), IMAGE, 2, "changes its buffer"),
    Case("BatchNorm, samples", lambda: nn.BatchNorm2d(D), IMAGE, 0, "changes its buffer"),
    Case("BatchNorm without statistics", lambda: nn.BatchNorm2d(D, track_running_stats=False), IMAGE, 0, OUTPUTS),
    Case("GroupNorm, rows", lambda: nn.GroupNorm(4, D), IMAGE, 2, OUTPUTS),
    Case("LayerNorm over positions", lambda: nn.LayerNorm((22, D)), TEXT, 1, SHAPES),
    Case(
        "mixing of tokens",
        lambda: Of(lambda i, x: i[0](x.transpose(1, 2)).transpose(1, 2), nn.Linear(22, 22)),
        TEXT,
        1,
        SHAPES,
    ),
    Case("softmax over positions", lambda: nn.Softmax(1), TEXT, 1, OUTPUTS),
    Case("cumulative sum", lambda: Of(lambda i, x: x.cumsum(1)), TEXT, 1, OUTPUTS),
    Case(
        "squeeze and excite, rows",
        lambda: Of(lambda i, x: x * i[0](x.mean((2, 3), keepdim=True)).sigmoid(), nn.Conv2d(D, D, 1)),
        IMAGE,
        2,
        OUTPUTS,
    ),
    Case("table of positions", Table, TEXT, 1, OUTPUTS),
    Case("quantised by the largest", AmaxQuantised, TEXT, 1, OUTPUTS),
    Case("mixed where values are large", RarelyMixed, TEXT, 1, "reads values"),
    Case("experts that choose tokens", ExpertChoice, TEXT, 1, OUTPUTS),
    Case("ranks", lambda: Of(lambda i, x: x * x.argsort(1).argsort(1)), TEXT, 1, OUTPUTS),
    Case("a billionth of the mean", lambda: Of(lambda i, x: x + 1e-9 * x.mean(1, keepdim=True)), TEXT, 1, SPREADS),
    Case(
        "the mean of what is a number",
        lambda: Of(lambda i, x: x + torch.nan_to_num(x).mean(1, keepdim=True)),
        TEXT,
        1,
        OUTPUTS,
    ),
    Case("divided by the number of entries", lambda: Of(lambda i, x: x / x.shape[1]), TEXT, 1, OUTPUTS),
    Case("running mean", RunningMean, TEXT, 1, "changes its buffer `mean`"),
    Case("GRU", lambda: Of(lambda i, x: i[0](x)[0], nn.GRU(D, D, batch_first=True)), TEXT, 1, OUTPUTS),
    Case("LSTM", lambda: Of(lambda i, x: i[0](x)[0], nn.LSTM(D, D, batch_first=True)), TEXT, 1, OUTPUTS),
    Case("flipped", lambda: Of(lambda i, x: x.flip(1)), TEXT, 1, OUTPUTS),
    Case("mixup", lambda: Of(lambda i, x: 0.5 * x + 0.5 * x.roll(1, 0)), TEXT, 0, OUTPUTS),
    Case(
        "norm of the gradient, in backward",
        lambda: Of(lambda i, x: _NormOfGradient.apply(i[0](x)), nn.Linear(D, D)),
        TEXT,
        1,
        "slices have other gradients",
    ),
    Case(
        "causal convolution",
        lambda: Of(
            lambda i, x: i[0](x.transpose(1, 2))[..., :-3].transpose(1, 2), nn.Conv1d(D, D, 4, padding=3, groups=D)
        ),
        TEXT,
        1,
        OUTPUTS,
    ),
    Case("Fourier transform", lambda: Of(lambda i, x: torch.fft.fft(x, dim=1).real), TEXT, 1, OUTPUTS),
]


# ---------------------------------------------------------------------------------------------------- held out
class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(D, D), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


class AuxiliaryLoss(nn.Module):
    """Leaves a loss in an attribute, which the training step adds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        y = self.linear(x)
        self.loss = y.square().mean()
        return y


class CentredByHistory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.history = nn.Linear(D, D), []

    def forward(self, x):
        self.history.append(x.detach().mean())
        return self.linear(x)


class DropPath(nn.Module):
    """Leaves samples out, each for all of its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x):
        keep = torch.rand(x.shape[0], *[1] * (x.dim() - 1)).add_(0.8).floor_()
        return x + self.linear(x) * keep / 0.8


class SharedNoise(nn.Module):
    """One noise for all positions."""

    def forward(self, x):
        return x * torch.randn(x.shape[0], 1, x.shape[2])


class PairwiseDistances(nn.Module):
    def forward(self, x):
        flat = x.flatten(1)
        return torch.cdist(flat, flat)


class BatchMinStd(nn.Module):
    """The statistics of a batch that discriminators append."""

    def forward(self, x):
        return torch.cat([x, x.std(0, correction=0).mean().expand(*x.shape[:-1], 1)], -1)


class EditsInput(nn.Module):
    def forward(self, x):
        return x.mul_(2).relu()


def held_out() -> list[Case]:
    """Return cases among which are models of `transformers`."""
    return [*_of_torch(), *_of_transformers()]


def _of_torch() -> list[Case]:
    decoder = lambda i, x: i[0](x, x)  # noqa: E731
    return [
        Case("DropPath, samples", DropPath, TEXT, 0),
        Case("DropPath, positions", DropPath, TEXT, 1),
        Case("noise that positions share", SharedNoise, TEXT, 1),
        Case("noise of samples", SharedNoise, TEXT, 0),
        Case("GLU", lambda: nn.Sequential(nn.Linear(D, 2 * D), nn.GLU()), TEXT, 1),
        Case("Hardswish", lambda: nn.Sequential(nn.Linear(D, D), nn.Hardswish()), TEXT, 1),
        Case("LSTM, samples", lambda: Of(lambda i, x: i[0](x)[0], nn.LSTM(D, D, batch_first=True)), TEXT, 0),
        Case(
            "decoder layer, samples",
            lambda: Of(decoder, nn.TransformerDecoderLayer(D, 2, 32, batch_first=True)),
            TEXT,
            0,
        ),
        Case("InstanceNorm, samples", lambda: nn.InstanceNorm2d(D), IMAGE, 0),
        Case("pixel shuffle, samples", lambda: nn.PixelShuffle(4), IMAGE, 0),
        Case("pooling along the other dimension", lambda: nn.MaxPool2d((1, 2)), IMAGE, 2),
        Case("softmax over features", lambda: nn.Softmax(-1), TEXT, 1),
        Case(
            "cosine to prototypes",
            lambda: Of(lambda i, x: F.normalize(x, dim=-1) @ i[0].weight, nn.Linear(8, D)),
            TEXT,
            1,
        ),
        Case("largest 4 features", lambda: Of(lambda i, x: x.topk(4, -1).values), TEXT, 1),
        Case("first sample drops out", lambda: nn.Sequential(nn.Linear(D, D), nn.Dropout1d(0.5)), TEXT, 0),
        Case("InstanceNorm, rows", lambda: nn.InstanceNorm2d(D), IMAGE, 2, OUTPUTS),
        Case(
            "bidirectional GRU",
            lambda: Of(lambda i, x: i[0](x)[0], nn.GRU(D, 8, batch_first=True, bidirectional=True)),
            TEXT,
            1,
            OUTPUTS,
        ),
        Case(
            "decoder layer, positions",
            lambda: Of(decoder, nn.TransformerDecoderLayer(D, 2, 32, 0.0, batch_first=True)),
            TEXT,
            1,
            OUTPUTS,
        ),
        Case("pooling", lambda: nn.MaxPool2d(3, 1, 1), IMAGE, 2, OUTPUTS),
        Case("interpolated along rows", lambda: nn.Upsample((22, 12), mode="bilinear"), IMAGE, 2, "returns a tensor"),
        Case("mean over positions", lambda: Of(lambda i, x: x.mean(1)), TEXT, 1, "returns a tensor"),
        Case("shifted", lambda: Of(lambda i, x: torch.cat([x[:, 1:], x[:, :1]], 1)), TEXT, 1, OUTPUTS),
        Case("sorted", lambda: Of(lambda i, x: x.sort(1).values), TEXT, 1, OUTPUTS),
        Case(
            "largest position",
            lambda: Of(lambda i, x: F.one_hot(x.argmax(1), x.shape[1]).transpose(1, 2) * x),
            TEXT,
            1,
            "reads values",
        ),
        Case("distances between samples", PairwiseDistances, TEXT, 0, "returns a tensor"),
        Case("statistics of the batch", BatchMinStd, TEXT, 0, OUTPUTS),
        Case("a counter", Counter, TEXT, 1, "changes its attribute `calls`"),
        Case("a loss in an attribute", AuxiliaryLoss, TEXT, 1, "changes its attribute `loss`"),
        Case("a list that grows", CentredByHistory, TEXT, 1, "changes its attribute `history`"),
        Case("edits its input", EditsInput, TEXT, 1, "edits its input in place"),
        Case("permuted samples", lambda: Of(lambda i, x: x[torch.randperm(x.shape[0])]), TEXT, 0, OUTPUTS),
        Case("a mask of what is positive", lambda: Of(lambda i, x: x[x > 0].sum() + x), TEXT, 1, "reads values"),
        Case("values as a list", lambda: Of(lambda i, x: x * (1 + len(x.tolist()))), TEXT, 1, "reads values"),
    ]


TOKENS, PICTURE = (4, 22), (4, 3, 32, 32)
SMALL = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VISION = {**SMALL, "image_size": 32, "patch_size": 8}
WORDS = {**SMALL, "vocab_size": 64, "max_position_embeddings": 64}


def _of_transformers() -> list[Case]:
    import transformers as t

    def model(name: str, **settings: Any) -> Callable[[], nn.Module]:
        config = name.removesuffix("Model").removesuffix("Encoder") + "Config"
        return lambda: getattr(t, name)(getattr(t, config)(**settings))

    def part(name: str, path: str, **settings: Any) -> Callable[[], nn.Module]:
        return lambda: model(name, **settings)().get_submodule(path)

    gpt2 = {"n_embd": D, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 64, "use_cache": False}
    t5 = {"d_model": D, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
    swin = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}
    opt = {**WORDS, "ffn_dim": 32, "word_embed_proj_dim": D, "use_cache": False}
    mamba = {"hidden_size": D, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4, "use_cache": False}
    llama = {**WORDS, "use_cache": False, "num_key_value_heads": 2}
    return [
        Case("BertModel, samples", model("BertModel", **WORDS), TOKENS, 0),
        Case("RobertaModel, samples", model("RobertaModel", **WORDS), TOKENS, 0),
        Case(
            "DistilBertModel, samples",
            model(
                "DistilBertModel",
                dim=D,
                n_layers=2,
                n_heads=2,
                hidden_dim=32,
                vocab_size=64,
                max_position_embeddings=64,
            ),
            TOKENS,
            0,
        ),
        Case("GPT2Model, samples", model("GPT2Model", **gpt2), TOKENS, 0, "reads values"),
        Case("block of GPT-2, samples", part("GPT2Model", "h.0", **gpt2), TEXT, 0),
        Case("LlamaModel, samples", model("LlamaModel", **llama), TOKENS, 0, "reads values"),
        Case("Qwen2Model, samples", model("Qwen2Model", **llama), TOKENS, 0, "reads values"),
        Case("T5EncoderModel, samples", model("T5EncoderModel", **t5), TOKENS, 0),
        Case("MambaModel, samples", model("MambaModel", **mamba), TOKENS, 0),
        Case("ViTModel, samples", model("ViTModel", **VISION), PICTURE, 0),
        Case("DeiTModel, samples", model("DeiTModel", **VISION), PICTURE, 0),
        Case("Dinov2Model, samples", model("Dinov2Model", **VISION), PICTURE, 0),
        Case("SwinModel, samples", model("SwinModel", **swin), PICTURE, 0),
        Case(
            "ConvNextModel, samples",
            model("ConvNextModel", depths=[1, 1], hidden_sizes=[8, 16], num_stages=2),
            PICTURE,
            0,
        ),
        Case("CLIPVisionModel, samples", lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**VISION)), PICTURE, 0),
        Case("CLIPTextModel, samples", lambda: t.CLIPTextModel(t.CLIPTextConfig(**WORDS)), TOKENS, 0),
        Case(
            "ResNetModel, samples",
            model("ResNetModel", embedding_size=8, hidden_sizes=[16, 16], depths=[1, 1], layer_type="basic"),
            PICTURE,
            0,
            "changes its buffer",
        ),
        Case("MLP of Qwen2", part("Qwen2Model", "layers.0.mlp", **llama), TEXT, 1),
        Case("MLP of ViT's layer", part("ViTModel", "layers.0.mlp", **VISION), TEXT, 1),
        Case(
            "MLP of CLIP",
            lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**VISION)).get_submodule("encoder.layers.0.mlp"),
            TEXT,
            1,
        ),
        Case(
            "feed-forward layer of DistilBERT",
            part(
                "DistilBertModel", "transformer.layer.0.ffn", dim=D, n_layers=2, n_heads=2, hidden_dim=32, vocab_size=64
            ),
            TEXT,
            1,
        ),
        Case(
            "BertModel, positions", model("BertModel", **WORDS, **NO_DROPOUT), TOKENS, 1, "it returns a tensor [4, 16]"
        ),
        Case(
            "GPT2Model, positions",
            model("GPT2Model", **{**gpt2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
            TOKENS,
            1,
            "reads values",
        ),
        Case(
            "block of GPT-2, positions",
            part("GPT2Model", "h.0", **{**gpt2, "resid_pdrop": 0.0, "attn_pdrop": 0.0}),
            TEXT,
            1,
            OUTPUTS,
        ),
        Case("LlamaModel, positions", model("LlamaModel", **llama), TOKENS, 1, "reads values"),
        Case("MambaModel, positions", model("MambaModel", **mamba), TOKENS, 1, OUTPUTS),
        Case("mixer of Mamba", part("MambaModel", "layers.0.mixer", **mamba), TEXT, 1, OUTPUTS),
        Case("T5EncoderModel, positions", model("T5EncoderModel", **t5, dropout_rate=0.0), TOKENS, 1, OUTPUTS),
        Case("OPTModel, samples", model("OPTModel", **opt), TOKENS, 0),
        Case(
            "ConvNext's layer, rows",
            part("ConvNextModel", "encoder.stages.0.layers.0", depths=[1, 1], hidden_sizes=[8, 16], num_stages=2),
            (4, 8, 22, 6),
            2,
            "slices have other gradients",
        ),
    ]
