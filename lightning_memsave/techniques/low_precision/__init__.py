"""Low precision: weights and gradients in 16 bits, updates computed in float32, one parameter at a time.

What shrinks, in bytes per parameter:

| `precision=` | weights | gradients | what happens to an update smaller than bfloat16's step |
|---|---:|---:|---|
| float32 | 4 | 4 | |
| `"bf16-sr"` | 2 | 2 | kept on average: the updated weight is rounded stochastically |
| `"bf16+8"` | 3 | 2 | kept in an 8-bit correction: weights of 24 bits |
| `"bf16-kahan"` | 4 | 2 | kept in a bfloat16 correction |
| `"int8-sr"` | 1 | 2 | kept on average |
| `"fp16-scaled"` | 2 | 2 | kept on average; the momentum of SGD takes 2 bytes too |
| `"bf16-gradients"` | 4 | 2 | |

A weight in plain bfloat16 has 8 significant bits, so an update below 1/512 of it is lost by rounding, and training
stalls. Here the step itself, the user's own optimizer with whatever it does, runs on a float32 copy of one parameter
and its gradient; its state is float32, or low-bit with `optimizer_state`. Only the result is rounded. The copies are
the transient: 8 bytes per element of one parameter, or of one part of it where optimizers treat elements separately
(`PART_NUMEL`), besides what the optimizer itself takes.

Float16 has eight times finer weights than bfloat16 but a range of 6e-8 to 65,504, so `"fp16-scaled"` scales the loss
(`scaling.py`) and skips steps whose gradients overflow.

`"int8-sr"` keeps the weights of Linear, convolutions and embeddings as int8 codes with a power of two per row
(`int8_parameter.py`), and everything else as `"bf16-sr"` does. The layers compute with bfloat16 weights, which are made
when they are read, in forward and again in backward: 2 bytes per element of one layer.

`"bf16-gradients"` leaves the weights as they are, and the forward pass: autograd rounds each gradient to bfloat16 where
it is kept, to the nearest, with three digits.

Modules that hold vectors alone, as normalisation layers do, and whatever `keep_32bit` names stay float32: they are
small, and what is computed with them has 32 bits under autocast, as with Lightning's `bf16-mixed`.
Buffers stay as they are. The forward pass needs autocast, as the dtypes of inputs, buffers and weights differ; under
Lightning that is its own `bf16-mixed`, or `16-mixed`.

Loss class: `changed`. The noise of stochastic rounding is a hash of seed, step, parameter and shard. Checkpoints carry
the step, but under FSDP2, where it is read from the optimizer's own counts: SGD and Lion have none and begin at 0.

Sources: Zamirai et al., "Revisiting BFloat16 Training", 2020 (https://arxiv.org/abs/2010.06192) for stochastic rounding
and Kahan summation; different: Kahan's sum compensates the whole step of any optimizer, not an addition inside of one.
Li et al., "Training Quantized Nets", 2017 (https://arxiv.org/abs/1706.02379) for quantised weights without a float32
copy, rounded stochastically; different: scales that follow the weights.
Sohoni et al., "Low-Memory Neural Network Training", 2019 (https://arxiv.org/abs/1904.10631) for float16 weights,
gradients and state with a scaled loss; different: stochastic rounding, float32 second moments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from lightning_memsave.core.errors import check_unused, setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.core.selection import Selector, as_selectors
from lightning_memsave.techniques.low_precision.int8_parameter import bytes_of_codes, parameters_for_int8
from lightning_memsave.techniques.low_precision.scaling import LossScaling
from lightning_memsave.techniques.low_precision.stepping import (
    load_counter,
    step_in_float32,
    step_plainly,
    with_counter,
)
from lightning_memsave.techniques.low_precision.weights import FORMATS, Weights, weights_kept_32bit
from lightning_memsave.torch_internals.private_names import require
from lightning_memsave.torch_internals.sharded_parameters import as_local, free_gathered

__all__ = [
    "LossScaling",
    "LowPrecision",
    "Weights",
    "apply_low_precision",
    "estimate_low_precision",
    "load_counter",
    "step_in_float32",
    "with_counter",
]


@dataclass(frozen=True, kw_only=True)
class LowPrecision:
    """Settings of low precision.

    Raises:
        ValueError: an unknown format, a number out of its range; when applied, a selector that matches no module.
    """

    format: Literal["bf16-sr", "bf16+8", "bf16-kahan", "int8-sr", "fp16-scaled", "bf16-gradients"] = "bf16-sr"
    """How weights are stored."""
    keep_32bit: tuple[Selector, ...] = ()
    """Modules whose parameters stay float32, besides those that hold vectors alone: classes, or patterns (`*`, `?`) for
    class names or qualified names."""
    seed: int = 0
    """Seed of the stochastic rounding."""
    lower_frozen: bool = False
    """Frozen parameters too (the base of a LoRA model). By default they stay as they are."""
    initial_scale: float = 2.0**16
    """Scale of the loss; `"fp16-scaled"` alone. It falls by itself where it is too large."""
    growth_interval: int = 2000
    """Steps without overflow after which the scale doubles; `"fp16-scaled"` alone."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise setting_error(
                "precision",
                f"must be one of {', '.join(map(repr, FORMATS))}",
                self.format,
                "Use `False` for none; Lightning's own precisions are set by `Trainer(precision=...)`.",
            )
        if self.seed < 0:
            raise setting_error("LowPrecision.seed", "must not be negative", self.seed, "Use 0 or more.")
        if not 0 < self.initial_scale < float("inf"):
            raise setting_error("LowPrecision.initial_scale", "must be positive", self.initial_scale, "Try 65536.")
        if self.growth_interval < 1:
            raise setting_error("LowPrecision.growth_interval", "must be at least 1", self.growth_interval, "Try 2000.")
        if self.lower_frozen and self.format == "bf16-gradients":
            raise setting_error(
                "LowPrecision.lower_frozen", "needs a format of weights", self.format, 'Use `format="bf16-sr"`.'
            )
        if self.format != "fp16-scaled":
            check_unused(self, "initial_scale growth_interval", 'format="fp16-scaled"')
        object.__setattr__(self, "keep_32bit", as_selectors("LowPrecision.keep_32bit", self.keep_32bit))

    @property
    def rows(self) -> tuple[str, ...]:
        """Settings that the compatibility table knows by name."""
        rows = {"fp16-scaled": "loss scaling", "bf16-gradients": "bf16 gradients", "int8-sr": "int8 weights"}
        return (rows[self.format],) if self.format in rows else ()

    def lower(self, model: nn.Module) -> Weights:
        """Lower the parameters of `model`, in place.

        Raises:
            ValueError: a selector that matches no module, no parameter to lower, or weights beyond float16's range.
        """
        require("optimizers", "precision")
        is_scaled = self.format == "fp16-scaled"
        scaling = LossScaling(self.initial_scale, self.growth_interval) if is_scaled else None
        return Weights(model, self.format, self.keep_32bit, self.seed, self.lower_frozen, scaling)

    @classmethod
    def from_shorthand(cls, value: object) -> LowPrecision:
        """`precision="bf16+8"` is `LowPrecision(format="bf16+8")`; `True` means `"bf16-sr"`."""
        return cls(format="bf16-sr" if value is True else value)  # type: ignore[arg-type]  # checked in __post_init__


