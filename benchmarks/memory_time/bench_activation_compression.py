"""Activations kept in fewer bytes: WideResNet-28-2, a GPT of plain torch modules, a Llama and a ViT of transformers.

`kept_bytes` is what the ledger sees alive after the forward pass and not before. `quality_value` is the error of one
gradient; `bias` is the error of the mean of several, which is `bias_if_unbiased` where the noise has no bias. About 25
minutes on 1 core; names of results (`wrn`, `gpt`, ...) as arguments run only these.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness.measurement import Subject, compare, measure_kept_bytes
from benchmarks.models.subjects import (
    gradients,
    head_of_gpt2,
    llama,
    llama_large_vocabulary,
    plain_gpt,
    relative_difference,
    vit,
    wide_resnet,
)
from lightning_memsave import ActivationCompression, apply_activation_compression

NUM_GRADIENTS = 8
COMPUTED = ", logits computed"
"""Behind a setting: as where a head's logits are read before the loss."""
Make = Callable[[str], Subject]


def compressed(make: Make, setting: str) -> Subject:
    subject = make(setting)
    codecs = setting.removesuffix(COMPUTED)
    if codecs != "plain":
        apply_activation_compression(subject.model, ActivationCompression(codecs=tuple(codecs.split("+"))))
    if setting != codecs:
        subject.model(input_ids=subject.batch).logits.argmax(-1)
    return subject


def noise(found: list[list[Tensor]], exact: list[Tensor]) -> dict[str, float]:
    """How far gradients are from the exact one, each and on average."""
    errors = torch.tensor([relative_difference(one, exact) for one in found])
    error = float(errors.square().mean().sqrt())
    mean = [torch.stack(same).mean(0, dtype=torch.float64) for same in zip(*found, strict=True)]
    return {
        "error": error,
        "bias": relative_difference(mean, exact),
        "bias_if_unbiased": error / len(found) ** 0.5,
    }


def compare_codecs(name: str, model_name: str, make: Make, settings: tuple[str, ...], repeats: int) -> None:
    subjects = [compressed(make, setting) for setting in settings]
    plain_bytes, exact = measure_kept_bytes(make("plain")), gradients(make("plain"))

    @functools.cache
    def noise_of(setting: str) -> dict[str, float]:
        twin = compressed(make, setting)
        return noise([gradients(twin) for _ in range(NUM_GRADIENTS)], exact)

    def quality(subject: Subject) -> tuple[str, float]:
        return "relative error of one gradient against plain torch's", noise_of(subject.setting)["error"]

    def details(subject: Subject) -> dict[str, float]:
        kept, found = measure_kept_bytes(compressed(make, subject.setting)), noise_of(subject.setting)
        return {
            **{key: found[key] for key in ("bias", "bias_if_unbiased")},
            "kept_bytes": kept,
            "kept_factor": plain_bytes / kept,
        }

    compare(f"activation_compression_{name}", model_name, subjects, quality, details, repeats)


COMMON = ("plain", "exact", "int8", "exact+int8", "int4", "exact+int4")
RUNS = {
    "wrn": (
        "WideResNet-28-2, batch 100, SGD momentum",
        wide_resnet,
        (*COMMON, "int4-chain", "int2", "offload"),
        9,
    ),
    "gpt": ("GPT of plain modules, 6 layers, width 256, batch 8 x 256, dropout 0.1, AdamW", plain_gpt, COMMON, 15),
    "gpt_wide": (
        "GPT of plain modules, 6 layers, width 384, 6 heads, batch 8 x 256, dropout 0.1, AdamW",
        functools.partial(plain_gpt, width=384, num_heads=6),
        COMMON,
        15,
    ),
    "llama": ("Llama, 4 layers, width 256, batch 8 x 128, AdamW", llama, COMMON, 15),
    "vocabulary": (
        "Llama, 2 layers, width 256, 16,000 words, batch 8 x 128, AdamW",
        llama_large_vocabulary,
        ("plain", "exact", "exact+linear-cross-entropy"),
        9,
    ),
    "head": (
        "GPT-2, 1 layer, width 128, 16,000 words, tied, 2,048 tokens, SGD",
        head_of_gpt2,
        ("plain", "linear-cross-entropy" + COMPUTED, "linear-cross-entropy"),
        9,
    ),
    "vit": ("ViT, 4 layers, width 192, batch 32 x 64 patches, AdamW", vit, COMMON, 15),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:] or RUNS:
        compare_codecs(name, *RUNS[name])
