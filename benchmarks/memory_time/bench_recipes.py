"""The named recipes as one word of `MemSave`, on five models that Lightning trains for some steps.

CPU seconds are of steps that nobody measures, on one thread; their ratio is to the plain run, which comes just before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from benchmarks.harness.measurement import environment, turns, write_rows
from benchmarks.models.subjects import gpt
from lightning_memsave import MemSave
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.demo.model import ImageClassifier, WideResNet

RECIPES = ("measure", "exact", "balanced", "extreme")
NUM_SKIPPED = 9  # two are measured, and regions compare their repetitions with forward in steps 1 to 5 and 9


class Training(L.LightningModule):
    """A model of `transformers`, which computes its loss itself."""

    def __init__(self, model: nn.Module, inputs: str) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(**{self.inputs: batch[0], "labels": batch[-1]}).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-3)


def resnet_50() -> L.LightningModule:
    """23.5 M parameters, 10 classes."""
    return Training(ResNetForImageClassification(ResNetConfig(num_labels=10)), "pixel_values")


def vit_small() -> L.LightningModule:
    """12 layers of width 384, patches of 16, 21.7 M parameters."""
    shape = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6}
    return Training(ViTForImageClassification(ViTConfig(**shape, num_labels=10)), "pixel_values")


def llama_lora() -> L.LightningModule:
    """8 layers of width 512, 8,000 words; rank 8 on queries and values."""
    shape = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=8000, use_cache=False))
    return Training(get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"])), "input_ids")


class Clock(L.Callback):
    """CPU seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.process_time() - self._start)


def images(num: int, size: int) -> TensorDataset:
    return TensorDataset(torch.randn(num, 3, size, size), torch.randint(0, 10, (num,)))


def tokens(num: int, length: int, num_words: int = 1000) -> TensorDataset:
    return TensorDataset(torch.randint(0, num_words, (num, length)))


MODELS: dict[str, tuple[Callable[[], L.LightningModule], TensorDataset, int]] = {
    "WideResNet-28-2, 32 x 32, batch 100": (lambda: ImageClassifier(WideResNet()), images(800, 32), 100),
    "ResNet-50, 224 x 224, batch 16": (resnet_50, images(128, 224), 16),
    "ViT-S/16, 224 x 224, batch 16": (vit_small, images(128, 224), 16),
    "GPT-2, 4 layers of 256, 1,000 words, batch 8 x 128": (
        lambda: Training(gpt("recipes").model, "input_ids"),
        tokens(64, 128),
        8,
    ),
    "Llama with LoRA, 8 layers of 512, 8,000 words, batch 8 x 256": (llama_lora, tokens(64, 256, 8000), 8),
}
"""Makers, data and batch sizes. WideResNet is trained by SGD with momentum, the others by AdamW."""


def run(make: Callable[[], L.LightningModule], data: TensorDataset, batch_size: int, recipe: str) -> tuple[Any, float]:
    """The report, and the median of a step's CPU seconds."""
    torch.manual_seed(0)
    memsave, clock = MemSave(recipe, summary=False), Clock()
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[clock, memsave],
        max_steps=NUM_SKIPPED + turns(3),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(make(), DataLoader(data, batch_size=batch_size))
    return memsave.report, statistics.median(clock.seconds[NUM_SKIPPED:])


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = []
    for model, (make, data, batch_size) in MODELS.items():
        plain = None
        for recipe in RECIPES:
            report, seconds = run(make, data, batch_size, recipe)
            plain = plain or (report, seconds)
            rows.append(
                {
                    "benchmark": "recipes",
                    "model": model,
                    "setting": recipe,
                    "peak_bytes": report.peak_bytes,
                    **{f"{category}_bytes": report.by_category[category] for category in CATEGORIES},
                    "factor": plain[0].peak_bytes / report.peak_bytes,
                    "microbatch_samples": report.microbatch_size or batch_size,
                    "cpu_seconds": seconds,
                    "cpu_time_ratio": seconds / plain[1],
                    "loss_class": report.loss_class,
                    **environment(),
                }
            )
            print(
                model, recipe, report.peak_bytes, f"{rows[-1]['factor']:.2f}x", f"{seconds / plain[1]:.2f}x", flush=True
            )
    write_rows("recipes", rows)
