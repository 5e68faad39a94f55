"""Methods of papers on the operators that they are about: bytes per element, error and bias of one gradient.

Each case is a few operators on a tensor of normal values, whose bytes are told per element. The error is that of one
draw, the bias is what is left of it in the mean of 64, beyond what chance leaves. A minute on one core; names of cases
as arguments run only these. What the papers' whole models take is in `bench_papers.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

from benchmarks.harness.measurement import environment, put_row
from benchmarks.models.subjects import PlainGPT, next_token_loss
from lightning_memsave import ActivationCompression, MemSave, predict
from lightning_memsave.techniques.activation_compression import open_store, what_happened

NAME = "methods"
NUM_DRAWS = 64


class Case(NamedTuple):
    """Operators, what goes in, and by what their bytes are told."""

    model: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    num_elements: int
    settings: tuple[str, ...]


class Attention(nn.Module):
    """Eager attention with 4 heads of 32, whose scores scatter by `sharpness`; [B, T, 128] -> [B, T, 128]."""

    def __init__(self, sharpness: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(128, 384, bias=False), nn.Linear(128, 128), nn.Dropout(dropout)
        with torch.no_grad():
            self.qkv.weight.normal_(0, 128**-0.5)
            self.qkv.weight[:256] *= sharpness**0.5

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(2, (3, 4, 32)).permute(2, 0, 3, 1, 4)  # [B, 4, T, 32] each
        probabilities = self.dropout((query @ key.mT * 32**-0.5).softmax(-1))  # [B, 4, T, T]
        return self.out((probabilities @ value).transpose(1, 2).flatten(2))


def mlp(activation: nn.Module, trained: bool = True) -> nn.Module:
    last = nn.Linear(1024, 256)
    return nn.Sequential(nn.Linear(256, 1024), activation, last.requires_grad_(trained))


def convolutions(activation: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), activation, nn.Conv2d(32, 32, 3))


def tokens(width: int = 256, spread: float = 0.5) -> Tensor:
    """Rows of normal values; the rows' sizes scatter."""
    return torch.randn(1024, width) * torch.exp(spread * torch.randn(1024, 1))


def images() -> Tensor:
    return torch.randn(8, 16, 26, 26)


_LAYER = ("topk-0.5", "topk-0.1", "topk-0.1+int4", "rows-0.3", "rows-0.1", "rows-0.3+int4", "int8", "int4", "int2")
_ACTIVATION = ("exact", *(f"fewbit-{bits}" for bits in (1, 2, 3, 4)), "int8", "int4", "int2")
CASES = {
    "linear": Case(
        "what a Linear reads",
        lambda: nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 256)),
        tokens,
        1024 * 1024,
        ("exact", *_LAYER),
    ),
    "activation": Case(
        "Linear, GELU, Linear: an element of the hidden layer",
        lambda: mlp(nn.GELU()),
        tokens,
        1024 * 1024,
        (*_ACTIVATION, "exact+int8", "exact+int4", "rows-0.3+fewbit-3"),
    ),
    "frozen": Case(
        "Linear, GELU, frozen Linear: an element of the hidden layer",
        lambda: mlp(nn.GELU(), trained=False),
        tokens,
        1024 * 1024,
        _ACTIVATION,
    ),
    "norm": Case(
        "convolution, BatchNorm, ReLU, convolution: an element between these",
        lambda: convolutions(nn.ReLU()),
        images,
        8 * 32 * 24 * 24,
        ("exact", "exact+int8", "exact+int4", "int4-chain", "topk-0.1"),
    ),
    "bounded": Case(
        "convolution, ReLU6 that nothing else reads: an element",
        lambda: nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU6()),
        images,
        8 * 32 * 24 * 24,
        ("exact", "int8"),
    ),
    **{
        f"attention-{sharpness}": Case(
            f"eager attention, scores that scatter by {sharpness}: a score",
            lambda sharpness=sharpness: Attention(sharpness),
            lambda: torch.randn(4, 128, 128),
            4 * 4 * 128 * 128,
            ("exact", "int8", "mesa"),
        )
        for sharpness in (1, 2, 4)
    },
    "dropped": Case(
        "eager attention with dropout: a score",
        lambda: Attention(1, 0.1),
        lambda: torch.randn(4, 128, 128),
        4 * 4 * 128 * 128,
        ("exact", "exact+int8", "int8", "mesa", "exact+mesa"),
    ),
}


