"""WideResNet-28-2 under one stated accounting: what `bench_wrn.py` and `quality_wrn.py` have in common.

Every byte that a training step needs is counted: weights, gradients, momentum, the batch (100 images of 8 bits and
their labels), what waits for backward, and everything in between. Images become float32 numbers in `training_step`.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.bfloat16 import faster_bfloat16
from benchmarks.harness.measurement import turns
from benchmarks.models.generated.fractals import FractalConfig, generate
from lightning_memsave import MemoryMonitor, MemSave, NotLosslessWarning, OptimizerState
from lightning_memsave.demo.data import load_cifar10
from lightning_memsave.demo.model import ImageClassifier, WideResNet

BATCH_SIZE = 100
MODEL = "WideResNet-28-2, 32x32, batch 100, SGD momentum, BatchNorm"
SIZES = (10, 8, 5, 4, 2, 1)
"""Of microbatches."""

STATE_8BIT = OptimizerState(first_moment="8bit", min_size=256)
INTO_8BIT = OptimizerState(first_moment="8bit", gradients="into-state", min_size=256)
STATE_4BIT = OptimizerState(first_moment="4bit", min_size=256)
ALONE: dict[str, dict[str, Any]] = {
    "sparsity 0.9": {"sparsity": 0.9},
    "sparsity 0.95": {"sparsity": 0.95},
    "bf16 weights and activations": {"precision": "bf16-sr"},
    "8-bit momentum": {"optimizer_state": STATE_8BIT},
    "4-bit momentum": {"optimizer_state": STATE_4BIT},
    "gradient release": {"optimizer_state": OptimizerState(first_moment="32bit", gradients="release")},
    "activations exact": {"activations": "exact"},
    "activations int8": {"activations": "int8"},
    "activations int4": {"activations": "int4"},
    "activations int4-chain": {"activations": "int4-chain"},
    "checkpointing blocks": {"checkpointing": "blocks"},
    "checkpointing sqrt": {"checkpointing": "sqrt"},
}
_PAPER = {"sparsity": 0.9, "precision": "bf16-sr", "checkpointing": "blocks"}
_CHAIN = {"sparsity": 0.9, "activations": "int4-chain"}
COMBINED: dict[str, dict[str, Any]] = {
    "microbatch alone": {},
    "+ int4-chain": {"activations": "int4-chain"},
    "+ sparsity 0.9": _CHAIN,
    "+ 8-bit momentum": {**_CHAIN, "optimizer_state": STATE_8BIT},
    "+ bf16": {**_CHAIN, "optimizer_state": STATE_8BIT, "precision": "bf16-sr"},
    "+ into-state": {**_CHAIN, "optimizer_state": INTO_8BIT, "precision": "bf16-sr"},
    "sparsity 0.85, int4-chain, 8-bit momentum, into-state, bf16": {
        "sparsity": 0.85,
        "activations": "int4-chain",
        "optimizer_state": INTO_8BIT,
        "precision": "bf16-sr",
    },
    "the paper's four: sparsity 0.9, bf16, blocks": _PAPER,
    "the paper's four + 8-bit momentum + int4-chain": {
        **_PAPER,
        "optimizer_state": STATE_8BIT,
        "activations": "int4-chain",
    },
    "sparsity 0.95, int4-chain, 4-bit momentum, bf16": {
        "sparsity": 0.95,
        "activations": "int4-chain",
        "optimizer_state": STATE_4BIT,
        "precision": "bf16-sr",
    },
}
"""Arguments of `MemSave`, for each size of microbatch."""


class Classifier(ImageClassifier):
    """`ImageClassifier` on images of 8 bits."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(as_float(batch), batch_idx)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        super().test_step(as_float(batch), batch_idx)


