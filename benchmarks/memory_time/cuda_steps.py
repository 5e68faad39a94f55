"""Whole training steps on a GPU, in Lightning: what each setting takes and costs, beside what others offer.

Peaks are those of torch's allocator over steps in which nothing is measured by the ledger; times are wall time of such
a step, from the batch's arrival to its end. A prediction beside them was made of shapes alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.data import DataLoader

from benchmarks.harness.measurement import environment, put_row
from benchmarks.models.subjects import PlainGPT, next_token_loss
from benchmarks.models.wrn import quiet
from lightning_memsave import MemSave, OptimizerState, predict

NUM_SKIPPED, NUM_STEPS = 5, 7
"""The first steps warm up, and some are measured by the ledger; the others are timed."""
PLAIN = "plain Lightning"
RELEASED = OptimizerState(first_moment="8bit", gradients="release")
LOW = {"precision": "bf16+8", "optimizer_state": RELEASED}
OURS: dict[str, dict[str, Any]] = {
    "MemSave()": {},
    "activations exact": {"activations": "exact"},
    "activations exact+int8": {"activations": ["exact", "int8"]},
    "activations exact+int4": {"activations": ["exact", "int4"]},
    "checkpointing blocks": {"checkpointing": "blocks"},
    "8bit state": {"optimizer_state": "8bit"},
    "8bit state, release": {"optimizer_state": RELEASED},
    "bf16+8, 8bit, release": LOW,
    "bf16+8, 8bit, release, blocks": {**LOW, "checkpointing": "blocks"},
    "balanced": {"recipe": "balanced"},
    "extreme": {"recipe": "extreme"},
}
OTHERS = ("torch checkpointing of blocks", "torch save_on_cpu")
OTHER_OPTIMIZERS = ("bitsandbytes AdamW8bit",)


class Trained(L.LightningModule):
    """A network with its loss, as it is or with what other libraries offer."""

    def __init__(self, make: Callable[[], nn.Module], loss: Callable[..., Tensor], block: str, setting: str) -> None:
        super().__init__()
        self.net, self._loss, self._setting = make().train(), loss, setting
        if setting == OTHERS[0]:
            apply_activation_checkpointing(self.net, check_fn=lambda module: type(module).__name__ == block)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        is_elsewhere = self._setting == OTHERS[1]
        with torch.autograd.graph.save_on_cpu(pin_memory=True) if is_elsewhere else contextlib.nullcontext():
            return self._loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if isinstance(self._loss, partial):  # of images
            return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)
        if self._setting == OTHER_OPTIMIZERS[0]:
            import bitsandbytes

            return bitsandbytes.optim.AdamW8bit(self.parameters(), lr=1e-4)
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def language(net: nn.Module, ids: Tensor) -> Tensor:
    return net(input_ids=ids, labels=ids).loss


def tokens(net: nn.Module, ids: Tensor) -> Tensor:
    return next_token_loss(net(ids), ids)


def classify(net: nn.Module, batch: tuple[Tensor, Tensor], smoothing: float) -> Tensor:
    return F.cross_entropy(net(batch[0]).logits, batch[1], label_smoothing=smoothing)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**off, loss_type="ForCausalLMLoss"))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 32_000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, use_cache=False, loss_type="ForCausalLMLoss"))


def resnet50() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


def ids_of(num_tokens: int, batch_size: int, length: int) -> Tensor:
    return torch.randint(0, num_tokens, (batch_size, length), device="cpu")


def images() -> Any:
    return torch.randn(64, 3, 224, 224, device="cpu"), torch.randint(0, 1000, (64,), device="cpu")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], str, Callable[[], Any], str]] = {
    "GPT-2 (124M), batch 8 x 1024, AdamW, bf16-mixed": (
        *(gpt2, language, "GPT2Block", partial(ids_of, 50_257, 8, 1024), "bf16-mixed"),
    ),
    "Llama shape (1.1B), batch 2 x 2048, AdamW, bf16-mixed": (
        *(llama, language, "LlamaDecoderLayer", partial(ids_of, 32_000, 2, 2048), "bf16-mixed"),
    ),
    "GPT, 12 layers, width 64, batch 1 x 8, AdamW, float32": (
        *(lambda: PlainGPT(12, 64, 4, 8, dropout=0.0), tokens, "PlainBlock", partial(ids_of, 256, 1, 8), "32-true"),
    ),
    "ResNet-50, batch 64 x 224 x 224, SGD with momentum, bf16-mixed": (
        *(resnet50, partial(classify, smoothing=0.0), "ResNetBottleNeckLayer", images, "bf16-mixed"),
    ),
}


class Steps(Callback):
    """Wall time and the allocator's peak of the steps after the first ones."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        if batch_idx == NUM_SKIPPED:
            torch.cuda.reset_peak_memory_stats()
        self._start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - self._start)
        self.losses.append(float(outputs["loss"]))


