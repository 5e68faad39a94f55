"""Lean state beside torch's float32 and bitsandbytes' own: a small GPT-2 with AdamW, and the error of 100 steps."""

from __future__ import annotations

import logging
from typing import Any

import torch

from benchmarks.harness.measurement import Subject, compare
from benchmarks.models.subjects import gpt, relative_difference
from lightning_memsave import OptimizerState, apply_optimizer_state

logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
import bitsandbytes  # noqa: E402  # after its logger is quiet

ALL: dict[str, Any] = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "8bit": {},
    "8bit, nothing kept in 32 bit": ALL,
    "8bit of bitsandbytes": {"backend": "bitsandbytes"},
    "4bit": {"first_moment": "4bit"},
    "4bit, nothing kept in 32 bit": {"first_moment": "4bit", **ALL},
    "fp8": {"first_moment": "fp8"},
    "factored": {"second_moment": "factored"},
    "5bit-factored": {"first_moment": "5bit", "second_moment": "factored"},
    "4bit-factored": {"first_moment": "4bit", "second_moment": "factored"},
    "lowrank, rank 64": {"projection": "galore", "rank": 64},
    "apollo, rank 64": {"projection": "apollo", "rank": 64},
    "offload": {"placement": "host"},
    "32bit, released": {"first_moment": "32bit", "gradients": "release"},
    "8bit, released": {"gradients": "release"},
}


def make(setting: str) -> Subject:
    if setting == "bitsandbytes AdamW8bit":
        return gpt(setting, bitsandbytes.optim.AdamW8bit, weight_decay=0.01)
    subject = gpt(setting, weight_decay=0.01)
    if setting in CONFIGS:
        apply_optimizer_state(subject.optimizer, OptimizerState(**CONFIGS[setting]), subject.model)
    return subject


def parameters_after(setting: str, num_steps: int = 100) -> list[torch.Tensor]:
    """The way 65,536 + 1,000 parameters go under fixed gradients."""
    torch.manual_seed(0)
    weights = torch.nn.ParameterList([torch.zeros(256, 256), torch.zeros(1000)])
    if setting == "bitsandbytes AdamW8bit":
        optimizer = bitsandbytes.optim.AdamW8bit(weights.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(weights.parameters(), lr=1e-3)
    if setting in CONFIGS:
        # Gradients are given, not released.
        config = {**CONFIGS[setting], "gradients": "keep"}
        if config.get("first_moment") != "32bit":
            apply_optimizer_state(optimizer, OptimizerState(**config), weights)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        for p in weights:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return [p.detach() for p in weights]


def quality(subject: Subject) -> tuple[str, float]:
    error = relative_difference(parameters_after(subject.setting), parameters_after("float32"))
    return "relative parameter difference from float32 AdamW, 100 steps of fixed gradients", error


SETTINGS = ("float32", *CONFIGS, "bitsandbytes AdamW8bit")

if __name__ == "__main__":
    compare("optimizer_state", "GPT-2, 4 layers, width 256, batch 8 x 128, AdamW", [make(s) for s in SETTINGS], quality)
