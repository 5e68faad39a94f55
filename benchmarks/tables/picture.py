"""The picture of README: peaks of the named recipes by category, from the rows of `bench_recipes`."""

from __future__ import annotations

from pathlib import Path

from benchmarks.harness.rows import rows
from lightning_memsave import MemoryReport
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.reporting.chart import draw_comparison

PICTURE = Path(__file__).parent.parent.parent / "docs" / "images" / "recipes.png"


def reports() -> dict[str, MemoryReport]:
    """WideResNet's reports by name."""
    found = [row for row in rows("recipes") if row["model"].startswith("WideResNet")]
    plain = int(found[0]["peak_bytes"])
    return {
        "plain Lightning" if row["setting"] == "measure" else f'MemSave("{row["setting"]}")': MemoryReport(
            peak_bytes=int(row["peak_bytes"]),
            by_category={name: int(row[f"{name}_bytes"]) for name in CATEGORIES},
            baseline_peak_bytes=plain,
        )
        for row in found
    }


if __name__ == "__main__":
    draw_comparison(reports(), PICTURE, "WideResNet-28-2, batch 100: peak of a training step")
