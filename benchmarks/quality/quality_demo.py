"""The demo's runs over three seeds: how far test accuracy scatters. About 20 minutes on 2 cores."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.harness.measurement import environment, put_row, read_rows
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.demo import run as demo


def main(only: str) -> None:
    demo.RUNS = {name: settings for name, settings in demo.RUNS.items() if only in name}
    for seed in (0, 1, 2):
        with tempfile.TemporaryDirectory() as folder:
            config = demo.DemoConfig(out=Path(folder), seed=seed, wandb=False)
            results = demo.run_demo(config)
        known = {row["setting"]: int(row["peak_bytes"]) for row in read_rows("demo") if row["seed"] == str(seed)}
        baseline = known.get("plain Lightning", results[0].report.peak_bytes)
        for result in results:
            row = {
                "benchmark": "demo",
                "model": f"WideResNet-28-2, digits, batch 100, SGD momentum, {config.epochs} epochs",
                "setting": result.name,
                "seed": seed,
                "peak_bytes": result.report.peak_bytes,
                **{f"{category}_bytes": result.report.by_category[category] for category in CATEGORIES},
                "factor": baseline / result.report.peak_bytes,
                "quality": "test accuracy, fraction of 360 images",
                "quality_value": result.test_accuracy,
                **environment(),
            }
            put_row("demo", row, ("setting", "seed"))
            print(row, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="runs whose name holds this, beside the baselines that are there")
    main(parser.parse_args().only)
