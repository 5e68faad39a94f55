"""BLEU of a small DynamicConv with memory saving, against a baseline trained beside it (how to run: `parts.py`).

Generated German-English sentences (`examples/data/german_numbers.py`); with a folder in the usual layout of IWSLT'14
(`train.de`, `train.en`, `valid.*`, `test.*`) as `DATA_FOLDER` in this file, that.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchmetrics.text import BLEUScore

from parts import Study
from translation import LADDER, Subwords, dynamicconv, german_numbers, microbatch, token_batches
from wrn import fit

DATA_FOLDER: Path | None = None
NUM_TRAIN, EPOCHS, NUM_TEST, NUM_TOKENS = 6000, 8, 500, 500
BATCH_TOKENS = 2000
SHAPE = {"width": 128, "hidden_width": 256, "encoder_kernels": (3, 7, 15), "decoder_kernels": (3, 7, 15)}
SETTINGS: dict[str, dict[str, Any]] = {
    "baseline": {"recipe": "measure"},
    "microbatch 8, dense: exact, int4, 4-bit moments, into-state, bf16": {
        "microbatch": microbatch(8),
        **LADDER["dense: exact, int4, 4-bit moments, into-state, bf16"],
    },
    "microbatch 8, dense: exact, int4, 4-bit and factored moments, into-state, bf16": {
        "microbatch": microbatch(8),
        **LADDER["dense: exact, int4, 4-bit and factored moments, into-state, bf16"],
    },
    "microbatch 8, sparsity 0.3, exact, int4, 4-bit moments, into-state, bf16": {
        "microbatch": microbatch(8),
        **LADDER["sparsity 0.3, exact, int4, 4-bit moments, into-state, bf16"],
    },
    "microbatch 8, exact, int4, sparsity 0.9, 8-bit moments": {
        "microbatch": microbatch(8),
        **LADDER["+ 8-bit moments"],
    },
}


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
        dropout=0.1,
        lr=2e-3,
        warmup_steps=200,
        **SHAPE,  # type: ignore[arg-type]
    )
    module = dynamicconv.Translator(config)
    batches = [b for e in range(EPOCHS) for b in token_batches(pairs, german, english, BATCH_TOKENS, 100 * seed + e)]
    start = time.process_time()
    memsave, _ = fit(module, DataLoader(batches, batch_size=None), arguments, max_epochs=1)  # type: ignore[arg-type]
    seconds = time.process_time() - start
    return {
        "peak_bytes": memsave.report.peak_bytes,
        "cpu_seconds_run": seconds,
        "quality": "BLEU, greedy",
        "quality_value": 100 * bleu(module, test, german, english),
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


STUDY = Study(
    name="dynamicconv_quality",
    model="DynamicConv, width 128, 3 + 3 layers, generated German-English",
    settings=SETTINGS,
    size={"num_train": NUM_TRAIN, "epochs": EPOCHS, "num_test": NUM_TEST},
    train=train,
)

if __name__ == "__main__":
    STUDY.main()
