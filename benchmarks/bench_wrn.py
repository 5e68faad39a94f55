"""WideResNet-28-2 in fewer and fewer bytes: each technique alone, and all of them together by size of microbatch.

The network and batch of Sohoni et al., "Low-Memory Neural Network Training", 2019 (https://arxiv.org/abs/1904.10631),
who reach 60.7x by their own count. Accuracy of the rows that matter: `quality_wrn.py`.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from harness import environment, known_rows, on_this_device, put_row, ratio
from wrn import ALONE, BATCH_SIZE, COMBINED, MODEL, SIZES, measure_wrn

NAME = on_this_device("wrn")


def settings(sizes: tuple[int, ...]) -> list[tuple[str, int, dict[str, Any]]]:
    """(setting, size of microbatch, arguments of `MemSave`); the baseline first, and each size's own first."""
    alone = [(name, BATCH_SIZE, {"recipe": "measure", **arguments}) for name, arguments in ALONE.items()]
    combined = [
        (name, size, {"microbatch": size, **arguments}) for size in sizes for name, arguments in COMBINED.items()
    ]
    return [("baseline", BATCH_SIZE, {"recipe": "measure"}), *alone, *combined]


def main(sizes: tuple[int, ...], only: str, resume: bool) -> None:
    torch.set_num_threads(1)
    known = known_rows(NAME) if resume else {}
    baselines: dict[int, dict[str, Any]] = {}
    for name, size, arguments in settings(sizes):
        is_baseline = name in ("baseline", "microbatch alone")
        if is_baseline and (name, size) in known:
            baselines[size] = known[name, size]
        if (name, size) in known or (not is_baseline and only not in name):
            continue
        sizes_of = measure_wrn(arguments, size)
        if is_baseline:
            baselines[size] = sizes_of
        whole, same = baselines[BATCH_SIZE], baselines[size]
        row = {
            "benchmark": NAME,
            "model": MODEL,
            "setting": name,
            "microbatch": size,
            **sizes_of,
            "factor": whole["peak_bytes"] / sizes_of["peak_bytes"],
            "factor_same_microbatch": same["peak_bytes"] / sizes_of["peak_bytes"],
            "factor_allocated": ratio(whole["allocated_bytes"], sizes_of["allocated_bytes"]),
            "baseline": "measured",
            "cpu_time_ratio": sizes_of["cpu_seconds"] / whole["cpu_seconds"],
            "quality": "see wrn_quality.csv",
            "seed": 0,
            **environment(),
        }
        put_row(NAME, row, ("setting", "microbatch"))
        print(f"{name}, microbatch {size}: {sizes_of['peak_bytes'] / 1e6:.2f} MB, {row['factor']:.1f}x", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--only", default="", help="settings whose name holds this, and the baselines")
    parser.add_argument("--resume", action="store_true", help="leave rows that are there already")
    options = parser.parse_args()
    main(tuple(options.sizes), options.only, options.resume)
