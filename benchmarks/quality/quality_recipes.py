"""Test accuracy of the named recipes, trained until the digits are learned: eight epochs, up to three seeds.

About twelve minutes for each seed on one thread of a quiet machine. Rows that are there are not made again.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from benchmarks.harness.measurement import environment, put_row, read_rows
from lightning_memsave.demo import run as demo

NUM_EPOCHS = 8
RECIPES = {"measure": {"recipe": "measure"}, "balanced": {"recipe": "balanced"}, "extreme": {"recipe": "extreme"}}


def main() -> None:
    torch.set_num_threads(1)
    for seed in (0, 1, 2):
        for recipe, settings in RECIPES.items():
            if any((row["setting"], row["seed"]) == (recipe, str(seed)) for row in read_rows("recipes_quality")):
                continue
            demo.RUNS = {recipe: settings}
            with tempfile.TemporaryDirectory() as folder:
                config = demo.DemoConfig(out=Path(folder), seed=seed, wandb=False, epochs=NUM_EPOCHS)
                (result,) = demo.run_demo(config)
            row = {
                "benchmark": "recipes_quality",
                "model": f"WideResNet-28-2, digits, batch 100, SGD momentum, {NUM_EPOCHS} epochs",
                "setting": recipe,
                "seed": seed,
                "peak_bytes": result.report.peak_bytes,
                "quality": "test accuracy, fraction of 360 images",
                "quality_value": result.test_accuracy,
                **environment(),
            }
            put_row("recipes_quality", row, ("setting", "seed"))
            print(row, flush=True)


if __name__ == "__main__":
    main()
