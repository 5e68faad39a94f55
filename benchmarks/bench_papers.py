"""Others' headline rows on the same shapes, with their figure beside ours.

Measured: forward and backward onto gradients that exist, at two sizes of batch (for BERT-large also at two depths),
by the ledger. Between them the peak is a fixed part and a part per sample; a third measurement says how far off that
is (column `check`). Optimizer state is added by arithmetic. So the peak at the paper's batch, and the largest batch
in the memory that the plain step takes at the paper's baseline batch, are predictions from measurements at small
batches, in float32.

Their figures are their GPU's and their framework's; ours are tracked bytes on CPU. Names of cases as arguments run
only these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness import Subject, environment, measure_memory, put_row
from lightning_memsave import (
    ActivationCompression,
    Checkpointing,
    apply_activation_compression,
    apply_checkpointing,
)

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.models.unrolled_lstm import Chunk, UnrolledLSTM

NAME = "papers"
Loss = Callable[[], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A paper's model, and what the paper says of it."""

    paper: str
    model: str
    make: Callable[[int, int], tuple[nn.Module, Loss]]
    """(batch size, layers) -> model and loss."""
    batch: int
    """At which the paper's baseline runs."""
    state_bytes: int
    """Of the optimizer, per parameter: 8 for Adam, 4 for momentum."""
    settings: dict[str, tuple[ActivationCompression | None, Checkpointing | None]]
    theirs: str
    quantity: str
    """What of ours is to be compared: a column."""
    batches: tuple[int, int, int]
    """To measure, the third as a check."""
    layers: int = 0
    """Of the paper's model, where fewer are measured."""
    depths: tuple[int, int] | None = None


def compression(*codecs: str) -> ActivationCompression:
    return ActivationCompression(codecs=codecs)


PLAIN: dict[str, Any] = {"plain": (None, None)}
EXACT: dict[str, Any] = {"exact": (compression("exact"), None)}
INT8: dict[str, Any] = {"int8": (compression("int8"), None), "exact, int8": (compression("exact", "int8"), None)}
INT4: dict[str, Any] = {"exact, int4": (compression("exact", "int4"), None)}
CHAIN: dict[str, Any] = {"int4-chain": (compression("int4-chain"), None)}
BLOCKS: dict[str, Any] = {
    "blocks": (None, Checkpointing()),
    "blocks + exact, int4": (compression("exact", "int4"), Checkpointing()),
}


# ---------------------------------------------------------------------------------------------------- models
def _images(model: nn.Module, batch_size: int) -> tuple[nn.Module, Loss]:
    images, labels = torch.randn(batch_size, 3, 224, 224), torch.randint(0, 1000, (batch_size,))
    return model, lambda: F.cross_entropy(model(images).logits, labels)


def resnet50(batch_size: int, layers: int) -> tuple[nn.Module, Loss]:
    from transformers import ResNetConfig, ResNetForImageClassification

    return _images(ResNetForImageClassification(ResNetConfig(num_labels=1000)), batch_size)


def swin_tiny(batch_size: int, layers: int) -> tuple[nn.Module, Loss]:
    from transformers import SwinConfig, SwinForImageClassification

    return _images(SwinForImageClassification(SwinConfig(num_labels=1000)), batch_size)


def deit(width: int, heads: int) -> Callable[[int, int], tuple[nn.Module, Loss]]:
    def make(batch_size: int, layers: int) -> tuple[nn.Module, Loss]:
        from transformers import ViTConfig, ViTForImageClassification

        shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": heads}
        return _images(ViTForImageClassification(ViTConfig(**shape, num_labels=1000)), batch_size)

    return make


def bert_large(length: int) -> Callable[[int, int], tuple[nn.Module, Loss]]:
    def make(batch_size: int, layers: int) -> tuple[nn.Module, Loss]:
        from transformers import BertConfig, BertForSequenceClassification

        shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
        config = BertConfig(**shape, num_hidden_layers=layers, attn_implementation="eager")
        model = BertForSequenceClassification(config)
        ids, labels = torch.randint(0, 30_000, (batch_size, length)), torch.randint(0, 2, (batch_size,))
        return model, lambda: F.cross_entropy(model(input_ids=ids).logits, labels)

    return make


def lstm(batch_size: int, layers: int) -> tuple[nn.Module, Loss]:
    model = UnrolledLSTM()
    tokens = torch.randint(0, 1000, (batch_size, 65))
    return model, lambda: model(tokens)


