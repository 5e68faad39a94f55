"""Blocks as checkpoint regions, beside torch's own checkpoint: WideResNet-28-2, batch 100, and a small GPT-2."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from harness import Subject, compare
from lightning_memsave import Checkpointing, apply_checkpointing
from lightning_memsave.demo.model import WideBlock
from models import gpt, gradients, relative_difference, wide_resnet


def with_torch(subject: Subject, block: type) -> Subject:
    """What users write by hand: each block's forward through `torch.utils.checkpoint`."""
    for module in subject.model.modules():
        if isinstance(module, block):
            module.forward = lambda *a, original=module.forward, **k: checkpoint(original, *a, use_reentrant=False, **k)
    return subject


def with_blocks(subject: Subject) -> Subject:
    apply_checkpointing(subject.model, Checkpointing())
    return subject


def quality_against(make):
    def quality(subject):
        """How many of the gradients and buffers differ from a plain step's, in any bit."""
        plain = make("plain")
        twin = make("twin")
        if subject.setting != "plain":
            twin = with_blocks(twin) if subject.setting == "blocks" else with_torch(twin, BLOCK[make])
        differs = relative_difference(gradients(twin), gradients(plain)) > 0
        for s in (twin, plain):
            torch.manual_seed(6)
            s.step()
        buffers = zip(twin.model.buffers(), plain.model.buffers(), strict=True)
        return "tensors that differ from a plain step (gradients + buffers)", int(differs) + sum(
            not bool((a == b).all()) for a, b in buffers
        )

    return quality


BLOCK = {wide_resnet: WideBlock, gpt: GPT2Block}

if __name__ == "__main__":
    for name, make, model in (
        ("checkpointing", wide_resnet, "WideResNet-28-2, batch 100, SGD momentum"),
        ("checkpointing_gpt", gpt, "GPT-2, 4 layers, width 256, batch 8 x 128, AdamW"),
    ):
        subjects = [make("plain"), with_blocks(make("blocks")), with_torch(make("torch checkpoint"), BLOCK[make])]
        compare(name, model, subjects, quality_against(make))
