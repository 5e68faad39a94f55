"""Table of the optimizers of bitsandbytes that do what plain ones do, with 8-bit state or `"paged"`.

Paged state is 32-bit state in memory that CUDA moves to the host when the device has none left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.errors import setting_error
from lightning_memsave.torch_internals.optimizer_class import name_of

MEMORY = "_memsave_8bit"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_NUMEL = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class OptimizerMapping:
    """A plain optimizer and the bitsandbytes optimizer that does the same with 8-bit state."""

    class_name: str
    """The class in `bitsandbytes.optim`."""
    moments: tuple[str, ...]
    """torch's names of the state tensors that bitsandbytes calls state1, state2."""
    betas: Callable[[Mapping[str, Any]], tuple[float, float]]
    """The two coefficients of bitsandbytes from a torch param group."""
    required: Mapping[str, tuple[Any, ...]]
    """Settings of the plain optimizer that the mapping does not have: the values under which they do nothing."""
    has_step: bool = True
    """Whether the plain optimizer keeps a step count in its state."""
    paged_name: str | None = None
    """The class in `bitsandbytes.optim` with paged state."""
    has_bfloat16: bool = True
    """Whether CUDA has all kernels for bfloat16 parameters, of which some keep 32-bit state."""


def _betas(group: Mapping[str, Any]) -> tuple[float, float]:
    return float(group["betas"][0]), float(group["betas"][1])


_OFF = (False, None, 0, 0.0)
_COMMON = {"maximize": _OFF, "differentiable": _OFF, "capturable": _OFF}
_ADAM = {**_COMMON, "amsgrad": _OFF}
OPTIMIZER_MAPPINGS: Mapping[str, OptimizerMapping] = {
    "AdamW": OptimizerMapping(class_name="AdamW8bit", moments=("exp_avg", "exp_avg_sq"), betas=_betas, required=_ADAM,
                 paged_name="PagedAdamW32bit"),
    "Adam": OptimizerMapping(class_name="Adam8bit", moments=("exp_avg", "exp_avg_sq"), betas=_betas, required=_ADAM,
                paged_name="PagedAdam32bit"),
    "SGD": OptimizerMapping(
        class_name="SGD8bit",
        moments=("momentum_buffer",),
        betas=lambda group: (float(group["momentum"]), float(group["dampening"])),
        required={**_COMMON, "nesterov": _OFF, "dampening": _OFF},
        has_step=False,
        has_bfloat16=False,
    ),
    "Lion": OptimizerMapping(
        class_name="Lion8bit",
        moments=("exp_avg",),
        betas=_betas,
        required={**_COMMON, "caution": _OFF, "cautious_factor": (None, 1, 1.0), "decoupled_weight_decay": _OFF},
        has_step=False,
        paged_name="PagedLion32bit",
    ),
    "RMSprop": OptimizerMapping(
        class_name="RMSprop8bit",
        moments=("square_avg",),
        betas=lambda group: (float(group["alpha"]), 0.0),
        required={**_COMMON, "momentum": _OFF, "centered": _OFF},
        has_bfloat16=False,
    ),
    "Adagrad": OptimizerMapping(
        class_name="Adagrad8bit",
        moments=("sum",),
        betas=lambda group: (0.0, 0.0),
        required={**_COMMON, "lr_decay": _OFF},
        has_bfloat16=False,
    ),
    "LAMB": OptimizerMapping(
        class_name="LAMB8bit",
        moments=("exp_avg", "exp_avg_sq"),
        betas=_betas,
        required={**_COMMON, "max_grad_norm": _OFF, "trust_clip": _OFF, "always_adapt": (None, True), "caution": _OFF,
                  "debias": (True,), "bias_correction": (True, 1), "grad_averaging": (True, 1)},
    ),
}  # fmt: skip
_ALIASES = {"Lamb": "LAMB"}


