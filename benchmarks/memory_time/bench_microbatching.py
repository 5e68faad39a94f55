"""Peak, time and gradient difference against the size of the microbatch: WideResNet-28-2, a GPT, a picture of both."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from benchmarks.harness.measurement import RESULTS, Subject, compare
from benchmarks.models.subjects import eval_batchnorm, gradients, plain_gpt, relative_difference, wide_resnet

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "microbatching.svg"
MODELS = {
    "microbatching": ("WideResNet-28-2, batch 100, SGD momentum", 100, (50, 20, 10, 5, 2, 1)),
    "microbatching_gpt": ("GPT, 4 layers, width 256, batch 32 x 128, AdamW", 32, (16, 8, 4, 2, 1)),
}


def make(name: str, setting: str, size: int | None) -> Subject:
    if name == "microbatching":
        return wide_resnet(setting, microbatch=size)
    return plain_gpt(setting, batch_size=32, context=128, num_layers=4, dropout=0.0, microbatch=size)


def measure(name: str) -> None:
    model, batch_size, sizes = MODELS[name]
    whole = f"batch {batch_size}"
    subjects = [make(name, whole, None), *(make(name, f"microbatch {size}", size) for size in sizes)]

    def quality(subject: Subject) -> tuple[str, float]:
        """With frozen BatchNorm, where microbatches are exact: how far gradients are from the whole batch's."""
        size = None if subject.setting == whole else int(subject.setting.split()[1])
        results = []
        for microbatch in (size, None):
            twin = make(name, "twin", microbatch)
            eval_batchnorm(twin.model)
            results.append(gradients(twin))
        return "relative gradient difference (BatchNorm frozen, float32)", relative_difference(*results)

    compare(name, model, subjects, quality)


def draw() -> None:
    """Stacked bytes at the peak against the size of the microbatch."""
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "memsave"  # the same bytes each time
    categories = ("weights", "gradients", "optimizer_state", "data", "temporary", "activations")
    figure, panels = plt.subplots(1, len(MODELS), figsize=(10, 3.6), layout="constrained")
    for panel, (name, (model, batch_size, _)) in zip(panels, MODELS.items(), strict=True):
        with (RESULTS / f"{name}.csv").open() as file:
            rows = sorted(csv.DictReader(file), key=lambda row: int(row["setting"].split()[1]))
        sizes = [row["setting"].split()[1] for row in rows]
        stacked = [[int(row[f"{category}_bytes"]) / 1e6 for row in rows] for category in categories]
        panel.stackplot(sizes, stacked, labels=[c.replace("_", " ") for c in categories], alpha=0.85)
        panel.set(title=model, xlabel=f"samples per microbatch (batch {batch_size})", ylabel="peak, MB")
    panels[0].legend(loc="upper left", fontsize="small")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        measure(chosen)
    draw()