def apply_low_precision(
    model: nn.Module, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer], config: LowPrecision
) -> Applied:
    """Turn float32 parameters of `model` into 16 bits, and let `optimizers` step them in float32; in place.

    Run the model under `torch.autocast(device, torch.bfloat16)`, or `torch.float16` with `"fp16-scaled"`, which also
    needs `optimizer.scale_loss(loss).backward()`. Low-bit optimizer state is applied before this.

    Raises:
        ValueError: a selector that matches nothing, no float32 parameter, or an optimizer that needs all parameters.
    """
    listed = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    weights = config.lower(model)
    try:
        for optimizer in listed:
            step_in_float32(optimizer, weights)
    except ValueError:
        weights.restore()
        raise

    def restore() -> None:
        weights.restore()
        for optimizer in listed:
            step_plainly(optimizer)

    return Applied(
        technique="low_precision",
        summary=weights.summary,
        loss_class="changed",
        reasons=(weights.reason,),
        restore=restore,
    )


def estimate_low_precision(model: nn.Module, config: LowPrecision) -> int:
    """Return bytes of the parameters and their corrections; exact. Of sharded parameters, those of this process."""
    free_gathered(model)
    kept = weights_kept_32bit(model, config.keep_32bit)
    dtype, correction, _, has_codes = FORMATS[config.format]
    coded = parameters_for_int8(model) if has_codes else set()
    total = 0
    for p in model.parameters():
        is_lowered = p.dtype in (torch.float32, dtype) and p not in kept and (p.requires_grad or config.lower_frozen)
        if is_lowered and p in coded:
            total += bytes_of_codes(p)
            continue
        with_correction = dtype.itemsize + (correction.itemsize if correction and p.requires_grad else 0)
        total += as_local(p).numel() * (with_correction if is_lowered else p.element_size())
    return total