def measure(model: str, setting: str) -> dict[str, Any]:
    """Columns of one run."""
    make, loss, block, batch_of, precision = MODELS[model]
    torch.manual_seed(0)
    batch = batch_of()
    with torch.device("cuda"):
        module = Trained(make, loss, block, setting)
    steps = Steps()
    memsave = MemSave(**OURS[setting], summary=False) if setting in OURS else None
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        precision=precision,  # type: ignore[arg-type]
        callbacks=[steps, *([memsave] if memsave else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with quiet():
        trainer.fit(module, DataLoader([batch] * (NUM_SKIPPED + NUM_STEPS), batch_size=None))
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "wall_seconds": statistics.median(steps.seconds[NUM_SKIPPED:]),
        "loss_class": memsave.report.loss_class if memsave else "",
        "peak_bytes": memsave.report.peak_bytes if memsave else "",
        "quality": f"loss of step {NUM_SKIPPED + NUM_STEPS} on one batch",
        "quality_value": steps.losses[-1],
    }


def predicted(model: str, setting: str) -> dict[str, Any]:
    """What a device would hold, of shapes alone."""
    make, loss, block, batch_of, precision = MODELS[model]
    if setting != PLAIN and setting not in OURS:
        return {}
    memsave = MemSave(**OURS.get(setting, {"recipe": "measure"}))
    start = time.perf_counter()
    found = predict(lambda: Trained(make, loss, block, setting), batch_of, memsave, target="cuda", precision=precision)
    assert found.cuda is not None
    return {
        "predicted_allocated_bytes": found.cuda.allocated_bytes,
        "predicted_reserved_bytes": found.cuda.reserved_bytes,
        "prediction_seconds": time.perf_counter() - start,
    }


def settings_of(model: str) -> list[str]:
    is_of_images = isinstance(MODELS[model][1], partial)
    optimizers = () if is_of_images else OTHER_OPTIMIZERS
    return [PLAIN, *OTHERS, *optimizers, *OURS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="", help="those whose name holds this")
    parser.add_argument("--settings", nargs="*", help="these alone; the first is the baseline")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after so many")
    parser.add_argument("--predict", action="store_true", help="predict instead; needs no device")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    start, has_failed = time.monotonic(), False
    name = "cuda_predictions" if options.predict else "cuda_steps"
    for model in (model for model in MODELS if options.models in model):
        baseline: dict[str, Any] = {}
        for setting in options.settings or settings_of(model):
            if time.monotonic() - start > options.seconds:
                sys.exit(has_failed)
            try:
                found = predicted(model, setting) if options.predict else measure(model, setting)
            except Exception as error:  # the other rows are worth having
                print(f"{model}, {setting}: {type(error).__name__}: {str(error)[:600]}", flush=True)
                has_failed = True
                continue
            finally:
                gc.collect()
                if not options.predict:
                    torch.cuda.empty_cache()
            if not found:
                continue
            if not options.predict:
                baseline = baseline or found
                found["factor_allocated"] = baseline["allocated_bytes"] / found["allocated_bytes"]
                found["wall_time_ratio"] = found["wall_seconds"] / baseline["wall_seconds"]
            row = {"benchmark": name, "model": model, "setting": setting, **found, **environment()}
            put_row(name, row, ("model", "setting"))
            print(model, setting, *(f"{k}={found[k]}" for k in list(found)[:12]), sep=" | ", flush=True)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
