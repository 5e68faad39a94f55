"""Which optimizer of bitsandbytes is the kin of which plain one, and the change of class from one to the other.

With 8-bit state, or `"paged"`: with 32-bit state in memory that CUDA moves to the host when the device has none left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.optimizers import (
    IN_BACKWARD,
    SCALES_ITSELF,
    MadeClass,
    change_class,
    check_latest,
    name_of,
    original,
)
from lightning_memsave.techniques.optimizer_state.lamb import lamb_config, lamb_step

MEMORY = "_memsave_8bit"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_NUMEL = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Kin:
    """A plain optimizer and the bitsandbytes optimizer that does the same with 8-bit state."""

    class_name: str
    """The class in `bitsandbytes.optim`."""
    moments: tuple[str, ...]
    """torch's names of the state tensors that bitsandbytes calls state1, state2."""
    betas: Callable[[Mapping[str, Any]], tuple[float, float]]
    """The two coefficients of bitsandbytes from a torch param group."""
    required: Mapping[str, tuple[Any, ...]]
    """Settings of the plain optimizer that the kin does not have: the values under which they do nothing."""
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
KINS: Mapping[str, Kin] = {
    "AdamW": Kin(class_name="AdamW8bit", moments=("exp_avg", "exp_avg_sq"), betas=_betas, required=_ADAM,
                 paged_name="PagedAdamW32bit"),
    "Adam": Kin(class_name="Adam8bit", moments=("exp_avg", "exp_avg_sq"), betas=_betas, required=_ADAM,
                paged_name="PagedAdam32bit"),
    "SGD": Kin(
        class_name="SGD8bit",
        moments=("momentum_buffer",),
        betas=lambda group: (float(group["momentum"]), float(group["dampening"])),
        required={**_COMMON, "nesterov": _OFF, "dampening": _OFF},
        has_step=False,
        has_bfloat16=False,
    ),
    "Lion": Kin(
        class_name="Lion8bit",
        moments=("exp_avg",),
        betas=_betas,
        required={**_COMMON, "caution": _OFF, "cautious_factor": (None, 1, 1.0), "decoupled_weight_decay": _OFF},
        has_step=False,
        paged_name="PagedLion32bit",
    ),
    "RMSprop": Kin(
        class_name="RMSprop8bit",
        moments=("square_avg",),
        betas=lambda group: (float(group["alpha"]), 0.0),
        required={**_COMMON, "momentum": _OFF, "centered": _OFF},
        has_bfloat16=False,
    ),
    "Adagrad": Kin(
        class_name="Adagrad8bit",
        moments=("sum",),
        betas=lambda group: (0.0, 0.0),
        required={**_COMMON, "lr_decay": _OFF},
        has_bfloat16=False,
    ),
    "LAMB": Kin(
        class_name="LAMB8bit",
        moments=("exp_avg", "exp_avg_sq"),
        betas=_betas,
        required={**_COMMON, "max_grad_norm": _OFF, "trust_clip": _OFF, "always_adapt": (None, True), "caution": _OFF,
                  "debias": (True,), "bias_correction": (True, 1), "grad_averaging": (True, 1)},
    ),
}  # fmt: skip
_ALIASES = {"Lamb": "LAMB"}


def find_kin(optimizer: torch.optim.Optimizer) -> Kin:
    """The 8-bit kin of `optimizer`, by the name of its class.

    Raises:
        ValueError: there is none, or a setting that the kin does not have.
    """
    name = name_of(type(optimizer))
    kin = KINS.get(_ALIASES.get(name, name))
    if kin is None:
        raise setting_error(
            "optimizer_state",
            f"needs an optimizer that has an 8-bit kin ({', '.join(KINS)})",
            name,
            "Use one of these, or `optimizer_state=False`.",
        )
    for group in optimizer.param_groups:
        for key, neutral in kin.required.items():
            value = group.get(key, getattr(optimizer, key, neutral[0]))
            if value not in neutral:
                raise setting_error(
                    "optimizer_state",
                    f"cannot keep {name}'s `{key}`, which bitsandbytes does not have",
                    value,
                    f"Use `{key}={neutral[0]}`, or `optimizer_state=False`.",
                )
        for p in group["params"]:
            _check_parameter(p, name, kin)
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
                "needs SGD with momentum; without, there is no state",
                0,
                "Use `optimizer_state=False`.",
            )
    return kin


