"""An optimizer that was changed before, by an earlier fit or another call: what it is, and the way to plain."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.errors import NoEffectWarning, setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.techniques.optimizer_state import optimizer_mapping, quantized
from lightning_memsave.techniques.optimizer_state.bitsandbytes_backend import become_plain
from lightning_memsave.techniques.optimizer_state.projection import METHODS
from lightning_memsave.techniques.optimizer_state.state_config import OptimizerState
from lightning_memsave.torch_internals.optimizer_class import IN_BACKWARD, is_latest, name_of

_EXACT = ("32bit", "offload", "paged")


def is_ours(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its class was changed here."""
    return quantized.is_quantized(optimizer) or optimizer_mapping.is_8bit(optimizer)


def is_low_bit(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether its state is something smaller already: ours, or one of bitsandbytes' own."""
    if quantized.is_quantized(optimizer):
        return format_of(optimizer) != "32bit"
    return optimizer_mapping.is_8bit(optimizer) or type(optimizer).__module__.startswith("bitsandbytes")


def memory(optimizer: torch.optim.Optimizer) -> Any:
    """Return what one of ours remembers; another change has another."""
    return vars(optimizer).get(quantized.MEMORY) or vars(optimizer).get(optimizer_mapping.MEMORY)


def format_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the format of one of ours."""
    if quantized.is_quantized(optimizer):
        return quantized.memory_of(optimizer).state_format
    return "paged" if optimizer_mapping.memory_of(optimizer).is_paged else "8bit"


def as_plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return something of the plain class with the same groups and state, for checks."""
    if not is_ours(optimizer):
        return optimizer
    plain: torch.optim.Optimizer = object.__new__(memory(optimizer).plain_class)
    vars(plain).update(
        {k: v for k, v in vars(optimizer).items() if k not in (quantized.MEMORY, optimizer_mapping.MEMORY)}
    )
    return plain


def is_as_asked(
    optimizer: torch.optim.Optimizer, config: OptimizerState, kept: set[Tensor], uses_bitsandbytes: bool
) -> bool:
    """Return whether one of ours is what `config` would make of it."""
    found = memory(optimizer)
    own = {p for group in optimizer.param_groups for p in group["params"]}
    present = format_of(optimizer), found.is_compact, found.kept & own, optimizer_mapping.is_8bit(optimizer)
    asked = config.format, config.checkpoint == "compact", kept & own, uses_bitsandbytes
    return present == asked and (config.format not in METHODS or found.rank == config.rank)


def check_replaceable(optimizer: torch.optim.Optimizer, config: OptimizerState) -> None:
    """Refuse to leave the present format where something stands on it.

    Raises:
        ValueError: low precision lies over it, or gradients still end in backward.
    """
    if vars(optimizer).get(IN_BACKWARD):
        reason, remedy = "while its gradients end in backward", "Undo what was applied before."
    elif not any(is_latest(optimizer, each) for each in (quantized.MEMORY, optimizer_mapping.MEMORY)):
        reason, remedy = "of 16-bit weights", "Return a new optimizer from `configure_optimizers`."
    else:
        return
    raise setting_error(
        "optimizer_state",
        f"cannot change on an optimizer {reason}",
        f"{config.format} instead of {format_of(optimizer)}",
        remedy,
    )


def leave(optimizer: torch.optim.Optimizer) -> None:
    """Change the class back to the plain one; the state keeps the rounding that it has suffered."""
    (quantized.dequantize_state if quantized.is_quantized(optimizer) else become_plain)(optimizer)


def inherited(optimizer: torch.optim.Optimizer, *, was_asked: bool) -> Applied:
    """Return what there was before, in the words of a report.

    Args:
        optimizer: that has low-bit state, or is one of ours.
        was_asked: whether somebody wanted it to change; a warning says that it does not.
    """
    name = name_of(type(optimizer))
    if not is_low_bit(optimizer):  # float32, of an earlier fit with gradients that went into it
        return Applied(technique="optimizer_state", summary=f"{name} as it was")
    if was_asked:
        warnings.warn(f"{name} is a low-bit optimizer already.", NoEffectWarning, stacklevel=4)
    if is_ours(optimizer) and format_of(optimizer) in _EXACT:
        return Applied(technique="optimizer_state", summary=f"{name} as an earlier fit left it")
    return Applied(
        technique="optimizer_state",
        summary=f"{name} is low-bit already",
        loss_class="changed",
        reasons=(f"the state of {name} is low-bit",),
    )
