"""The longest sequence that a step of Llama 3 8B may have on a device of 80 GB, predicted for CUDA.

One sample in bfloat16: adapters of rank 16 on queries and values (LoRA), or all weights, with the settings below in
turn. The peak is predicted on fake tensors for lengths that are extrapolated until one is found that fits while 1 %
more would not. It is the allocator's, with the largest context; what fragmentation takes comes on top.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.measurement import environment, put_row
from lightning_memsave import Checkpointing, MemSave, OptimizerState, Tiling, predict

DEVICE_BYTES = 80 * 10**9
GRAIN, SHORT, NEAR = 1024, 16_384, 0.99  # positions, positions, fraction
TILE = 8192


class Llama3(L.LightningModule):
    """Llama 3 8B in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            intermediate_size=14336, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=2**21,
            use_cache=False,
        )  # fmt: skip
        self.model: Any = LlamaForCausalLM(config).to(torch.bfloat16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])


class Adapted(Llama3):
    """Its adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.model = get_peft_model(self.model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))


MODELS: dict[str, tuple[type[Llama3], dict[str, Any]]] = {
    "Llama 3 8B, LoRA": (Adapted, {}),
    "Llama 3 8B, all weights, 8-bit AdamW, release": (
        Llama3,
        {"optimizer_state": OptimizerState(gradients="release")},
    ),
}
OFFLOADED = Checkpointing(method="blocks", offload=True)
TILED = {"tiling": Tiling(modules=("LlamaMLP", "LlamaRMSNorm"), dim=1, size=TILE)}
HEAD = {"activations": "linear-cross-entropy"}
SETTINGS: dict[str, dict[str, Any]] = {
    "blocks": {"checkpointing": "blocks"},
    "blocks, no logits": {"checkpointing": "blocks", **HEAD},
    "blocks, no logits, tiles": {"checkpointing": "blocks", **HEAD, **TILED},
    "blocks, no logits, tiles, inputs offloaded": {
        "checkpointing": Checkpointing(method="blocks", offload=True),
        **HEAD,
        **TILED,
    },
}


def peak_bytes(model: str, setting: str, length: int) -> int:
    """Return the predicted bytes of a step, with the context."""
    module, options = MODELS[model]
    batch = torch.zeros(1, length, dtype=torch.long)
    found = predict(module, batch, MemSave("measure", **options, **SETTINGS[setting]), target="cuda")
    assert found.source == "fake", found.flags
    assert found.cuda is not None, "it was asked for"
    return found.cuda.allocated_bytes + found.cuda.context_bytes[1]


def longest(size_of: Callable[[int], int]) -> tuple[int, int]:
    """Return the longest sequence that fits, as a multiple of `GRAIN`, and its bytes; of a size that grows straight."""
    first, second = SHORT, 2 * SHORT
    sizes = {length: size_of(length) for length in (first, second)}
    while True:
        slope = (sizes[second] - sizes[first]) / (second - first)
        guess = first + int((DEVICE_BYTES - sizes[first]) / slope) // GRAIN * GRAIN
        while guess in sizes and sizes[guess] > DEVICE_BYTES:
            guess -= GRAIN
        fitting = max((length for length in sizes if sizes[length] <= DEVICE_BYTES), default=0)
        if guess <= fitting / NEAR:
            return fitting, sizes[fitting]
        sizes[guess] = size_of(guess)
        first, second = sorted(sizes, key=lambda length: abs(sizes[length] - DEVICE_BYTES))[:2]


def row(model: str, setting: str) -> dict[str, Any]:
    start = time.process_time()
    length, size = longest(lambda length: peak_bytes(model, setting, length))
    return {
        "benchmark": "sequence",
        "model": f"{model}, bfloat16, one sample, {DEVICE_BYTES // 10**9} GB",
        "setting": setting,
        "num_positions": length,
        "peak_bytes": size,
        "prediction_cpu_seconds": time.process_time() - start,
        "quality": "none: nothing was trained",
        **environment(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for model in MODELS:
        for setting in SETTINGS:
            if sys.argv[1:] and setting not in sys.argv[1:]:
                continue
            made = row(model, setting)
            put_row("sequence", made, ("model", "setting"))
            print(model, setting, made["num_positions"], made["prediction_cpu_seconds"], flush=True)
