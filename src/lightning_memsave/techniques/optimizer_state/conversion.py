"""Optimizer state between torch's layout (float32 moments under torch's names) and bitsandbytes' (codes and absmax).

On disk there is only torch's layout, so that a checkpoint loads with and without memory saving. Codes are found again
exactly: next to the moments the state dict carries each block's absmax under a key of its own, which torch ignores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.errors import setting_error
from lightning_memsave.numerics.blockwise import dequantize_blockwise, quantize_blockwise
from lightning_memsave.techniques.optimizer_state.kin import KINS, Kin, memory_of

SIDE_KEY = "memsave_8bit"
_VERSION = 1


def _plain_moments(state: Mapping[str, Any], kin: Kin) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    if kin.has_step:
        plain["step"] = torch.tensor(float(state["step"]), dtype=torch.float32)
    for number, name in enumerate(kin.moments, start=1):
        moment = state[f"state{number}"]
        if moment.dtype == torch.uint8:
            moment = dequantize_blockwise(moment, state[f"qmap{number}"], state[f"absmax{number}"])
        plain[name] = moment
    return plain


def plain_state(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    """The state of an 8-bit optimizer as its plain self would hold it, by parameter."""
    kin = memory_of(optimizer).kin
    return {p: _plain_moments(state, kin) for p, state in optimizer.state.items()}


def load_plain_state(
    optimizer: torch.optim.Optimizer,
    state: Mapping[Any, Mapping[str, Any]],
    absmax: Mapping[Any, Mapping[str, Tensor]] | None = None,
) -> None:
    """Replace the state of an 8-bit optimizer by plain state, rounded; exactly invertible when `absmax` is given."""
    memory = memory_of(optimizer)
    optimizer.state.clear()
    for gindex, group in enumerate(optimizer.param_groups):
        for pindex, p in enumerate(group["params"]):
            if not state.get(p):
                continue
            optimizer.init_state(group, p, gindex, pindex)  # type: ignore[attr-defined]  # a bitsandbytes optimizer
            _fill(optimizer.state[p], state[p], memory.kin, (absmax or {}).get(p, {}))


def _fill(target: dict[str, Any], plain: Mapping[str, Any], kin: Kin, absmax: Mapping[str, Tensor]) -> None:
    # bitsandbytes starts its momentum at step 1; a loaded one has taken at least one step.
    target["step"] = int(plain.get("step", 1))
    for number, name in enumerate(kin.moments, start=1):
        moment, stored = plain.get(name), target[f"state{number}"]
        if moment is None:
            continue
        moment = moment.to(stored.device)
        if stored.dtype == torch.uint8:
            scales = absmax.get(name)
            codes, scales = quantize_blockwise(
                moment, target[f"qmap{number}"], None if scales is None else scales.to(stored.device)
            )
            stored.copy_(codes)
            target[f"absmax{number}"].copy_(scales)
        else:
            stored.copy_(moment)


def to_plain(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an 8-bit optimizer in its plain self's layout.

    It loads into the plain optimizer, and through `from_plain` into the 8-bit one, bit for bit.
    """
    memory = memory_of(optimizer)
    numbers = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    groups = [{**group, "params": [numbers[p] for p in group["params"]]} for group in optimizer.param_groups]
    absmax = {
        numbers[p]: {
            name: state[f"absmax{number}"]
            for number, name in enumerate(memory.kin.moments, start=1)
            if f"absmax{number}" in state
        }
        for p, state in optimizer.state.items()
    }
    return {
        "state": {numbers[p]: moments for p, moments in plain_state(optimizer).items()},
        "param_groups": groups,
        SIDE_KEY: {"version": _VERSION, "absmax": absmax},
    }


def from_plain(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a plain state dict, of the plain optimizer or of `to_plain`, into an 8-bit optimizer.

    Raises:
        ValueError: parameter groups differ, or the state is of another optimizer or of a newer version.
    """
    memory, saved_groups = memory_of(optimizer), state_dict["param_groups"]
    side = state_dict.get(SIDE_KEY, {"version": _VERSION, "absmax": {}})
    if side["version"] > _VERSION:
        raise setting_error(
            "optimizer_states", f"must be of version {_VERSION} or older", side["version"], "Update lightning-memsave."
        )
    saved_sizes = [len(group["params"]) for group in saved_groups]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved_sizes != sizes:
        raise setting_error(
            "optimizer_states", f"must have parameter groups of sizes {sizes}", saved_sizes, "Load the matching model."
        )
    known = {moment for kin in KINS.values() for moment in kin.moments}
    for state in state_dict["state"].values():
        if known & set(state) != set(memory.kin.moments):
            raise setting_error(
                "optimizer_states",
                f"must be of {memory.plain_class.__name__} and hold {', '.join(memory.kin.moments)} alone",
                sorted(state),
                "Resume with the optimizer that wrote the checkpoint.",
            )
    by_number = {
        number: p
        for saved, group in zip(saved_groups, optimizer.param_groups, strict=True)
        for number, p in zip(saved["params"], group["params"], strict=True)
    }
    for saved, group in zip(saved_groups, optimizer.param_groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    load_plain_state(
        optimizer,
        {by_number[number]: state for number, state in state_dict["state"].items()},
        {by_number[number]: scales for number, scales in side["absmax"].items()},
    )
