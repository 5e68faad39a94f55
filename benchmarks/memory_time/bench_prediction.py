"""Predicted against measured peaks of whole Lightning steps, and the seconds that a prediction takes.

Ten kinds of models, small, each plain, checkpointed, in codes and microbatches, and with everything.
"""

from __future__ import annotations

import argparse
import copy
import csv
import logging
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from benchmarks.harness.measurement import RESULTS, environment, save_rows
from benchmarks.models.subjects import DeepResNet, PlainGPT, next_token_loss
from lightning_memsave import LowPrecision, MemSave, Sparsity
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.demo.model import WideResNet
from lightning_memsave.prediction.predictor import Predictor


class Subject(L.LightningModule):
    """A network, its loss, and an optimizer."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any], Tensor], momentum: bool = False) -> None:
        super().__init__()
        self.net, self._loss, self._momentum = net, loss, momentum

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(self.net, batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self._momentum:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def classify(net: nn.Module, batch: Any) -> Tensor:
    out = net(batch[0])
    return F.cross_entropy(getattr(out, "logits", out), batch[1])


def images(num_samples: int, size: int = 32) -> Any:
    return torch.randn(num_samples, 3, size, size), torch.randint(0, 10, (num_samples,))


def tokens(num_samples: int, length: int, num_tokens: int = 256) -> Tensor:
    return torch.randint(0, num_tokens, (num_samples, length))


class DynamicConv(nn.Module):
    """A depthwise convolution over time whose kernel each token computes; gated; two blocks."""

    def __init__(self, width: int = 128, num_heads: int = 8, kernel: int = 7, num_tokens: int = 256) -> None:
        super().__init__()
        self.num_heads, self.kernel = num_heads, kernel
        self.embed, self.head = nn.Embedding(num_tokens, width), nn.Linear(width, num_tokens)
        self.gates = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.kernels = nn.ModuleList(nn.Linear(width, num_heads * kernel) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)  # [B, T, D]
        for gate, kernels, norm in zip(self.gates, self.kernels, self.norms, strict=True):
            y = F.glu(gate(norm(x)), -1)
            weights = kernels(y).unflatten(-1, (self.num_heads, self.kernel)).softmax(-1)  # [B, T, heads, kernel]
            windows = F.pad(y, (0, 0, self.kernel - 1, 0)).unfold(1, self.kernel, 1)  # [B, T, D, kernel]
            windows = windows.unflatten(2, (self.num_heads, -1))
            x = x + F.dropout((windows * weights.unsqueeze(3)).sum(-1).flatten(2), 0.1, self.training)
        return self.head(x)


class Recurrent(nn.Module):
    """Two layers of LSTM over embedded bytes."""

    def __init__(self, width: int = 128, num_tokens: int = 256) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(num_tokens, width), nn.Linear(width, num_tokens)
        self.rnn = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        # Not every CPU has oneDNN's LSTM for 16 bits, which keeps other tensors: the same operations on all of them.
        with torch.backends.mkldnn.flags(enabled=self.rnn.weight_ih_l0.dtype == torch.float32):
            return self.head(self.rnn(self.embed(ids))[0])


def double_conv(in_channels: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(in_channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
        *(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)),
    )


class UNet(nn.Module):
    """Two levels down and up, with skips."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([double_conv(3, width), double_conv(width, 2 * width)])
        self.middle = double_conv(2 * width, 4 * width)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.merge = nn.ModuleList([double_conv(4 * width, 2 * width), double_conv(2 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return self.head(x)


def language(net: nn.Module, ids: Tensor) -> Tensor:
    out = net(ids)
    return next_token_loss(getattr(out, "logits", out), ids)


def segment(net: nn.Module, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(net(batch[0]).squeeze(1), batch[1])


SMALL = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
MODELS: dict[str, Callable[[], tuple[Subject, Any]]] = {
    "WRN-28-2": lambda: (Subject(WideResNet(), classify, momentum=True), images(8)),
    "deep ResNet": lambda: (Subject(DeepResNet((1, 4, 6, 1), 4), classify, momentum=True), images(8)),
    "byte GPT": lambda: (Subject(PlainGPT(3, 128, 4, 64), language), tokens(8, 64)),
    "BERT": lambda: (
        Subject(
            BertForSequenceClassification(BertConfig(**SMALL, intermediate_size=512, vocab_size=1000, num_labels=10)),
            lambda net, b: F.cross_entropy(net(input_ids=b[0], attention_mask=b[2]).logits, b[1]),
        ),
        (tokens(8, 64), torch.randint(0, 10, (8,)), torch.ones(8, 64, dtype=torch.int64)),
    ),
    "ViT": lambda: (
        Subject(
            ViTForImageClassification(
                ViTConfig(**SMALL, intermediate_size=512, image_size=32, patch_size=4, num_labels=10)
            ),
            classify,
        ),
        images(8),
    ),
    "DynamicConv": lambda: (Subject(DynamicConv(), language), tokens(8, 64)),
    "LSTM": lambda: (Subject(Recurrent(), language), tokens(8, 64)),
    "U-Net": lambda: (Subject(UNet(), segment), (torch.randn(8, 3, 32, 32), torch.rand(8, 32, 32).round())),
    "mixture of experts": lambda: (
        Subject(
            MixtralForCausalLM(
                MixtralConfig(
                    **SMALL,
                    intermediate_size=256,
                    num_key_value_heads=2,
                    num_local_experts=4,
                    vocab_size=256,
                    use_cache=False,
                )
            ),
            language,
        ),
        tokens(8, 64),
    ),
    "Mamba": lambda: (
        Subject(
            MambaForCausalLM(MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=256, use_cache=False)),
            language,
        ),
        tokens(8, 16),
    ),
}
SETTINGS: dict[str, Callable[[], MemSave]] = {
    "plain": lambda: MemSave("measure"),
    "checkpointed": lambda: MemSave("measure", checkpointing="sqrt"),
    "codecs and microbatch": lambda: MemSave("measure", activations=["exact", "int4"], microbatch=4),
    "everything": lambda: MemSave(
        sparsity=Sparsity(sparsity=0.9),
        precision=LowPrecision(),
        microbatch=4,
        activations=["exact", "int4"],
        checkpointing="sqrt",
        optimizer_state="4bit",
    ),
}


def measured(module: Subject, batch: Any, memsave: MemSave) -> Any:
    """The report of a run of three steps."""
    torch.manual_seed(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(copy.deepcopy(module), DataLoader([batch] * 3, batch_size=None))
    return memsave.report


def row(model: str, setting: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module, batch = MODELS[model]()
    memsave = SETTINGS[setting]()
    start = time.process_time()
    prediction = Predictor(module, batch)(memsave.recipe)
    seconds = time.process_time() - start
    report = measured(module, batch, memsave)
    misses = {name: prediction.by_category[name] - report.by_category[name] for name in CATEGORIES}
    return {
        "benchmark": "prediction",
        "model": model,
        "setting": setting,
        "predicted_peak_bytes": prediction.peak_bytes,
        "measured_peak_bytes": report.peak_bytes,
        "error_percent": 100 * (prediction.peak_bytes / report.peak_bytes - 1),
        "source": prediction.source,
        "largest_miss": max(misses, key=lambda name: abs(misses[name])) if any(misses.values()) else "",
        "prediction_cpu_seconds": seconds,
        **environment(),
    }


def kept_rows(models: list[str], settings: list[str]) -> list[dict[str, Any]]:
    """Rows of earlier runs that this one does not make anew."""
    path = RESULTS / "prediction.csv"
    earlier = list(csv.DictReader(path.open())) if path.exists() else []
    return [row for row in earlier if not (row["model"] in models and row["setting"] in settings)]


def rows(models: list[str], settings: list[str], write: bool = False) -> list[dict[str, Any]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found, kept = [], kept_rows(models, settings)
    for model in models:
        for setting in settings:
            found.append(row(model, setting))
            if write:
                order = [(m, s) for m in MODELS for s in SETTINGS]
                both = sorted([*kept, *found], key=lambda each: order.index((each["model"], each["setting"])))
                save_rows("prediction", both)
            shown = ("model", "setting", "predicted_peak_bytes", "measured_peak_bytes", "error_percent", "source")
            print(*(found[-1][key] for key in shown), found[-1]["largest_miss"], flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS))
    parser.add_argument("--no-write", dest="write", action="store_false", help="only print the rows")
    options = parser.parse_args()
    rows(options.models, options.settings, options.write)
