"""Models larger than the machine, predicted: batch 1 x 2048, float32, AdamW.

Llama 2 7B on 1 to 64 processes, and the shapes of Llama 3 8B and 70B for CUDA, under FSDP2 or on one device. Names of
models as arguments make their rows alone.

No row can be held against a run here; `tests/prediction/prediction_program.py` holds small ones of the same kind, to
the byte. Seconds and the process's own memory are what the prediction took.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.measurement import environment, put_row
from lightning_memsave import MemSave, OptimizerState, predict
from lightning_memsave.core.report import CATEGORIES


class Llama(L.LightningModule):
    """The default of `LlamaConfig`: 32 layers, width 4096, 6.7 thousand million parameters."""

    shape: dict[str, Any] = {}  # noqa: RUF012  # never changed

    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(use_cache=False, **self.shape))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class ShardedLlama(Llama):
    """Each layer is gathered when it runs."""

    def configure_model(self) -> None:
        for part in (*self.model.model.layers, self.model):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


class Llama3(ShardedLlama):
    """Llama 3 8B."""

    shape = {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}  # noqa: RUF012  # as above


class WholeLlama3(Llama):
    """Llama 3 8B on one device."""

    shape = Llama3.shape


class LargeLlama3(ShardedLlama):
    """Llama 3 70B."""

    shape = {  # noqa: RUF012  # as above
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }


def sharded(num: int) -> dict[str, Any]:
    return {"strategy": ModelParallelStrategy(data_parallel_size=num, tensor_parallel_size=1), "devices": num}


MODELS: dict[str, dict[str, tuple[type[Llama], dict[str, Any]]]] = {
    "Llama 2 7B": {
        "one process": (Llama, {}),
        "DDP, 8 processes": (Llama, {"strategy": "ddp", "devices": 8}),
        "FSDP2, 8 processes": (ShardedLlama, sharded(8)),
        "FSDP2, 64 processes": (ShardedLlama, sharded(64)),
    },
    "Llama 3 8B": {
        "one process": (WholeLlama3, {"target": "cuda"}),
        "FSDP2, 8 processes": (Llama3, {**sharded(8), "target": "cuda"}),
        "FSDP2, 256 processes": (Llama3, {**sharded(256), "target": "cuda"}),
    },
    "Llama 3 70B": {
        "FSDP2, 8 processes": (LargeLlama3, {**sharded(8), "target": "cuda"}),
        "FSDP2, 256 processes": (LargeLlama3, {**sharded(256), "target": "cuda"}),
    },
}
SMALL = {"precision": "bf16+8", "optimizer_state": OptimizerState(gradients="release")}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"checkpointing": "blocks"},
    "checkpointed, bf16+8, 8-bit state, release": {"checkpointing": "blocks", **SMALL},
}
ALL = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}
SMALLEST = {
    "checkpointing": "blocks",
    "activations": ["exact", "linear-cross-entropy"],
    "optimizer_state": OptimizerState(first_moment="4bit", second_moment="factored", gradients="release", **ALL),
}
ON_ONE_DEVICE: dict[str, dict[str, Any]] = {
    "smallest, bf16-sr": {"precision": "bf16-sr", **SMALLEST},
    "smallest, int8-sr": {"precision": "int8-sr", **SMALLEST},
}
"""Checkpointed, with exact activations, linear cross-entropy, 4-bit first and factored second moments, and release."""


def row(model: str, way: str, setting: str, settings: dict[str, Any]) -> dict[str, Any]:
    module, options = MODELS[model][way]
    start = time.process_time()
    found = predict(module, torch.zeros(1, 2048, dtype=torch.long), MemSave("measure", **settings), **options)
    assert found.source == "fake", found.flags
    return {
        "benchmark": "large",
        "model": f"{model}, batch 1 x 2048, float32, AdamW",
        "setting": f"{way}, {setting}",
        "peak_bytes": found.peak_bytes,
        **{f"{category}_bytes": found.by_category[category] for category in CATEGORIES},
        "prediction_cpu_seconds": time.process_time() - start,
        "prediction_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "quality": "none: nothing was trained",
        **environment(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for model in sys.argv[1:] or MODELS:
        for way, (module, _) in MODELS[model].items():
            for setting, settings in (SETTINGS | (ON_ONE_DEVICE if module is WholeLlama3 else {})).items():
                made = row(model, way, setting, settings)
                put_row("large", made, ("model", "setting"))
                print(model, way, setting, made["peak_bytes"] / 2**30, made["prediction_cpu_seconds"], flush=True)
