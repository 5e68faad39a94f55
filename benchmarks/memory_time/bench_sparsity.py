"""Sparse layers beside dense ones: bytes and time of a step. What sparse training reaches: `quality_sparsity.py`.

Names of results (`wrn`, `bert`) as arguments run only these.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.harness.measurement import (
    Subject,
    environment,
    measure_cpu_seconds,
    measure_memory,
    measured_rows,
    time_columns,
    write_rows,
)
from benchmarks.models.subjects import wide_resnet
from lightning_memsave import Sparsity, apply_sparsity
from lightning_memsave.demo.model import WideResNet
from lightning_memsave.numerics.sparse_index import index_bytes
from lightning_memsave.techniques.sparsity import sparse_layers

QUALITY = "tensors that differ in any bit from masked dense (loss, gradients, buffers)"


def held_bytes(subject: Subject) -> dict[str, int]:
    """What stays between steps: weights with positions and buffers, gradients, optimizer state."""
    model, optimizer = subject.model, subject.optimizer
    if all(p.grad is None for p in model.parameters()):
        subject.step()
    sizes = {
        "held_weights_bytes": sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        "held_gradients_bytes": sum(p.grad.nbytes for p in model.parameters() if p.grad is not None),
        "held_state_bytes": sum(
            t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
        ),
    }
    return {**sizes, "held_bytes": sum(sizes.values())}


# ---------------------------------------------------------------------------------------------------- a step
def sparse_wide_resnet(setting: str, batch_size: int) -> Subject:
    subject = wide_resnet(setting, batch_size)
    if "bf16" in setting:
        subject.model.bfloat16()
        subject.batch = subject.batch[0].bfloat16(), subject.batch[1]
    if "sparse" in setting:
        fraction = setting.partition("sparse ")[2].partition(",")[0]
        config = Sparsity(sparsity=fraction if ":" in fraction else float(fraction))
        apply_sparsity(subject.model, config)
    model, (images, labels) = subject.model, subject.batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def loss() -> Tensor:
        return F.cross_entropy(model(images).float(), labels)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return Subject(setting, model, optimizer, subject.batch, step, loss)


def num_different(subject: Subject) -> tuple[str, float]:
    """One forward and backward pass against the same weights in dense layers, gradients masked."""
    dense = WideResNet().to(next(subject.model.parameters()).dtype)
    dense.load_state_dict(subject.model.state_dict())
    images, labels = subject.batch
    layers = sparse_layers(subject.model)

    def outcome(model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        gradients = []
        for name, module in model.named_modules():
            for own, p in module.named_parameters(recurse=False):
                gradient = p.grad
                if name in layers and own == "weight":
                    gradient = layers[name].layout.compact(gradient)
                gradients.append(gradient)
        buffers = [b for n, b in model.named_buffers() if not n.endswith("values_index")]
        return [loss.detach(), *gradients, *buffers]

    pairs = zip(outcome(copy.deepcopy(subject.model)), outcome(dense), strict=True)
    return QUALITY, sum(not torch.equal(ours, expected) for ours, expected in pairs)


def wrn() -> None:
    """float32, and bfloat16 at a smaller batch, as its convolutions are slow on CPUs."""
    rows = []
    for dtype, batch_size, settings in (
        ("", 20, ("dense", "sparse 0.5", "sparse 2:4", "sparse 0.9", "sparse 0.95")),
        (", bf16", 4, ("dense", "sparse 0.9")),
    ):
        subjects = [sparse_wide_resnet(setting + dtype, batch_size) for setting in settings]
        name = f"WideResNet-28-2{dtype}, batch {batch_size}, SGD momentum"
        rows += measured_rows("sparsity", name, subjects, num_different, held_bytes, repeats=5)
    write_rows("sparsity", rows)


# ---------------------------------------------------------------------------------------------------- a transformer
def bert_subject(setting: str) -> Subject:
    """BERT-base, one sequence: what is held between steps is the model's, whatever the batch."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(attn_implementation="eager")).eval()  # without dropout
    if setting != "dense":
        apply_sparsity(model, Sparsity(sparsity=float(setting.partition(" ")[2])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids, labels = torch.randint(0, 30_000, (1, 16)), torch.tensor([1])

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()

    return Subject(setting, model, optimizer, (ids, labels), step)


def bert() -> None:
    """Bytes held against density x dense plus positions, for the layers that are sparse; time of a tiny step."""
    rows: list[dict[str, Any]] = []
    dense_sizes: dict[str, int] = {}
    subjects = []
    for setting in ("dense", "sparse 0.9", "sparse 0.95"):
        subject = bert_subject(setting)
        subjects.append(subject)
        memory, sizes = measure_memory(subject, workspace=False), held_bytes(subject)
        if setting == "dense":
            dense_peak, dense_sizes = memory["peak_bytes"], sizes
        layers = sparse_layers(subject.model).values()
        total = sum(layer.dense_shape.numel() for layer in layers)
        density = 1.0 - float(setting.partition(" ")[2]) if layers else 1.0
        positions = sum(
            index_bytes(round(density * layer.dense_shape.numel()), layer.dense_shape.numel()) for layer in layers
        )
        # Four float32 numbers for each weight: itself, its gradient, two moments.
        expected = dense_sizes["held_bytes"] - 16 * total + 16 * density * total + positions
        rows.append(
            {
                "benchmark": "sparsity_bert",
                "model": "BERT-base, batch 1 x 16, AdamW",
                "setting": setting,
                **memory,
                "factor": dense_peak / memory["peak_bytes"],
                **sizes,
                "held_factor": dense_sizes["held_bytes"] / sizes["held_bytes"],
                "quality": "held bytes over density x dense + positions",
                "quality_value": sizes["held_bytes"] / expected,
            }
        )
    torch.set_num_threads(1)
    seconds = measure_cpu_seconds(subjects, 5)
    for row, taken in zip(rows, seconds, strict=True):
        row |= time_columns(taken, seconds[0]) | environment()
    write_rows("sparsity_bert", rows)


RUNS = {"wrn": wrn, "bert": bert}

if __name__ == "__main__":
    for name in sys.argv[1:] or RUNS:
        RUNS[name]()