def _check_parameter(p: Tensor, name: str, kin: Kin) -> None:
    if p.dtype not in _DTYPES or (p.is_cuda and p.dtype == torch.bfloat16 and not kin.has_bfloat16):
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
    if find_kin(optimizer).paged_name is None:
        raise setting_error(
            "optimizer_state",
            f"is paged for {', '.join(name for name, kin in KINS.items() if kin.paged_name)} alone",
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
    """Whether `become_8bit` has changed this optimizer."""
    return MEMORY in vars(optimizer)


@dataclass(kw_only=True)
class Memory:
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
    def kin(self) -> Kin:
        """What bitsandbytes has for the plain class."""
        name = self.plain_class.__name__
        return KINS[_ALIASES.get(name, name)]


def memory_of(optimizer: torch.optim.Optimizer) -> Memory:
    """The plain self of an 8-bit optimizer."""
    memory: Memory = vars(optimizer)[MEMORY]
    return memory


@functools.cache
def _class_8bit(names: tuple[str, str]) -> Any:
    """By the names of bitsandbytes' class and of the plain one."""
    import logging

    # The only place that imports bitsandbytes. On some CPUs it warns about an inference kernel that nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes

    class_name, plain_name = names
    base = getattr(bitsandbytes.optim, class_name)

    def get_config(self: Any, gindex: int, pindex: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """Bitsandbytes' settings of one parameter, read from torch's own group, so that schedulers steer both."""
        memory, p = memory_of(self), group["params"][pindex]
        is_kept = original(p) in memory.kept or original(p).numel() < memory.min_size
        weight_decay, lr = float(group["weight_decay"]), float(group["lr"])
        return {
            "betas": memory.kin.betas(group),
            "eps": float(group.get("eps", 0.0)),
            "weight_decay": weight_decay,
            "lr": lr,
            "optim_bits": 32 if memory.is_paged or is_kept else 8,
            "min_8bit_size": 0,
            "max_unorm": 0.0,
            "skip_zeros": False,
        }

    def get_state_buffer(self: Any, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Contiguous where the parameter is not (channels last): kernels walk the memory in that order."""
        made: Tensor = base.get_state_buffer(self, p, dtype)
        return made.contiguous()

    def getstate(self: Any) -> dict[str, Any]:
        """For copies: what torch copies of an optimizer, and what makes this one an 8-bit one."""
        own = vars(self).keys() - memory_of(self).plain_attributes - {"step", IN_BACKWARD}
        return {**torch.optim.Optimizer.__getstate__(self), **{name: vars(self)[name] for name in own}}

    def state_dict(self: Any) -> dict[str, Any]:
        from lightning_memsave.techniques.optimizer_state.conversion import to_plain

        return to_plain(self)

    def load_state_dict(self: Any, state_dict: Mapping[str, Any]) -> None:
        from lightning_memsave.techniques.optimizer_state.conversion import from_plain

        from_plain(self, state_dict)

    body: dict[str, Any] = {
        "made_by": staticmethod(_class_8bit),
        "made_from": names,
        "memory_name": MEMORY,
        "get_config": get_config,
        "get_state_buffer": get_state_buffer,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
        "__getstate__": getstate,
        "__module__": __name__,
        "__qualname__": f"MemSave{class_name}",
    }
    if class_name == "LAMB8bit":
        body |= {"get_config": lamb_config(get_config), "update_step": lamb_step(base.update_step)}
    return MadeClass(plain_name, (base,), body)


def become_8bit(
    optimizer: torch.optim.Optimizer,
    kin: Kin,
    kept: set[Tensor],
    *,
    min_size: int = 0,
    is_paged: bool = False,
    is_compact: bool = False,
) -> None:
    """Change the class of `optimizer`, so that every reference to it (schedulers, the trainer) stays good."""
    from lightning_memsave.techniques.optimizer_state.conversion import load_plain_state

    class_name = kin.paged_name if is_paged else kin.class_name
    assert class_name is not None, "checked by `check_paged`"
    kin_class = _class_8bit((class_name, type(optimizer).__name__))
    placeholder = torch.nn.Parameter(torch.zeros(1))
    arguments = {"momentum": 0.9} if kin.class_name == "SGD8bit" else {}
    donor = kin_class([placeholder], lr=1e-3, **arguments)
    if kin.class_name == "LAMB8bit":  # for which CUDA has no kernel of 8 bits; what `lamb_step` takes is Adam's
        donor.optimizer_name = "adam"
    scales_itself = vars(optimizer).pop(SCALES_ITSELF, None)
    plain_attributes = frozenset(vars(optimizer))
    plain_state = dict(optimizer.state)
    memory = Memory(
        plain_class=type(optimizer),
        plain_attributes=plain_attributes,
        kept=kept,
        scales_itself=scales_itself,
        is_paged=is_paged,
        is_compact=is_compact,
        min_size=min_size,
    )
    change_class(optimizer, kin_class)
    vars(optimizer).update({k: v for k, v in vars(donor).items() if k not in plain_attributes})
    vars(optimizer)[MEMORY] = memory
    load_plain_state(optimizer, plain_state)


def become_plain(optimizer: torch.optim.Optimizer) -> None:
    """Undo `become_8bit`; the state is converted back, with the rounding it has suffered.

    Raises:
        RuntimeError: the optimizer was changed again since.
    """
    from lightning_memsave.techniques.optimizer_state.conversion import plain_state
    from lightning_memsave.techniques.optimizer_state.layout import move_counts

    check_latest(optimizer, MEMORY)
    memory = memory_of(optimizer)
    # In the dtype of the parameter, as the plain optimizer would hold it.
    state = {
        p: {name: value if name == "step" else value.to(p.device, p.dtype) for name, value in moments.items()}
        for p, moments in plain_state(optimizer).items()
    }
    change_class(optimizer, memory.plain_class)
    for name in vars(optimizer).keys() - memory.plain_attributes - {"step", "_opt_called"}:
        del vars(optimizer)[name]
    if memory.scales_itself is not None:
        vars(optimizer)[SCALES_ITSELF] = memory.scales_itself
    optimizer.state.clear()
    optimizer.state.update(state)
    move_counts(optimizer)
