"""LoRA on a Llama: bytes of weights, gradients, state and activations, with and without memory saving.

About a minute on 1 core. `QLoRA` has a base in 4 bits (bitsandbytes' NF4, blocks of 64).
"""

from __future__ import annotations

import warnings
from typing import Any

import bitsandbytes
import peft
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness.measurement import Subject, compare
from benchmarks.models.subjects import next_token_loss, relative_difference
from lightning_memsave import (
    ActivationCompression,
    Checkpointing,
    LowPrecision,
    OptimizerState,
    apply_activation_compression,
    apply_checkpointing,
    apply_low_precision,
    apply_optimizer_state,
)

MODEL = "Llama, 4 layers, width 256, LoRA of rank 8 on all linear layers, batch 1 x 64, AdamW"
SHAPE = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 1000}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SETTINGS = (
    "all weights",
    "LoRA",
    "LoRA, regions, 8-bit state",
    "LoRA, bf16-sr",
    "LoRA, bf16-sr with the base",
    "LoRA, bf16-sr with the base, regions, 8-bit state",
    "LoRA, int8-sr with the base",
    "LoRA, int8-sr with the base, regions, 8-bit state",
    "QLoRA",
    "QLoRA, exact activations",
    "QLoRA, regions, 8-bit state",
)
EVERYTHING = {"min_size": 0, "keep_embeddings_32bit": False, "keep_norms_32bit": False}


def shorten(model: nn.Module) -> None:
    """Linear layers in 4 bits, as transformers makes them."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear) and name != "lm_head":
            shape = child.in_features, child.out_features
            short = bitsandbytes.nn.Linear4bit(*shape, bias=False, compute_dtype=torch.float32, quant_type="nf4")
            short.weight = bitsandbytes.nn.Params4bit(child.weight.detach(), requires_grad=False, quant_type="nf4")
            setattr(model, name, short.to("cpu"))
        else:
            shorten(child)


def make(setting: str) -> Subject:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS, use_cache=False, attn_implementation="eager")).train()
    if "QLoRA" in setting:
        shorten(model)
    if "LoRA" in setting:
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    if "exact" in setting:
        apply_activation_compression(model, ActivationCompression())
    if "regions" in setting:
        apply_checkpointing(model, Checkpointing())
    if "8-bit" in setting:
        apply_optimizer_state(optimizer, OptimizerState(**EVERYTHING), model)
    weight_format = next((name for name in ("bf16-sr", "int8-sr") if name in setting), None)
    is_short = weight_format is not None
    if weight_format is not None:
        config = LowPrecision(format=weight_format, lower_frozen="base" in setting)  # type: ignore[arg-type]
        apply_low_precision(model, optimizer, config)
    ids = torch.randint(0, SHAPE["vocab_size"], (1, 64))

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_short):
            loss = next_token_loss(model(input_ids=ids).logits.float(), ids)
        loss.backward()
        optimizer.step()

    return Subject(setting, model, optimizer, ids, step)


def first_gradients(setting: str) -> list[torch.Tensor]:
    subject = make(setting)
    subject.step()
    return [p.grad for p in subject.model.parameters() if p.grad is not None]


def quality(subject: Subject) -> tuple[str, float | str]:
    if "LoRA" not in subject.setting:
        return "", ""
    reference = "QLoRA" if "QLoRA" in subject.setting else "LoRA"
    found, expected = (first_gradients(setting) for setting in (subject.setting, reference))
    what = "relative difference of the first gradients of the adapters from those without memory saving"
    return what, relative_difference(found, expected)


def details(subject: Subject) -> dict[str, int]:
    parameters = list(subject.model.parameters())
    return {
        "num_parameters": sum(2 * p.numel() if p.dtype == torch.uint8 else p.numel() for p in parameters),
        "num_trained": sum(p.numel() for p in parameters if p.requires_grad),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    compare("peft", MODEL, [make(setting) for setting in SETTINGS], quality, details, repeats=3)
