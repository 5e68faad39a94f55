"""Lean optimizer state: the user's optimizer keeps its moments in 8 or 4 bits, and no gradient longer than it must.

What shrinks: each float32 moment, 4 bytes per parameter, becomes a code of 1 byte or 0.5 plus 4 bytes per block of 256.

| optimizer            | state, bytes per parameter: before | 8bit  | 4bit  |
|----------------------|-----------------------------------:|------:|------:|
| AdamW, Adam, LAMB    |                                8.0 | 2.031 | 1.031 |
| SGD momentum, Lion   |                                4.0 | 1.016 | 0.516 |
| RMSprop, Adagrad     |                                4.0 | 1.016 | 0.516 |

8 bits are bitsandbytes' optimizers (`kin.py`), 4 bits our own codes around the optimizer's own step (`fourbit.py`, not
for LAMB). `gradients="release"` steps each parameter inside of backward and frees its gradient (`release.py`).

Parameters below 4096 elements, embeddings and normalisation layers keep float32 state: small, and the ones that suffer
most from coarse state. Weights are not touched.

Loss class: `changed`: the moments are rounded after every step; releasing gradients alone is `exact`. Time of 8 bits:
on CUDA bitsandbytes' fused kernels; on CPU its reference code, which is slower than torch's optimizers, takes up to 20
bytes per element of the largest parameter while it steps, and rounds differently from the CUDA kernels. CPU results say
nothing about accuracy on a GPU.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021 (https://arxiv.org/abs/2110.02861).
Different: the optimizer object stays the same and changes its class, so that LR schedulers and every other reference go
on working; checkpoints are written in torch's layout; LAMB keeps the trust ratio that bitsandbytes' 8-bit LAMB drops.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from lightning_memsave.core.errors import NoEffectWarning, setting_error
from lightning_memsave.core.report import Applied, worst_loss_class
from lightning_memsave.numerics.blockwise import num_blocks
from lightning_memsave.techniques.optimizer_state.conversion import from_plain, to_plain
from lightning_memsave.techniques.optimizer_state.fourbit import (
    become_4bit,
    check_4bit,
    is_4bit,
    leave_4bit,
    moments_of,
)
from lightning_memsave.techniques.optimizer_state.kin import become_8bit, become_plain, find_kin, is_8bit
from lightning_memsave.techniques.optimizer_state.release import GradientRelease

__all__ = [
    "GradientRelease",
    "OptimizerState",
    "apply_format",
    "apply_optimizer_state",
    "check_optimizers",
    "estimate_optimizer_state",
    "from_plain",
    "is_4bit",
    "is_8bit",
    "is_low_bit",
    "release_applied",
    "to_plain",
]

FORMATS = ("8bit", "4bit", "32bit")
GRADIENTS = ("keep", "release")
_CODE_MAP_BYTES = 256 * 4


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """Settings of lean optimizer state.

    Raises:
        ValueError: an unknown format, settings that change nothing, or a negative size.
    """

    format: Literal["8bit", "4bit", "32bit"] = "8bit"
    """How moments are stored; `"32bit"` leaves them to the optimizer."""
    gradients: Literal["keep", "release"] = "keep"
    """`"release"`: each parameter steps inside of backward and frees its gradient, so that there is one at a time."""
    min_size: int = 4096
    """Parameters with fewer elements keep float32 state."""
    keep_embeddings_32bit: bool = True
    """Embedding tables keep float32 state."""
    keep_norms_32bit: bool = True
    """Parameters of normalisation layers keep float32 state."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise setting_error(
                "optimizer_state",
                f"must be one of {', '.join(map(repr, FORMATS))}",
                self.format,
                "Use `False` for none.",
            )
        if self.gradients not in GRADIENTS:
            raise setting_error(
                "OptimizerState.gradients",
                f"must be one of {', '.join(map(repr, GRADIENTS))}",
                self.gradients,
                'The default is "keep".',
            )
        if self.format == "32bit" and self.gradients == "keep":
            raise setting_error(
                "OptimizerState",
                "must change something",
                'format="32bit", gradients="keep"',
                'Use `optimizer_state=False`, or `gradients="release"`.',
            )
        if self.min_size < 0:
            raise setting_error("OptimizerState.min_size", "must not be negative", self.min_size, "Use 0 for all.")

    @property
    def rows(self) -> tuple[str, ...]:
        """Settings that the compatibility table knows by name."""
        return ("gradient release",) if self.gradients == "release" else ()

    @classmethod
    def from_shorthand(cls, value: object) -> OptimizerState:
        """`optimizer_state="8bit"` is `OptimizerState(format="8bit")`; `True` means the same."""
        return cls(format="8bit" if value is True else value)  # type: ignore[arg-type]  # checked in __post_init__