def gradients(model: nn.Module, x: Tensor, store: Any = None) -> Tensor:
    """All of one step, in float64, with the same dropout each time."""
    torch.manual_seed(1)
    model.zero_grad()
    if store is None:
        out = model(x)
    else:
        with store.scope():
            out = model(x)
    (out * torch.randn(out.shape)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).double()


def run(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model, x = case.make(), case.inputs()
    plain = gradients(model, x)
    for setting in ("plain", *case.settings):
        row: dict[str, Any] = {"benchmark": NAME, "case": name, "model": case.model, "setting": setting}
        if setting == "plain":
            store, _ = open_store(model, ActivationCompression())
            gradients(model, x, store)
            row |= {"kept_bytes": store.tally.plain_bytes, "loss_class": "exact", "quality_value": 0.0, "bias": 0.0}
        else:
            config = ActivationCompression(codecs=tuple(setting.split("+")), min_numel=1)
            store, applied = open_store(model, config)
            errors, total = [], torch.zeros_like(plain)
            for _ in range(NUM_DRAWS):
                found = gradients(model, x, store)
                errors.append(float((found - plain).square().sum()))
                total += found
            of_draws = sum(errors) / NUM_DRAWS
            of_mean = float((total / NUM_DRAWS - plain).square().sum())
            row |= {
                "kept_bytes": store.tally.held_bytes,
                "loss_class": what_happened(applied, config, store).loss_class,
                "quality_value": of_draws**0.5 / float(plain.norm()),
                "bias": max(0.0, of_mean - of_draws / NUM_DRAWS) ** 0.5 / float(plain.norm()),
            }
        row["bytes_per_element"] = row["kept_bytes"] / case.num_elements
        row |= {"quality": "relative error of one gradient", **environment()}
        put_row(NAME, row, ("case", "setting"))
        print(name, setting, *(f"{row[key]:.4g}" for key in ("bytes_per_element", "quality_value", "bias")), flush=True)


# ---------------------------------------------------------------------------------------------------- fragmentation
class Step(L.LightningModule):
    """A GPT of plain modules, 6 layers of width 512."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PlainGPT(num_layers=6, width=512, num_heads=8, context=256)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return next_token_loss(self.model(ids), ids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


FRAGMENTED = {
    "plain": {},
    "exact": {"activations": "exact"},
    "exact+int4": {"activations": ["exact", "int4"]},
    "blocks": {"checkpointing": "blocks"},
    "sqrt": {"checkpointing": "sqrt"},
    "sqrt, microbatch 2": {"checkpointing": "sqrt", "microbatch": 2},
}


def fragmentation() -> None:
    """What CUDA's allocator would reserve over what tensors take, by the replay of its rules."""
    for setting, slots in FRAGMENTED.items():
        found = predict(Step, torch.zeros(8, 256, dtype=torch.long), MemSave("measure", **slots), target="cuda")
        assert found.cuda is not None
        row = {
            "benchmark": NAME,
            "case": "fragmentation",
            "model": "GPT of plain modules, 6 layers, width 512, batch 8 x 256, AdamW",
            "setting": setting,
            "peak_bytes": found.peak_bytes,
            "allocated_bytes": found.cuda.allocated_bytes,
            "reserved_bytes": found.cuda.reserved_bytes,
            "quality": "reserved over allocated bytes",
            "quality_value": found.cuda.fragmentation,
            **environment(),
        }
        put_row(NAME, row, ("case", "setting"))
        print(setting, f"{found.cuda.fragmentation:.3f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for wanted in sys.argv[1:] or (*CASES, "fragmentation"):
        fragmentation() if wanted == "fragmentation" else run(wanted)
