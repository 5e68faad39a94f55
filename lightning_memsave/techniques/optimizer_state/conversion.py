"""Optimizer state between the layout of checkpoints (`state_dict_layout.py`) and bitsandbytes' (codes and absmax).

Codes are found again exactly: next to the moments the state dict carries each block's absmax, because bitsandbytes' map
does not reach -1, under a key of its own, which torch ignores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.numerics.blockwise import dequantize_blockwise, quantize_blockwise
from lightning_memsave.techniques.optimizer_state import state_checks, state_dict_layout
from lightning_memsave.techniques.optimizer_state.optimizer_mapping import OptimizerMapping, memory_of
from lightning_memsave.techniques.optimizer_state.paged import note_pages

SIDE_KEY = "memsave_8bit"
_VERSION = 1


def _plain_moments(state: Mapping[str, Any], mapping: OptimizerMapping, is_compact: bool = False) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    if mapping.has_step:
        plain["step"] = torch.tensor(float(state["step"]), dtype=torch.float32, device="cpu")
    for number, name in enumerate(mapping.moments, start=1):
        moment = state[f"state{number}"]
        if moment.dtype == torch.uint8:
            code_map, absmax = state[f"qmap{number}"], state[f"absmax{number}"]
            if is_compact:
                plain[name] = state_dict_layout.compact_codes(moment, code_map, absmax, 8, moment.shape)
                continue
            moment = dequantize_blockwise(moment, code_map, absmax).cpu()  # one at a time: the device has no room
        plain[name] = moment
    return plain


def plain_state(optimizer: torch.optim.Optimizer, is_compact: bool = False) -> dict[Any, dict[str, Any]]:
    """Return the state of an 8-bit optimizer as its plain self would hold it, by parameter."""
    mapping = memory_of(optimizer).mapping
    return {p: _plain_moments(state, mapping, is_compact) for p, state in optimizer.state.items()}


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
            _fill(optimizer.state[p], state[p], memory.mapping, (absmax or {}).get(p, {}))
    note_pages(optimizer)


def _fill(
    target: dict[str, Any], plain: Mapping[str, Any], mapping: OptimizerMapping, absmax: Mapping[str, Tensor]
) -> None:
    # bitsandbytes starts its momentum at step 1; a loaded one has taken at least one step.
    target["step"] = int(plain.get("step", 1))
    for number, name in enumerate(mapping.moments, start=1):
        moment, stored = plain.get(name), target[f"state{number}"]
        if moment is None:
            continue
        if stored.dtype != torch.uint8:
            stored.copy_(state_dict_layout.decoded(moment))
            continue
        code_map, scales = target[f"qmap{number}"], target[f"absmax{number}"]
        codes, found = _codes(moment, code_map, absmax.get(name), scales.numel())
        stored.copy_(codes.reshape(stored.shape))
        scales.copy_(found)


def _codes(moment: Any, code_map: Tensor, absmax: Tensor | None, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Return the codes of a moment, with the scales that it was written with where these give the moment again."""
    device = code_map.device
    if isinstance(moment, Mapping):
        has_codes = moment["layout"] == state_checks.CODES and moment["bits"] == 8
        if has_codes and torch.equal(moment["map"].to(device), code_map):
            return moment["codes"].to(device), moment["absmax"].to(device)
        moment = state_dict_layout.decoded(moment)
    moment = moment.to(device)
    if absmax is not None and absmax.numel() == num_blocks:  # else of another pattern of live weights
        codes, scales = quantize_blockwise(moment, code_map, absmax.to(device))
        if torch.equal(dequantize_blockwise(codes, code_map, scales), moment.float()):
            return codes, scales
    return quantize_blockwise(moment, code_map)


def to_plain(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of an 8-bit optimizer in its plain self's layout.

    It loads into the plain optimizer, and through `from_plain` into the 8-bit one, bit for bit.
    """
    memory = memory_of(optimizer)
    numbers = {p: i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    groups = [{**group, "params": [numbers[p] for p in group["params"]]} for group in optimizer.param_groups]
    absmax = {
        numbers[p]: {
            name: state[f"absmax{number}"]
            for number, name in enumerate(memory.mapping.moments, start=1)
            if f"absmax{number}" in state
        }
        for p, state in optimizer.state.items()
    }
    return {
        "state": {numbers[p]: moments for p, moments in plain_state(optimizer, memory.is_compact).items()},
        "param_groups": groups,
        SIDE_KEY: {"version": _VERSION, "absmax": {} if memory.is_compact else absmax},
    }


def from_plain(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load the state dict of a plain optimizer, or of any format, into an 8-bit optimizer.

    Raises:
        ValueError: parameter groups differ, or the state is of another optimizer or of a newer version.
    """
    memory = memory_of(optimizer)
    state_checks.check_state_dict(optimizer, state_dict, lambda group: memory.mapping.moments)
    side = state_dict.get(SIDE_KEY, {"version": _VERSION, "absmax": {}})
    by_number = state_checks.numbered(optimizer, state_dict)
    state_checks.check_scales(SIDE_KEY, side, _VERSION, by_number)
    for saved, group in zip(state_dict_layout.groups_for(optimizer, state_dict), optimizer.param_groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    betas = state_dict_layout.second_betas(optimizer.param_groups)
    own = {p: state_dict["state"][number] for number, p in by_number.items() if number in state_dict["state"]}
    load_plain_state(
        optimizer,
        {p: state_dict_layout.plain_state(state, p.shape, betas.get(p)) for p, state in own.items()},
        {by_number[number]: scales for number, scales in side["absmax"].items()},
    )
