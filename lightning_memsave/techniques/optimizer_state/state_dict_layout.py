"""Optimizer state in checkpoints: one layout for every format.

A state dict is torch's own: float32 moments under torch's names, so that it loads with and without memory saving. What
it takes to find low-bit state again bit for bit stands beside it, under keys that torch ignores. It is used only where
it reproduces the moments that it belongs to.

`OptimizerState(checkpoint="compact")` writes a moment as a dictionary instead, of plain tensors that load with
`weights_only=True`, and that say themselves how they are decoded:

* `{"layout": "memsave-codes", "version": 1, "codes", "map", "absmax", "bits", "shape"}`: the value of an element is
  `map[code] * absmax` of its block of 256; with 4 bits, the first of two elements is the lower half of its byte;
* `{"layout": "memsave-means", "version": 1, "rows", "columns", "shape"}`: the outer product over the mean of all.

`decoded_state_dict` turns such a state dict into torch's. That of `torch.optim.Adafactor` is read as Adam's, with first
moments that are zero.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.numerics.kernels import dequantize_from_map
from lightning_memsave.techniques.optimizer_state.host_offload import Elsewhere
from lightning_memsave.techniques.optimizer_state.moment_codecs import (
    POSITIVE,
    SIGNED,
    BlockMap,
    Codec,
    Factored,
    Means,
    QuantizedMoment,
    decode,
)
from lightning_memsave.techniques.optimizer_state.projection import PROJECTION
from lightning_memsave.techniques.optimizer_state.state_checks import CODES, MEANS, VERSION, check_compact_entries
from lightning_memsave.torch_internals.optimizer_class import original
from lightning_memsave.torch_internals.sharded_parameters import is_sharded

_MEANS = Means(Means(None))  # type: ignore[arg-type]  # of matrices alone


def compact_codes(codes: Tensor, code_map: Tensor, absmax: Tensor, bits: int, shape: torch.Size) -> dict[str, Any]:
    """Return codes as a checkpoint has them; the tensors are not copied."""
    where = {"layout": CODES, "version": VERSION, "bits": bits, "shape": list(shape)}
    return {**where, "codes": codes, "map": code_map, "absmax": absmax}


def write(codec: Codec | None, stored: Any, *, shape: torch.Size, is_compact: bool) -> Any:
    """Return what a checkpoint has of one entry of a parameter's state."""
    if is_compact and isinstance(stored, QuantizedMoment):
        blocks = _blocks_of(codec)
        return compact_codes(stored.codes, blocks.code_map, stored.absmax, blocks.bits, shape)
    if is_compact and isinstance(stored, Factored):
        means = {"rows": stored.rows, "columns": stored.columns}
        return {"layout": MEANS, "version": VERSION, "shape": list(shape), **means}
    if isinstance(stored, Elsewhere):
        return stored.host()
    if isinstance(stored, (QuantizedMoment, Factored)):
        return decode(codec, stored, shape).cpu()  # one after the other: the device has no room for all
    return stored


def _blocks_of(codec: Codec | None) -> BlockMap:
    codec = codec.otherwise if isinstance(codec, Means) else codec
    assert isinstance(codec, BlockMap)
    return codec