def is_low_bit(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state is low-bit already: ours, or one of bitsandbytes' own."""
    return is_8bit(optimizer) or is_4bit(optimizer) or type(optimizer).__module__.startswith("bitsandbytes")


def parameters_kept_32bit(optimizer: torch.optim.Optimizer, config: OptimizerState, model: nn.Module) -> set[Tensor]:
    """The parameters whose state stays float32 because of their size or the module they belong to."""
    kept: set[Tensor] = {p for group in optimizer.param_groups for p in group["params"] if p.numel() < config.min_size}
    for module in model.modules():
        is_norm = "Norm" in type(module).__name__ and not any(module.children())
        is_embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        if (is_norm and config.keep_norms_32bit) or (is_embedding and config.keep_embeddings_32bit):
            kept.update(module.parameters(recurse=False))
    return kept


def apply_optimizer_state(optimizer: torch.optim.Optimizer, config: OptimizerState, model: nn.Module) -> Applied:
    """Change the state of `optimizer`, and release its gradients in backward, as `config` says; in place, at any time.

    State that exists is converted.

    Raises:
        ValueError: what the format does not know: an optimizer, or a setting of it.
        ModuleNotFoundError: bitsandbytes is not installed.
    """
    parts = [] if config.format == "32bit" else [apply_format(optimizer, config, model)]
    if config.gradients == "release":
        parts.append(release_applied(GradientRelease([optimizer])))

    def restore() -> None:
        for part in reversed(parts):
            part.undo()

    return Applied(
        technique="optimizer_state",
        summary="; ".join(part.summary for part in parts),
        loss_class=worst_loss_class(part.loss_class for part in parts),
        reasons=tuple(reason for part in parts for reason in part.reasons),
        restore=restore,
    )


def release_applied(release: GradientRelease | None = None) -> Applied:
    """What gradient release is, and the way back from `release`."""
    return Applied(
        technique="optimizer_state",
        summary="parameters step inside of backward, which frees each gradient at once",
        restore=(lambda: None) if release is None else release.remove,
    )


def apply_format(optimizer: torch.optim.Optimizer, config: OptimizerState, model: nn.Module) -> Applied:
    """The state alone; see `apply_optimizer_state`."""
    if is_low_bit(optimizer):
        import warnings

        warnings.warn(f"{type(optimizer).__name__} is a low-bit optimizer already.", NoEffectWarning, stacklevel=2)
        return Applied(
            technique="optimizer_state",
            summary=f"{type(optimizer).__name__} is low-bit already",
            loss_class="changed",
            reasons=(f"the state of {type(optimizer).__name__} is low-bit",),
        )
    check_optimizers([optimizer], config, model)
    name = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = parameters_kept_32bit(optimizer, config, model)
    num_low_bit = sum(p not in kept for p in parameters)
    if config.format == "4bit":
        become_4bit(optimizer, kept)
        return Applied(
            technique="optimizer_state",
            summary=f"{name} keeps 4-bit state for {num_low_bit} of {len(parameters)} parameters",
            loss_class="changed",
            reasons=(f"{name}'s moments are rounded to 4 bits",),
            restore=lambda: leave_4bit(optimizer),
        )
    become_8bit(optimizer, find_kin(optimizer), kept)
    device = parameters[0].device.type if parameters else "cpu"
    return Applied(
        technique="optimizer_state",
        summary=f"{name} keeps 8-bit state for {num_low_bit} of {len(parameters)} parameters (bitsandbytes, {device})",
        loss_class="changed",
        reasons=(f"{name}'s moments are rounded to 8 bits",),
        restore=lambda: become_plain(optimizer),
    )


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], config: OptimizerState, model: nn.Module) -> None:
    """Refuse what cannot become low-bit, before anything is changed.

    Raises:
        ValueError: an optimizer, or a setting of it, that the format does not know, or sparse gradients.
    """
    own: set[Tensor] = set()
    for optimizer in optimizers if config.format != "32bit" else ():
        if not is_low_bit(optimizer):
            check_4bit(optimizer) if config.format == "4bit" else find_kin(optimizer)
            own.update(p for group in optimizer.param_groups for p in group["params"])
    for name, module in model.named_modules():
        is_sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
        if is_sparse and own.intersection(module.parameters(recurse=False)):
            raise setting_error(
                "optimizer_state",
                "cannot take sparse gradients",
                f"{name}.sparse=True",
                "Use `sparse=False`, or `optimizer_state=False`.",
            )


def estimate_optimizer_state(optimizer: torch.optim.Optimizer, config: OptimizerState, model: nn.Module) -> int:
    """Bytes of the moments once every parameter has been stepped; exact."""
    if config.format == "4bit":
        check_4bit(optimizer)
        num_moments = len(moments_of(optimizer))
    else:
        num_moments = len(find_kin(optimizer).moments)
    kept = parameters_kept_32bit(optimizer, config, model)
    total, any_low_bit = 0, False
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not p.requires_grad and not optimizer.state.get(p):
                continue
            is_kept = p in kept or config.format == "32bit"
            any_low_bit |= not is_kept
            total += num_moments * (4 * p.numel() if is_kept else _low_bit_bytes(p.numel(), config.format))
    return total + (num_moments * _CODE_MAP_BYTES if any_low_bit and config.format == "8bit" else 0)


def _low_bit_bytes(num_elements: int, state_format: str) -> int:
    codes = num_elements if state_format == "8bit" else -(-num_elements // 2)
    return codes + 4 * num_blocks(num_elements)