def find_mapping(optimizer: torch.optim.Optimizer) -> OptimizerMapping:
    """Return the 8-bit mapping of `optimizer`, by the name of its class.

    Raises:
        ValueError: there is none, or a setting that the mapping does not have.
    """
    name = name_of(type(optimizer))
    mapping = OPTIMIZER_MAPPINGS.get(_ALIASES.get(name, name))
    if mapping is None:
        raise setting_error(
            "optimizer_state",
            f"needs an optimizer that has an 8-bit mapping ({', '.join(OPTIMIZER_MAPPINGS)})",
            name,
            "Use one of these, or `optimizer_state=False`.",
        )
    for group in optimizer.param_groups:
        for key, neutral in mapping.required.items():
            value = group.get(key, getattr(optimizer, key, neutral[0]))
            if value not in neutral:
                raise setting_error(
                    "optimizer_state",
                    f"cannot keep {name}'s `{key}`, which bitsandbytes does not have",
                    value,
                    f"Use `{key}={neutral[0]}`, or `optimizer_state=False`.",
                )
        for p in group["params"]:
            _check_parameter(p, name, mapping)
        if name == "Adam" and group["weight_decay"] and not group.get("decoupled_weight_decay"):
            raise setting_error(
                "optimizer_state",
                "cannot keep Adam's L2 weight decay (bitsandbytes decouples it)",
                group["weight_decay"],
                "Use AdamW, or `weight_decay=0`.",
            )
        if name == "SGD" and not group["momentum"]:
            raise setting_error(
                "optimizer_state",
                "needs SGD with momentum, as SGD without has no state",
                "momentum=0",
                "Use `optimizer_state=False`.",
            )
    return mapping


def _check_parameter(p: Tensor, name: str, mapping: OptimizerMapping) -> None:
    if p.dtype not in _DTYPES or (p.is_cuda and p.dtype == torch.bfloat16 and not mapping.has_bfloat16):
        found = f"{p.dtype} under {name} on {p.device.type}"
    elif p.numel() > _MAX_NUMEL:
        found = f"{p.numel()} elements"
    else:
        return
    raise setting_error(
        "optimizer_state",
        "of bitsandbytes has no kernel for such a parameter",
        found,
        'Use `OptimizerState(backend="own")`.',
    )


def check_paged(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what bitsandbytes does not page.

    Raises:
        ValueError: an optimizer, a setting of it, or parameters that are not on CUDA.
    """
    if find_mapping(optimizer).paged_name is None:
        raise setting_error(
            "optimizer_state",
            f"is paged for {', '.join(name for name, each in OPTIMIZER_MAPPINGS.items() if each.paged_name)} alone",
            type(optimizer).__name__,
            'Use one of these, or `optimizer_state="offload"`.',
        )
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    if devices - {"cuda"}:
        raise setting_error(
            "optimizer_state",
            '="paged" needs parameters on CUDA, whose driver moves the pages',
            ", ".join(sorted(devices)),
            'Use `optimizer_state="offload"`, or "8bit".',
        )


def is_8bit(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `become_8bit` has changed this optimizer."""
    return MEMORY in vars(optimizer)


@dataclass(kw_only=True)
class BitsandbytesState:
    """What an 8-bit optimizer remembers of its plain self."""

    plain_class: type[torch.optim.Optimizer]
    plain_attributes: frozenset[str]
    kept: set[Tensor]
    scales_itself: Any = None
    """What the plain class says to a GradScaler; bitsandbytes' steps take gradients as they are."""
    is_paged: bool = False
    pages: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)
    """State in managed memory, by parameter and name."""
    is_compact: bool = False
    """Whether checkpoints have codes instead of float32 moments."""
    min_size: int = 0
    """Elements below which a parameter that comes later keeps float32 state."""

    @property
    def mapping(self) -> OptimizerMapping:
        """What bitsandbytes has for the plain class."""
        name = self.plain_class.__name__
        return OPTIMIZER_MAPPINGS[_ALIASES.get(name, name)]


def memory_of(optimizer: torch.optim.Optimizer) -> BitsandbytesState:
    """Return what an 8-bit optimizer remembers of its plain self."""
    memory: BitsandbytesState = vars(optimizer)[MEMORY]
    return memory