CASES = {
    "chen-lstm": Case(
        paper="Chen et al., 2016",
        model="LSTM, 4 x 1024, 64 steps",
        make=lstm,
        batch=64,
        state_bytes=4,
        settings={**PLAIN, "chunks of 8 steps": (None, Checkpointing(modules=Chunk)), **EXACT},
        theirs="> 4x less",
        quantity="factor_beyond_fixed",
        batches=(4, 8, 16),
    ),
    "tempo-bert": Case(
        paper="Tempo, 2022",
        model="BERT-large, length 384",
        make=bert_large(384),
        batch=8,
        state_bytes=8,
        settings={**PLAIN, **EXACT, **INT4},
        theirs="batch 8 -> 13 (1.6x; up to 2x)",
        quantity="batch_ratio",
        batches=(1, 2, 3),
        layers=24,
        depths=(2, 4),
    ),
    "gact-bert": Case(
        paper="GACT, 2022",
        model="BERT-large, length 128",
        make=bert_large(128),
        batch=24,
        state_bytes=8,
        settings={**PLAIN, **INT4, **BLOCKS},
        theirs="batch 24 -> 592 (24.7x, with checkpointing)",
        quantity="batch_ratio",
        batches=(4, 8, 12),
        layers=24,
        depths=(2, 4),
    ),
    "gact-resnet": Case(
        paper="ActNN, 2021; GACT, 2022",
        model="ResNet-50, 224x224",
        make=resnet50,
        batch=160,
        state_bytes=4,
        settings={**PLAIN, **EXACT, **INT4, **CHAIN},
        theirs="batch 160 -> 1056 (6.6x, 2 bits); 688 (4.3x, 4 bits)",
        quantity="batch_ratio",
        batches=(2, 4, 6),
    ),
    "gact-swin": Case(
        paper="GACT, 2022",
        model="Swin-T, 224x224",
        make=swin_tiny,
        batch=112,
        state_bytes=8,
        settings={**PLAIN, **EXACT, **INT4},
        theirs="batch 112 -> 632 (5.6x)",
        quantity="batch_ratio",
        batches=(2, 4, 6),
    ),
    **{
        f"mesa-{name.lower()}": Case(
            paper="Mesa, 2021",
            model=f"{name}, 224x224",
            make=make,
            batch=128,
            state_bytes=8,
            settings={**PLAIN, **EXACT, **INT8, **INT4},
            theirs=theirs,
            quantity="factor",
            batches=(2, 4, 6),
        )
        for name, make, theirs in (
            ("DeiT-Ti", deit(192, 3), "4171 -> 1858 MB (2.2x)"),
            ("DeiT-S", deit(384, 6), "8459 -> 3840 MB (2.2x)"),
            ("Swin-Ti", swin_tiny, "11812 -> 5371 MB (2.2x)"),
        )
    },
}


# ---------------------------------------------------------------------------------------------------- measuring
def peak(case: Case, setting: str, batch_size: int, layers: int) -> int:
    """Tracked peak of forward and backward onto gradients that exist."""
    torch.manual_seed(0)
    model, loss = case.make(batch_size, layers)
    model.train()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    activations, checkpointing = case.settings[setting]
    if checkpointing is not None:
        apply_checkpointing(model, checkpointing)
    if activations is not None:
        apply_activation_compression(model, activations)
    subject = Subject(setting, model, torch.optim.SGD(model.parameters(), lr=0.0), None, lambda: loss().backward())
    return measure_memory(subject, warm_up=False, workspace=False)["peak_bytes"]


@dataclass(frozen=True)
class Law:
    """Peak = fixed + per_sample * batch."""

    fixed_bytes: float
    sample_bytes: float

    def peak_bytes(self, batch_size: int) -> float:
        return self.fixed_bytes + self.sample_bytes * batch_size

    def largest_batch(self, budget_bytes: float) -> int:
        return int((budget_bytes - self.fixed_bytes) / self.sample_bytes)


def law(case: Case, setting: str, layers: int) -> Law:
    first, second, _ = case.batches
    low, high = (peak(case, setting, size, layers) for size in (first, second))
    slope = (high - low) / (second - first)
    return Law(low - slope * first, slope)


def full_law(case: Case, setting: str) -> tuple[Law, float]:
    """The law of the paper's model, optimizer state included, and how far the measured third batch is off."""
    depths = case.depths or (case.layers, case.layers)
    shallow = law(case, setting, depths[0])
    deep = law(case, setting, depths[1]) if case.depths else shallow
    third = case.batches[2]
    check = deep.peak_bytes(third) / peak(case, setting, third, depths[1]) - 1
    more = (case.layers - depths[1]) / (depths[1] - depths[0]) if case.depths else 0.0
    with torch.device("meta"):
        model, _ = case.make(1, case.layers)
        state = case.state_bytes * sum(p.numel() for p in model.parameters())
    return (
        Law(
            deep.fixed_bytes + more * (deep.fixed_bytes - shallow.fixed_bytes) + state,
            deep.sample_bytes + more * (deep.sample_bytes - shallow.sample_bytes),
        ),
        check,
    )


def run(name: str) -> None:
    case = CASES[name]
    plain: Law | None = None
    for setting in case.settings:
        found, check = full_law(case, setting)
        plain = plain or found
        budget = plain.peak_bytes(case.batch)
        row = {
            "benchmark": NAME,
            "case": name,
            "paper": case.paper,
            "model": case.model,
            "setting": setting,
            "batch": case.batch,
            "peak_bytes": round(found.peak_bytes(case.batch)),
            "sample_bytes": round(found.sample_bytes),
            "fixed_bytes": round(found.fixed_bytes),
            "check": check,
            "factor": budget / found.peak_bytes(case.batch),
            "factor_beyond_fixed": plain.sample_bytes / found.sample_bytes,
            "largest_batch": found.largest_batch(budget),
            "batch_ratio": found.largest_batch(budget) / case.batch,
            "quantity": case.quantity,
            "theirs": case.theirs,
            "baseline": "predicted from measurements at smaller batches",
            "seed": 0,
            **environment(),
        }
        put_row(NAME, row, ("case", "setting"))
        print(f"{name}, {setting}: {row[case.quantity]:.2f} (check {check:+.1%}), theirs {case.theirs}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for wanted in sys.argv[1:] or CASES:
        run(wanted)
