"""The demo's runs over three seeds: how far test accuracy scatters. About 20 minutes on 2 cores."""

from __future__ import annotations

import tempfile
from pathlib import Path

from harness import environment, write_rows
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.demo.run import DemoConfig, run_demo

rows = []
for seed in (0, 1, 2):
    with tempfile.TemporaryDirectory() as folder:
        results = run_demo(DemoConfig(out=Path(folder), seed=seed, wandb=False))
    baseline_seconds = results[0].report.step_seconds
    for result in results:
        rows.append(
            {
                "benchmark": "demo",
                "model": "WideResNet-28-2, digits, batch 100, SGD momentum, 3 epochs",
                "setting": result.name,
                "seed": seed,
                "peak_bytes": result.report.peak_bytes,
                **{f"{category}_bytes": result.report.by_category[category] for category in CATEGORIES},
                "factor": result.report.factor or 1.0,
                "wall_time_ratio": result.report.step_seconds / baseline_seconds,
                "quality": "test accuracy, fraction of 360 images",
                "quality_value": result.test_accuracy,
                **environment(),
            }
        )
write_rows("demo", rows)
