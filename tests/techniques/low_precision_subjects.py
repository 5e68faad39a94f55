"""Models in 16 bits, their optimizers and gradients, for the tests of low precision."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from lightning_memsave import LowPrecision, apply_low_precision

FORMATS = ("bf16-sr", "bf16+8", "bf16-kahan", "fp16-scaled", "int8-sr")
WITH_CORRECTION = ("bf16+8", "bf16-kahan")
# Of a weight, by one rounding; of int8, of the largest weight of its row.
ERRORS = {"bf16-sr": 2.0**-7, "bf16+8": 2.0**-15, "bf16-kahan": 2.0**-17, "fp16-scaled": 2.0**-10, "int8-sr": 2.0**-6}
DTYPES = {name: torch.float16 if name == "fp16-scaled" else torch.bfloat16 for name in FORMATS}
every_format = pytest.mark.parametrize("weight_format", FORMATS)
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-3),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, 1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, 1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-3),
}


def error_of(weight_format, weights, besides=0.0):
    """The largest error of weights by one rounding; `besides` is for weights that have changed their size."""
    largest = weights.abs().max() if weight_format == "int8-sr" else weights.abs()
    return ERRORS[weight_format] * (largest + besides)


def parameter(module, name="weight"):
    """The parameter itself, which is not what a layer computes with where it has codes."""
    return dict(module.named_parameters())[name]


def network():
    return nn.Sequential(nn.Linear(24, 48), nn.LayerNorm(48), nn.Tanh(), nn.Linear(48, 8))


def lowered(weight_format="bf16-sr", optimizer="AdamW", model=None, **settings):
    model = network() if model is None else model
    optimizer = OPTIMIZERS[optimizer](list(model.parameters()))
    if weight_format == "fp16-scaled":
        settings = {"initial_scale": 2.0**8, **settings}
    return model, optimizer, apply_low_precision(model, optimizer, LowPrecision(format=weight_format, **settings))


def give_gradients(model, step, factor=1.0):
    """Numbers that bfloat16 and, small enough, float16 hold, so that each format sees the same."""
    generator = torch.Generator().manual_seed(step)
    for module in model.modules():
        getattr(module, "weight", None)  # as a forward pass does
    for p in model.parameters():
        p.grad = (torch.randn(p.shape, generator=generator).bfloat16() * factor).to(p.grad_dtype)


def factor_of(optimizer):
    """What gradients are multiplied with, as that of a scaled loss."""
    return float(optimizer.scale_loss(torch.ones(()))) if hasattr(optimizer, "scale_loss") else 1.0


def run(model, optimizer, steps):
    for step in steps:
        give_gradients(model, step, factor_of(optimizer))
        optimizer.step()


def whole(model):
    """The weights as `state_dict` writes them, in float32."""
    return torch.cat([value.float().flatten() for value in model.state_dict().values()])


def through_disk(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
