"""A GPT and a ViT trained to the end of their schedule with memory saving, beside a baseline (`harness/parts.py`).

AdamW, whose learning rate rises for a twentieth of the steps and falls along a cosine to zero. A seed has the same
first weights, training data and order in each setting. The GPT reads the bytes of Python's standard library, and is
tested on files that were not seen; the ViT sees the generated images of `quality_wrn.py`. With `--size gpt` a baseline
takes four minutes on one core, with `--size vit` six; the smallest settings take two to three times as long.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.harness.parts import Study
from benchmarks.memory_time.bench_planner import Step, language
from benchmarks.models.subjects import next_token_loss
from benchmarks.models.wrn import as_float, fit, load
from benchmarks.quality.quality_activation_compression import (
    NUM_VALIDATION_BATCHES,
    byte_gpt,
    draw_batches,
    source_text,
)
from benchmarks.quality.quality_budget import Copies
from benchmarks.quality.quality_wrn import DATA

_DENSE = {"activations": "int4-chain", "precision": "bf16-sr", "optimizer_state": "4bit"}
SETTINGS: dict[str, dict[str, Any]] = {
    "baseline": {"recipe": "measure"},
    "balanced": {"recipe": "balanced"},
    "int4-chain, 4-bit state, bf16, microbatch 2": {"microbatch": 2, **_DENSE},
    "the same, sparsity 0.5, microbatch 1": {"microbatch": 1, "sparsity": 0.5, **_DENSE},
    "extreme": {"recipe": "extreme"},
}
"""The recipes that change training, and what lies between them."""
SIZES = {"gpt": {"steps": 1000, "batch": 16}, "vit": {"steps": 780, "batch": 64}}
NUM_SEEDS = 3
NUM_TRAIN, NUM_TEST = 5000, 10_000
"""Images; the GPT's training windows are drawn anew for each batch."""


class Scheduled(Step):
    """`Step` whose learning rate rises to 1e-3 and falls to zero by the last step."""

    def __init__(self, *args: Any, num_steps: int) -> None:
        super().__init__(*args)
        self.num_steps = num_steps

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        num_rising = max(1, self.num_steps // 20)

        def share(step: int) -> float:
            falling = (step - num_rising) / (self.num_steps - num_rising)
            return min((step + 1) / num_rising, 0.5 + 0.5 * math.cos(math.pi * max(0.0, falling)))

        return [optimizer], [{"scheduler": LambdaLR(optimizer, share), "interval": "step"}]


def train_gpt(seed: int, arguments: dict[str, Any], size: dict[str, int]) -> dict[str, Any]:
    """Train on windows of 128 bytes; the quality is the loss on files that were not seen, negated."""
    train, unseen = source_text()
    batches = draw_batches(train, size["steps"], 10 * seed + 1)
    module = Scheduled(byte_gpt(seed)("").model, language, num_steps=size["steps"])
    found = _trained(module, DataLoader(Copies(batches), batch_size=None), arguments, size)
    losses = [float(next_token_loss(module.model(ids), ids)) for ids in draw_batches(unseen, NUM_VALIDATION_BATCHES, 2)]
    return {**found, "quality": "minus the test loss, nats per byte", "quality_value": -statistics.mean(losses)}


def vit() -> ViTForImageClassification:
    """4 layers of width 128, 4 heads, images of 32 x 32 in patches of 4 x 4."""
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=4, num_labels=DATA.num_classes))


def _classification_loss(model: ViTForImageClassification, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = as_float(batch)
    return F.cross_entropy(model(images).logits, labels)


def train_vit(seed: int, arguments: dict[str, Any], size: dict[str, int]) -> dict[str, Any]:
    """Train on images of ten classes; the quality is the accuracy on other images of them."""
    torch.manual_seed(seed)
    module = Scheduled(vit(), _classification_loss, num_steps=size["steps"])
    order = torch.Generator().manual_seed(seed)
    images = load(NUM_TRAIN, 2 * seed, DATA)
    found = _trained(
        module, DataLoader(images, size["batch"], shuffle=True, drop_last=True, generator=order), arguments, size
    )
    right = 0
    for part in DataLoader(load(NUM_TEST, 2 * seed + 1, DATA), 250):
        pixels, labels = as_float(part)
        right += int((module.model(pixels).logits.argmax(1) == labels).sum())
    return {**found, "quality": "test accuracy, per cent", "quality_value": 100 * right / NUM_TEST}


def _trained(module: Scheduled, data: Any, arguments: dict[str, Any], size: dict[str, int]) -> dict[str, Any]:
    """Train, and leave the module ready to be tested."""
    start = time.process_time()
    memsave, trainer = fit(module, data, arguments, max_steps=size["steps"])
    assert trainer.global_step == size["steps"]
    module.eval().requires_grad_(False)
    report = memsave.report
    return {
        "peak_bytes": report.peak_bytes,
        "loss_class": report.loss_class,
        "cpu_seconds_run": time.process_time() - start,
    }


STUDIES = {
    "gpt": Study(
        name="gpt_quality",
        model="GPT of plain modules, 4 layers, width 128, batch 16 x 128 bytes, AdamW, Python's standard library",
        settings=SETTINGS,
        size=SIZES["gpt"],
        train=functools.partial(train_gpt, size=SIZES["gpt"]),
        num_seeds=NUM_SEEDS,
    ),
    "vit": Study(
        name="vit_quality",
        model="ViT, 4 layers, width 128, batch 64 x 64 patches, AdamW, generated fractals",
        settings=SETTINGS,
        size=SIZES["vit"],
        train=functools.partial(train_vit, size=SIZES["vit"]),
        num_seeds=NUM_SEEDS,
    ),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--size", choices=STUDIES, default="gpt")
    options, sys.argv[1:] = parser.parse_known_args()
    STUDIES[options.size].main()
