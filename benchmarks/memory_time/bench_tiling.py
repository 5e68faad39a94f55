"""Tiling along samples, where the loss relates them, and along positions: memory, time, and gradients.

Microbatches are beside it where the batch can be cut: of these losses they compute others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.measurement import Subject, measured_rows, write_rows
from benchmarks.models.relating import MODELS
from benchmarks.models.subjects import gradients, relative_difference
from lightning_memsave import Checkpointing, Tiling, apply_checkpointing, apply_tiling, microbatches

QUALITY = "relative error of the gradient against plain torch's"
SAMPLES = {"tiles of 8 samples": Tiling(dim=0, size=8), "tiles of 2 samples": Tiling(dim=0, size=2)}
POSITIONS = {"tiles of 256 positions": Tiling(dim=1, size=256), 'size="auto"': Tiling(dim=1)}
REGIONS = {
    "InfoNCE, batch 64": Checkpointing(regions=[["images"], ["texts"]]),
    "U-Net with Dice, batch 64": Checkpointing(regions=[["net.high"], ["net.low"], ["net.joined"]]),
    "mixup, batch 64": Checkpointing(regions=[["net"]]),
    "CLIP of transformers, batch 64": Checkpointing(modules="CLIPEncoderLayer"),
    "MLP of GPT-2, 4096 positions": Checkpointing(regions=[["mlp"]]),
    "MLP of Llama, 4096 positions": Checkpointing(regions=[["mlp"]]),
}


def settings_of(model: str) -> list[str]:
    if "positions" in model:
        return ["plain", "regions", *POSITIONS]
    return ["plain", "regions", "microbatches of 8 samples", *SAMPLES]


def subject(model: str, setting: str) -> Subject:
    make, make_batch = MODELS[model]
    torch.manual_seed(0)
    module, batch = make(), make_batch()
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    if setting == "regions":
        apply_checkpointing(module, REGIONS[model])
    elif setting in (tiles := {**SAMPLES, **POSITIONS}):
        apply_tiling(module, tiles[setting])
    size = 8 if setting.startswith("microbatches") else None

    def step() -> None:
        optimizer.zero_grad()
        if size is None:
            module.loss(batch).backward()
        else:
            for part, weight in microbatches(batch, size):
                (module.loss(part) * weight).backward()
        optimizer.step()

    return Subject(setting, module, optimizer, batch, step)


def main() -> None:
    rows: list[dict[str, Any]] = []
    for model in MODELS:
        plain = gradients(subject(model, "plain"))

        def quality(measured: Subject, model: str = model, plain: list[Tensor] = plain) -> tuple[str, float]:
            return QUALITY, relative_difference(gradients(subject(model, measured.setting)), plain)

        subjects = [subject(model, setting) for setting in settings_of(model)]
        rows += measured_rows("tiling", model, subjects, quality, repeats=5)
        for row in rows[-len(subjects) :]:
            figures = row["peak_bytes"] / 1e6, row["factor"], row["cpu_time_ratio"], row["quality_value"]
            print(model, row["setting"], "{:.1f} MB {:.2f}x {:.2f}x {:.1e}".format(*figures), flush=True)
    write_rows("tiling", rows)


if __name__ == "__main__":
    main()
