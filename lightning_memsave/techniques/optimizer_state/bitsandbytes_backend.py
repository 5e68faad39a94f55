"""The change of an optimizer's class to the one of bitsandbytes that does the same, and back."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.techniques.optimizer_state.conversion import from_plain, load_plain_state, plain_state, to_plain
from lightning_memsave.techniques.optimizer_state.lamb import lamb_config, lamb_step
from lightning_memsave.techniques.optimizer_state.optimizer_mapping import (
    MEMORY,
    BitsandbytesState,
    OptimizerMapping,
    memory_of,
)
from lightning_memsave.techniques.optimizer_state.state_dict_layout import move_counts
from lightning_memsave.torch_internals.optimizer_class import (
    IN_BACKWARD,
    SCALES_ITSELF,
    MadeClass,
    change_class,
    check_latest,
    original,
)


@functools.cache
def _class_8bit(names: tuple[str, str]) -> Any:
    """Return the class for the names of bitsandbytes' class and of the plain one."""
    import logging

    # The only place that imports bitsandbytes. On some CPUs it warns about an inference kernel that nothing here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes

    class_name, plain_name = names
    base = getattr(bitsandbytes.optim, class_name)

    def get_config(self: Any, gindex: int, pindex: int, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return bitsandbytes' settings of one parameter, from torch's own group: schedulers steer both."""
        memory, p = memory_of(self), group["params"][pindex]
        is_kept = original(p) in memory.kept or original(p).numel() < memory.min_size
        weight_decay, lr = float(group["weight_decay"]), float(group["lr"])
        return {
            "betas": memory.mapping.betas(group),
            "eps": float(group.get("eps", 0.0)),
            "weight_decay": weight_decay,
            "lr": lr,
            "optim_bits": 32 if memory.is_paged or is_kept else 8,
            "min_8bit_size": 0,
            "max_unorm": 0.0,
            "skip_zeros": False,
        }

    def get_state_buffer(self: Any, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a contiguous buffer, also of a parameter that is not (channels last): kernels walk memory in order."""
        made: Tensor = base.get_state_buffer(self, p, dtype)
        return made.contiguous()

    def getstate(self: Any) -> dict[str, Any]:
        """Return what torch copies of an optimizer, and what makes this one an 8-bit one."""
        own = vars(self).keys() - memory_of(self).plain_attributes - {"step", IN_BACKWARD}
        return {**torch.optim.Optimizer.__getstate__(self), **{name: vars(self)[name] for name in own}}

    def state_dict(self: Any) -> dict[str, Any]:
        return to_plain(self)

    def load_state_dict(self: Any, state_dict: Mapping[str, Any]) -> None:
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
    mapping: OptimizerMapping,
    kept: set[Tensor],
    *,
    min_size: int = 0,
    is_paged: bool = False,
    is_compact: bool = False,
) -> None:
    """Change the class of `optimizer`, so that every reference to it (schedulers, the trainer) stays good."""
    class_name = mapping.paged_name if is_paged else mapping.class_name
    assert class_name is not None, "checked by `check_paged`"
    mapped_class = _class_8bit((class_name, type(optimizer).__name__))
    placeholder = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    arguments = {"momentum": 0.9} if mapping.class_name == "SGD8bit" else {}
    donor = mapped_class([placeholder], lr=1e-3, **arguments)
    if mapping.class_name == "LAMB8bit":  # for which CUDA has no kernel of 8 bits; what `lamb_step` takes is Adam's
        donor.optimizer_name = "adam"
    scales_itself = vars(optimizer).pop(SCALES_ITSELF, None)
    plain_attributes = frozenset(vars(optimizer))
    plain_state = dict(optimizer.state)
    memory = BitsandbytesState(
        plain_class=type(optimizer),
        plain_attributes=plain_attributes,
        kept=kept,
        scales_itself=scales_itself,
        is_paged=is_paged,
        is_compact=is_compact,
        min_size=min_size,
    )
    change_class(optimizer, mapped_class)
    vars(optimizer).update({k: v for k, v in vars(donor).items() if k not in plain_attributes})
    vars(optimizer)[MEMORY] = memory
    load_plain_state(optimizer, plain_state)


def become_plain(optimizer: torch.optim.Optimizer) -> None:
    """Undo `become_8bit`; the state is converted back, with the rounding it has suffered.

    Raises:
        RuntimeError: the optimizer was changed again since.
    """
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