def as_float(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    images, labels = batch
    return images.float().div_(127.5).sub_(1), labels


def load(num_images: int, seed: int, config: FractalConfig | None = None) -> TensorDataset:
    """Generated images of 8 bits; `seed` draws other images of the same classes."""
    return TensorDataset(*generate(num_images, seed, config))


def load_cifar10_8bit(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """CIFAR-10, training and test images, as the 8 bits that it is made of."""

    def as_8bit(dataset: TensorDataset) -> TensorDataset:
        images, labels = dataset.tensors
        low, high = images.amin((0, 2, 3), keepdim=True), images.amax((0, 2, 3), keepdim=True)
        return TensorDataset((255 * (images - low) / (high - low)).round().to(torch.uint8), labels)

    train, test = load_cifar10(folder)
    return as_8bit(train), as_8bit(test)


@contextmanager
def quiet() -> Iterator[None]:
    """Neither hints nor the warning that BatchNorm sees microbatches, which is what these runs are about."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotLosslessWarning)
        warnings.filterwarnings("ignore", message=".*(workers|logging interval|`max_epochs`|GPU available|LeafSpec).*")
        yield


CLOCK = "wall" if torch.cuda.is_available() else "cpu"


def seconds_now() -> float:
    """CPU time of this process; where a GPU does the work, the time when it has done it."""
    if CLOCK == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class StepSeconds(Callback):
    """Seconds of each training batch, by `CLOCK`."""

    def __init__(self) -> None:
        self._start = 0.0
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._start = seconds_now()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seconds.append(seconds_now() - self._start)


def fit(
    module: L.LightningModule,
    data: Any,
    settings: dict[str, Any],
    *callbacks: Callback,
    validation: Any = None,
    checkpoint: Path | None = None,
    **options: Any,
) -> tuple[MemSave, L.Trainer]:
    """Train with `MemSave(**settings)`, and nothing else than that; from a `checkpoint` on, if there is one."""
    memsave = MemSave(**settings)
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        callbacks=[*callbacks, memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    with quiet(), faster_bfloat16():
        trainer.fit(module, data, validation, ckpt_path=checkpoint, weights_only=False)
    return memsave, trainer


def measure(
    module_of: Callable[[], L.LightningModule], whole: Any, two_microbatches: Any, settings: dict[str, Any]
) -> dict[str, Any]:
    """Tracked peak by category, the allocator's peak, and the seconds of a step beside those of a plain one.

    The ledger sees the second step and the third, of which the second is of the whole batch and has the peak. The
    workspace inside of kernels, which does not depend on how many microbatches there are, is found in the fourth and
    fifth. The others are of the whole batch again, and timed.
    """

    short, long = two_microbatches, whole
    timed = [long] * (turns(4) // 2)

    def fitted(batches: list[Any], settings: dict[str, Any], *callbacks: Callback) -> tuple[MemSave, float]:
        torch.manual_seed(0)
        steps = StepSeconds()
        data = DataLoader([*batches, *timed], batch_size=None)  # type: ignore[arg-type]
        memsave, _ = fit(module_of(), data, settings, steps, *callbacks, max_epochs=1)
        return memsave, statistics.median(steps.seconds[-len(timed) :])

    _, baseline_seconds = fitted([short] * 3, {"recipe": "measure"})
    memsave, seconds = fitted([short, long, short, short, short], settings, MemoryMonitor(workspace=True))
    report = memsave.report
    assert report.peak_bytes is not None
    return {
        "peak_bytes": report.peak_bytes,
        **{f"{category}_bytes": size for category, size in report.by_category.items()},
        "allocated_bytes": None if report.workspace_bytes is None else report.peak_bytes + report.workspace_bytes,
        "reserved_bytes": report.reserved_bytes,
        "loss_class": report.loss_class,
        f"{CLOCK}_seconds": seconds,
        f"baseline_{CLOCK}_seconds": baseline_seconds,
        f"{CLOCK}_time_ratio": seconds / baseline_seconds,
    }


def measure_wrn(settings: dict[str, Any], microbatch: int) -> dict[str, Any]:
    """`measure`, of WideResNet-28-2 on generated images."""
    images, labels = load(BATCH_SIZE, seed=1).tensors
    n = min(2 * microbatch, BATCH_SIZE)
    # Copies: a slice would keep the whole batch alive.
    two_microbatches = images[:n].clone(), labels[:n].clone()
    return measure(lambda: Classifier(WideResNet(), lr=0.05), (images, labels), two_microbatches, settings)
