"""DynamicConv at the paper's shapes in fewer and fewer bytes: a batch of 4,000 tokens on each side, Adam.

The network of Wu et al., 2019 (https://arxiv.org/abs/1901.10430) for IWSLT'14 German-English, on which Sohoni et al.,
2019 (https://arxiv.org/abs/1904.10631) report 8.7x by their own count. Its byte budget: docs/results.md. BLEU of the
rows that matter, on a generated task: `quality_dynamicconv.py`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from harness import environment, known_rows, on_this_device, put_row, ratio
from translation import LADDER, dynamicconv, microbatch, random_batch
from wrn import five_batches, measure

NAME = on_this_device("dynamicconv")
NUM_SENTENCES, LENGTH = 160, 25
SIZES = (16, 8, 4)


def measured(arguments: dict[str, Any], microbatch_size: int) -> dict[str, Any]:
    config = dynamicconv.DynamicConvConfig()
    tokens = config.num_source_tokens, config.num_target_tokens
    whole, two = (random_batch(n, LENGTH, *tokens) for n in (NUM_SENTENCES, min(2 * microbatch_size, NUM_SENTENCES)))
    return measure(lambda: dynamicconv.Translator(config), five_batches(whole, two), arguments)


def main(sizes: tuple[int, ...], only: str, resume: bool) -> None:
    torch.set_num_threads(1)
    rows = [("baseline", NUM_SENTENCES, {"recipe": "measure"})]
    rows += [
        (name, size, {"microbatch": microbatch(size), **options}) for size in sizes for name, options in LADDER.items()
    ]
    known = known_rows(NAME) if resume else {}
    baseline: dict[str, Any] = known.get(rows[0][:2], {})
    for name, size, arguments in rows:
        if (name, size) in known or (baseline and only not in name):
            continue
        found = measured(arguments, size)
        baseline = baseline or found
        row = {
            "benchmark": NAME,
            "model": f"DynamicConv, IWSLT'14 shapes, {NUM_SENTENCES} x {LENGTH} tokens, Adam",
            "setting": name,
            "microbatch": size,
            **found,
            "factor": baseline["peak_bytes"] / found["peak_bytes"],
            "factor_allocated": ratio(baseline["allocated_bytes"], found["allocated_bytes"]),
            "baseline": "measured",
            "cpu_time_ratio": found["cpu_seconds"] / baseline["cpu_seconds"],
            "quality": "see dynamicconv_quality.csv",
            "seed": 0,
            **environment(),
        }
        put_row(NAME, row, ("setting", "microbatch"))
        print(f"{name}, microbatch {size}: {found['peak_bytes'] / 1e6:.1f} MB, {row['factor']:.1f}x", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--only", default="", help="settings whose name holds this, and the baseline")
    parser.add_argument("--resume", action="store_true", help="leave rows that are there already")
    options = parser.parse_args()
    main(tuple(options.sizes), options.only, options.resume)