def means_of(state: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return row and column means, from which a moment is found again exactly."""
    return {
        name: (value.rows.clone(), value.columns.clone())
        for name, value in state.items()
        if isinstance(value, Factored)
    }


def read(codec: Codec | None, name: str, value: Any, *, p: Tensor, means: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return an entry of a parameter's state on its device: what is kept where the checkpoint has that, else a tensor.

    Args:
        codec: of the entry.
        name: of it.
        value: as the checkpoint has it.
        p: the parameter.
        means: of rows and columns, that the checkpoint has beside its moments.
        dtype: of moments that are not kept in another way.
    """
    if not isinstance(value, (Tensor, Mapping)):
        return value
    if isinstance(value, Mapping):
        found = _as_kept(codec, value, p.device)
        return _to(decoded(value), p, name, dtype) if found is None else found
    is_matrix = p.dim() > 1 and name in means and list(map(len, means[name])) == [len(p), p.numel() // max(1, len(p))]
    if is_matrix and isinstance(codec, Means):
        factored = Factored(*(mean.to(p.device) for mean in means[name]))
        if torch.equal(decode(codec, factored, p.shape), value.to(p.device)):
            return factored
    return _to(value, p, name, dtype)


def _as_kept(codec: Codec | None, value: Mapping[str, Any], device: torch.device) -> QuantizedMoment | Factored | None:
    """Return what a compact entry holds, if that is how it is kept."""
    if value["layout"] == MEANS:
        tensors = (value["rows"], value["columns"])
        return Factored(*(_copied(t, device) for t in tensors)) if isinstance(codec, Means) else None
    codec = codec.otherwise if isinstance(codec, Means) and len(value["shape"]) < 2 else codec
    if isinstance(codec, BlockMap) and codec.bits == value["bits"] and torch.equal(codec.code_map, value["map"].cpu()):
        return QuantizedMoment(_copied(value["codes"], device), _copied(value["absmax"], device))
    return None


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, copy=True, memory_format=torch.contiguous_format)


def _to(value: Tensor, p: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Move to the device of its parameter, moments in `dtype`; counts and moments of a subspace stay."""
    is_named = name in SIGNED or name in POSITIVE  # of a parameter without dimensions as well
    is_moment = value.shape == p.shape and value.is_floating_point() and (value.dim() > 0 or is_named)
    device = p.device if value.dim() or is_named else value.device
    moved = value.to(device, dtype if is_moment else value.dtype, copy=True)
    return as_strided_as(moved, p) if is_moment else moved


def as_strided_as(value: Tensor, p: Tensor) -> Tensor:
    """Return a moment in memory as its parameter is: fused kernels go through both without a look at their strides."""
    whole = original(p)  # what stands in for it while state is loaded takes no memory, and has no strides
    p = whole if whole.shape == p.shape and not is_sharded(whole) else p
    is_same = value.stride() == p.stride() or (value.is_contiguous() and p.is_contiguous())
    if value.shape != p.shape or is_same:
        return value
    return torch.empty_like(p, dtype=value.dtype, device=value.device).copy_(value)


def in_order_of(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict whose moments are in memory as the parameters of `optimizer` are."""
    saved = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = dict(state_dict["state"])
    for number, p in zip(saved, parameters, strict=False):  # torch says what is wrong with other numbers of them
        if number in state:
            state[number] = {k: as_strided_as(v, p) if isinstance(v, Tensor) else v for k, v in state[number].items()}
    return {**state_dict, "state": state}


def move_counts(optimizer: torch.optim.Optimizer) -> None:
    """Counts of steps to the device of their parameter where fused kernels read them, as torch does on loading."""
    for group in optimizer.param_groups:
        for p in group["params"] if group.get("fused") else ():
            state = optimizer.state.get(p, {})
            if isinstance(count := state.get("step"), Tensor):
                state["step"] = count.to(p.device, torch.float32)


def decoded(value: Any) -> Any:
    """Return the float32 moment that a compact entry stands for; anything else as it is.

    Args:
        value: was checked (`state_checks.py`).
    """
    if not isinstance(value, Mapping) or value.get("layout") not in (CODES, MEANS):
        return value
    shape = torch.Size(value["shape"])
    if value["layout"] == MEANS:
        return _MEANS.decode(Factored(value["rows"], value["columns"]), shape)
    codes, bits = value["codes"].reshape(-1), (value["bits"], math.prod(shape))
    code_map = value["map"].to(codes.device, torch.float32)  # lies in host memory
    return dequantize_from_map(codes, code_map, value["absmax"], *bits).view(shape)


def second_betas(groups: Iterable[Mapping[str, Any]]) -> dict[Any, float]:
    """Return Adam's second beta by parameter, or by its number in a checkpoint."""
    return {p: float(group["betas"][1]) for group in groups if "betas" in group for p in group["params"]}


def _correction(state: Mapping[str, Any], beta: float | None) -> float:
    """Return what Adam's second moment lacks of a mean of squares; Adafactor's is one from the first step on."""
    return 1.0 if beta is None else 1.0 - beta ** max(1.0, float(state["step"]))


def plain_state(state: Mapping[str, Any], shape: torch.Size, beta: float | None = None) -> Mapping[str, Any]:
    """Return a parameter's state of `torch.optim.Adafactor` as Adam's with this second beta; any other as it is."""
    if "row_var" not in state and "variance" not in state:
        return state
    if "variance" in state:
        second = state["variance"].float()
    else:
        rows, columns = state["row_var"].float(), state["col_var"].float()  # [..., N, 1], [..., 1, M]
        second = rows @ columns / rows.mean(-2, keepdim=True).clamp_min(1e-30)
    second = second.view(shape) * _correction(state, beta)
    return {"step": state["step"], "exp_avg": torch.zeros_like(second), "exp_avg_sq": second}


def factored_state(state: Mapping[str, Any], beta: float | None) -> Mapping[str, Any]:
    """Return a parameter's state of Adam, with its second beta, as that of `torch.optim.Adafactor`: no first moment."""
    if "exp_avg_sq" not in state:
        return state
    second = decoded(state["exp_avg_sq"]) / _correction(state, beta)
    step = torch.as_tensor(state["step"], dtype=torch.float32)
    if second.dim() < 2:
        return {"step": step, "variance": second}
    return {"step": step, "row_var": second.mean(-1, keepdim=True), "col_var": second.mean(-2, keepdim=True)}


def for_adafactor(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of Adam as that of `optimizer`, a `torch.optim.Adafactor`; its own as it is."""
    betas = second_betas(state_dict["param_groups"])
    state = {number: factored_state(values, betas.get(number)) for number, values in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups_for(optimizer, state_dict)}


def groups_for(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the saved groups.

    Where they are another optimizer's, those of `optimizer` with the saved learning rates.
    """
    groups = []
    for saved, own in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
        is_kin = own.keys() <= saved.keys()
        kept = saved if is_kin else {key: saved[key] for key in ("params", "lr", "initial_lr") if key in saved}
        groups.append({**own, **kept})
    return groups


def decoded_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict whose compact entries are float32 moments, for any optimizer of torch.

    Parameters whose moments are those of a subspace have none in it, which a warning says: theirs start from zero.

    Raises:
        ValueError: an entry is damaged, or of a newer version.

    >>> codes, code_map = torch.tensor([0, 2], dtype=torch.uint8), torch.tensor([-1.0, 0, 1])
    >>> entry = compact_codes(codes, code_map, torch.ones(1), 8, codes.shape)
    >>> decoded_state_dict({"state": {0: {"exp_avg": entry}}, "param_groups": []})["state"]
    {0: {'exp_avg': tensor([-1.,  1.])}}
    """
    check_compact_entries(state_dict)
    projected = [number for number, values in state_dict["state"].items() if PROJECTION in values]
    if projected:
        warnings.warn(
            f"The moments of parameters {', '.join(map(str, projected))} are those of a subspace, which a plain "
            "optimizer cannot read: theirs start from zero.",
            stacklevel=2,
        )
    state = {
        number: {name: decoded(value) for name, value in values.items()}
        for number, values in state_dict["state"].items()
        if number not in projected
    }
    return {**state_dict, "state": state}
