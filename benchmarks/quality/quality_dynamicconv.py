"""BLEU of a small DynamicConv with memory saving, against a baseline trained beside it (to run: `harness/parts.py`).

Generated German-English sentences (`benchmarks/models/generated/german_numbers.py`); with a folder in the usual layout
of IWSLT'14 (`train.de`, `train.en`, `valid.*`, `test.*`) as `DATA_FOLDER` in this file, that.

What translates is the mean of ten checkpoints from the last quarter of a run, as in the recipe for IWSLT'14 of Wu et
al. (2019, https://arxiv.org/abs/1901.10430; fairseq's `examples/pay_less_attention_paper`): the rate of learning is
still high at the end, and single weights scatter. It costs no memory in training; checkpoints lie on disk.

No sentence is seen twice, and there is no dropout: with 6,000 sentences seen eight times, baselines were a point of
BLEU apart, and a loss of 0.15 could not have been seen.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics.text import BLEUScore

from benchmarks.harness.parts import Study
from benchmarks.models.translation import (
    INTO_MEANS,
    LADDER,
    Subwords,
    dynamicconv,
    german_numbers,
    microbatch,
    token_batches,
)
from benchmarks.models.wrn import fit
from lightning_memsave import OptimizerState

DATA_FOLDER: Path | None = None
NUM_TRAIN, EPOCHS, NUM_TEST, NUM_TOKENS = 72_000, 1, 2000, 500
NUM_CHECKPOINTS = 10
BATCH_TOKENS = 2000
SHAPE = {"width": 128, "hidden_width": 256, "encoder_kernels": (3, 7, 15), "decoder_kernels": (3, 7, 15)}
SETTINGS: dict[str, dict[str, Any]] = {
    "baseline": {"recipe": "measure"},
    "microbatch 4, dense: exact, int8, 4-bit and factored moments, into-state, bf16": {
        "microbatch": microbatch(4),
        "activations": ["exact", "int8"],
        "optimizer_state": INTO_MEANS,
        "precision": "bf16-sr",
    },
    "microbatch 8, dense: exact, int4, 4-bit moments, into-state, bf16": {
        "microbatch": microbatch(8),
        **LADDER["dense: exact, int4, 4-bit moments, into-state, bf16"],
    },
    "microbatch 8, dense: exact, int4, 4-bit and factored moments, into-state, bf16": {
        "microbatch": microbatch(8),
        **LADDER["dense: exact, int4, 4-bit and factored moments, into-state, bf16"],
    },
    "microbatch 8, dense: exact, int4, linear-cross-entropy, 5-bit and factored moments, into-state, bf16": {
        "microbatch": microbatch(8),
        **LADDER["dense: exact, int4, linear-cross-entropy, 5-bit and factored moments, into-state, bf16"],
    },
    "microbatch 8, sparsity 0.3, exact, int4, 4-bit moments, into-state, bf16": {
        "microbatch": microbatch(8),
        **LADDER["sparsity 0.3, exact, int4, 4-bit moments, into-state, bf16"],
    },
    "microbatch 8, exact, int4, sparsity 0.9, 8-bit moments": {
        "microbatch": microbatch(8),
        **LADDER["+ 8-bit moments"],
    },
    "exact, int4": {"activations": ["exact", "int4"]},
    "bf16": {"precision": "bf16-sr"},
    "4-bit and factored moments": {"optimizer_state": replace(INTO_MEANS, gradients="keep")},
    "microbatch 8, into-state": {
        "microbatch": microbatch(8),
        "optimizer_state": OptimizerState(first_moment="32bit", gradients="into-state"),
    },
    "microbatch 8, 4-bit and factored moments, into-state": {
        "microbatch": microbatch(8),
        "optimizer_state": INTO_MEANS,
    },
}
"""After what composes, each of its techniques by itself, and two that meet: moments are rounded for each microbatch."""


class Checkpoints(Callback):
    """Weights after some steps, in a folder."""

    def __init__(self, folder: Path, steps: Collection[int]) -> None:
        self._folder, self._steps = folder, steps

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step in self._steps:
            torch.save(pl_module.state_dict(), self._folder / f"{trainer.global_step}.pt")


def mean_of_checkpoints(folder: Path) -> dict[str, Tensor]:
    """Their mean, in float32."""
    found = [torch.load(path, weights_only=True) for path in sorted(folder.iterdir())]
    return {name: torch.stack([weights[name].float() for weights in found]).mean(0) for name in found[0]}


def train(seed: int, arguments: dict[str, Any]) -> dict[str, Any]:
    if DATA_FOLDER is None:
        pairs = german_numbers.generate(NUM_TRAIN, seed)
        test = german_numbers.generate(NUM_TEST, 10_000 + seed, without=set(pairs))
    else:
        pairs, test = (german_numbers.load_parallel(DATA_FOLDER, split) for split in ("train", "test"))
    german, english = (Subwords((pair[side] for pair in pairs), NUM_TOKENS) for side in (0, 1))
    torch.manual_seed(seed)
    config = dynamicconv.DynamicConvConfig(
        num_source_tokens=len(german),
        num_target_tokens=len(english),
        dropout=0.0,
        lr=3e-3,
        warmup_steps=100,
        **SHAPE,  # type: ignore[arg-type]
    )
    module = dynamicconv.Translator(config)
    batches = [b for e in range(EPOCHS) for b in token_batches(pairs, german, english, BATCH_TOKENS, 100 * seed + e)]
    steps = [len(batches) - n * (len(batches) // (4 * NUM_CHECKPOINTS)) for n in range(NUM_CHECKPOINTS)]
    with TemporaryDirectory() as folder:
        data = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
        start = time.process_time()
        memsave, _ = fit(module, data, arguments, Checkpoints(Path(folder), steps), max_epochs=1)
        seconds = time.process_time() - start
        averaged = dynamicconv.Translator(config)
        averaged.load_state_dict(mean_of_checkpoints(Path(folder)))
    return {
        "peak_bytes": memsave.report.peak_bytes,
        "cpu_seconds_run": seconds,
        "quality": "BLEU, greedy",
        "quality_value": 100 * bleu(averaged, test, german, english),
        "quality_value_of_last_weights": 100 * bleu(module, test, german, english),
    }


def bleu(module: dynamicconv.Translator, test: list[tuple[str, str]], german: Subwords, english: Subwords) -> float:
    module.eval()
    score = BLEUScore()
    expected = {tuple(english.encode(en).tolist()): en for _, en in test}
    for batch in token_batches(test, german, english, BATCH_TOKENS, 0):
        said = [english.decode(tokens) for tokens in module.model.translate(batch["source"]).tolist()]
        labels = [tuple(token for token in row if token >= 0) for row in batch["labels"].tolist()]
        score.update(said, [[expected[tokens]] for tokens in labels])
    return float(score.compute())


_GENERATED = {"num_train": NUM_TRAIN, "num_test": NUM_TEST} if DATA_FOLDER is None else {}
STUDY = Study(
    name="dynamicconv_quality" if DATA_FOLDER is None else "dynamicconv_iwslt14_quality",
    model=f"DynamicConv, width 128, 3 + 3 layers, {DATA_FOLDER or 'generated German-English'}",
    settings=SETTINGS,
    size={**_GENERATED, "epochs": EPOCHS, "num_checkpoints": NUM_CHECKPOINTS},
    train=train,
)

if __name__ == "__main__":
    STUDY.main()
