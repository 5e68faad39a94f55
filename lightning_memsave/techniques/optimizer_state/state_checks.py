"""Optimizer states that are loaded: what is damaged, or another optimizer's, is refused before anything changes.

Kernels read as many codes and scales as a shape asks for, so every entry is held against the shape of its parameter.
What cannot be told from a sound entry (another number among the values) is loaded as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_memsave.core.errors import setting_error
from lightning_memsave.numerics.bits import unpack
from lightning_memsave.numerics.blockwise import num_blocks
from lightning_memsave.techniques.optimizer_state import projection
from lightning_memsave.techniques.optimizer_state.moment_codecs import POSITIVE, SIGNED
from lightning_memsave.techniques.optimizer_state.state_config import spelled

SIDE_KEY = "memsave_state"
VERSION = 1
CODES, MEANS = "memsave-codes", "memsave-means"
_DAMAGED = "The checkpoint is damaged, or not this model's: load another one."
_CHUNK = 2**20  # codes that are looked at together
_Rules = Iterator[tuple[str, str, bool]]
"""Part of an entry, what it must be, whether it is; a rule may count on those before it."""


def numbered(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[int, Tensor]:
    """Return the parameters of `optimizer` by the numbers that a state dict gives them.

    Raises:
        ValueError: parameter groups differ, or one number is of two parameters.
    """
    saved_groups = state_dict["param_groups"]
    saved = [len(group["params"]) for group in saved_groups]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved != sizes:
        raise setting_error(
            "optimizer_states", f"must have parameter groups of sizes {sizes}", saved, "Load the matching model."
        )
    found: dict[int, Tensor] = {}
    for theirs, ours in zip(saved_groups, optimizer.param_groups, strict=True):
        for number, p in zip(theirs["params"], ours["params"], strict=True):
            if found.setdefault(number, p) is not p:  # one parameter may stand there twice
                raise _damaged("optimizer_states['param_groups']", "must number each parameter once", number)
    return found


def check_state_dict(
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    moments_of: Callable[[Mapping[str, Any]], tuple[str, ...]],
    subspaces: tuple[str, int] | None = None,
) -> None:
    """Refuse a state dict that is damaged, or of no optimizer with these moments of a group, in these subspaces.

    Raises:
        ValueError: parameter groups differ, an entry does not belong to its parameter or is damaged, or the state is of
            another optimizer, of another subspace, or of a newer version.
    """
    _check_structure(state_dict)
    by_number = numbered(optimizer, state_dict)
    expected = {p: moments_of(group) for group in optimizer.param_groups for p in group["params"]}
    for number, p in by_number.items():
        state = state_dict["state"].get(number, {})
        if projection.PROJECTION in state:
            _check_subspace(state, p, subspaces)
        if state and _moments_in(state, expected[p]) != set(expected[p]):
            raise setting_error(
                "optimizer_states",
                f"must hold {', '.join(expected[p])} alone",
                sorted(map(str, state)),
                "Resume with the optimizer that wrote the checkpoint.",
            )
        if state and "step" not in state and not _COUNTED.isdisjoint(expected[p]):
            raise _damaged(_setting(number, "step"), "must be a number of steps", None)
        shapes = _shapes(state, p, expected[p])
        for name, value in state.items():
            _check_entry(_setting(number, name), name, value, shapes.get(name))
    _check_side(state_dict.get(SIDE_KEY, {"version": VERSION}), by_number)


def check_whole(state_dict: Mapping[str, Any]) -> None:
    """Refuse moments of subspaces.

    Raises:
        ValueError: there are some.
    """
    for state in state_dict["state"].values():
        if projection.PROJECTION in state:
            _check_subspace(state, None, None)


def check_compact_entries(state_dict: Mapping[str, Any]) -> None:
    """Refuse compact entries that do not hold together; of any optimizer's state.

    Raises:
        ValueError: there is one.
    """
    state = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    if not _is_of_mappings(state):
        raise _damaged("optimizer_states['state']", "must be dictionaries by number", state)
    for number, values in state.items():
        for name, value in values.items():
            if isinstance(value, Mapping) and value.get("layout") in (CODES, MEANS):
                _check_compact(_setting(number, name), value, None)


def _setting(number: Any, name: str) -> str:
    return f"optimizer_states[{number}].{name}"


def _check_structure(state_dict: Mapping[str, Any]) -> None:
    """Check that states, groups and the numbers of parameters are where torch's layout has them."""
    if not isinstance(state_dict, Mapping):
        raise _damaged("optimizer_states", "must be dictionaries", state_dict)
    state, groups = state_dict.get("state"), state_dict.get("param_groups")
    if not isinstance(state, Mapping):  # what is of no parameter is not read, as torch does not
        raise _damaged("optimizer_states['state']", "must be dictionaries by number", state)
    are_groups = isinstance(groups, Sequence) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in groups
    )
    if not are_groups:
        raise _damaged("optimizer_states['param_groups']", "must be dictionaries with `params`", groups)
    numbers = [number for group in groups for number in group["params"]]  # type: ignore[union-attr]  # checked
    for number in numbers:
        if type(number) not in (int, str):  # `torch.distributed.checkpoint` has names
            raise _damaged("optimizer_states['param_groups']", "must number or name each parameter", number)
        if not isinstance(found := state.get(number, {}), Mapping):
            raise _damaged(f"optimizer_states[{number!r}]", "must be a dictionary", found)
    if state and state.keys().isdisjoint(numbers):
        raise _damaged("optimizer_states['state']", "must be of parameters of the groups", sorted(map(str, state)))


def check_scales(key: str, side: Any, newest: int, by_number: Mapping[int, Tensor]) -> None:
    """Refuse what stands beside the moments of bitsandbytes' optimizers where it is no scale of each block.

    Raises:
        ValueError: that, or a newer version.
    """
    setting = f"optimizer_states[{key!r}]"
    if not isinstance(side, Mapping):
        raise _damaged(setting, "must be a dictionary", side)
    _check_version(f"{setting}['version']", side.get("version"), newest)
    absmax = side.get("absmax")
    if not _is_of_mappings(absmax) or not absmax.keys() <= by_number.keys():
        raise _damaged(f"{setting}['absmax']", "must be dictionaries, by the numbers of parameters", absmax)
    for number, name, scales in ((n, name, each) for n, found in absmax.items() for name, each in found.items()):
        if _length(scales) is None:
            raise _damaged(f"{setting}['absmax'][{number}][{name!r}]", "must be float32 scales", scales)


def _check_version(setting: str, found: Any, newest: int = VERSION) -> None:
    if type(found) is not int or found < 1:
        raise _damaged(setting, "must have a version", found)
    if found > newest:
        raise setting_error(setting, f"must be of version {newest} or older", found, "Update lightning-memsave.")


def _check_entry(setting: str, name: str, value: Any, shape: Sequence[int] | None) -> None:
    """Check one entry of a parameter's state; `shape`: that it has in 32 bit, where it is known."""
    if isinstance(value, Mapping):
        _check_compact(setting, value, shape)
    elif name == "step":
        is_one = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
        if not is_one or isinstance(value, bool) or not 0 <= float(value) < math.inf:
            raise _damaged(setting, "must be a number of steps", value)
    elif name == projection.PROJECTION and type(value) is int:
        if not 0 <= value < 2**32:
            raise _damaged(setting, "must be a seed", value)
    elif shape is not None and value is not None and not (_is_of_floats(value) and value.shape == tuple(shape)):
        raise _damaged(setting, f"must be a tensor of floats of shape {list(shape)}", value)


def _check_compact(setting: str, entry: Mapping[str, Any], shape: Sequence[int] | None) -> None:
    layout, sizes = entry.get("layout"), entry.get("shape")
    if layout not in (CODES, MEANS):
        raise _damaged(f"{setting}['layout']", f"must be {CODES!r} or {MEANS!r}", layout)
    _check_version(f"{setting}['version']", entry.get("version"))
    if not isinstance(sizes, Sequence) or not all(type(size) is int and size >= 0 for size in sizes):
        raise _damaged(f"{setting}['shape']", "must be a list of sizes", sizes)
    if shape is not None and list(shape) != list(sizes):
        raise _damaged(f"{setting}['shape']", f"must be {list(shape)}", sizes)
    for key, rule, holds in (_rules_of_means if layout == MEANS else _rules_of_codes)(entry, sizes):
        if not holds:
            raise _damaged(f"{setting}[{key!r}]", rule, entry.get(key))


def _rules_of_means(entry: Mapping[str, Any], sizes: Sequence[int]) -> _Rules:
    yield "shape", "must have rows and columns", len(sizes) > 1
    for key, size in (("rows", sizes[0]), ("columns", math.prod(sizes[1:]))):
        yield key, f"must be {size} float32 means", _is_vector(entry.get(key), size)


def _rules_of_codes(entry: Mapping[str, Any], sizes: Sequence[int]) -> _Rules:
    bits, code_map, codes = entry.get("bits"), entry.get("map"), entry.get("codes")
    num_values = math.prod(sizes)
    yield "bits", "must be 4, 5 or 8", type(bits) is int and bits in (4, 5, 8)
    assert isinstance(bits, int)
    yield "map", "must be a vector of floats", _is_of_floats(code_map) and code_map.dim() == 1
    assert isinstance(code_map, Tensor)
    yield "map", f"must be 2 to {2**bits} values that ascend, from -1 to 1", _is_map(code_map, 2**bits)
    num_scales = num_blocks(num_values)
    yield "absmax", f"must be {num_scales} float32 scales", _is_vector(entry.get("absmax"), num_scales)
    num_bytes = -(-num_values * bits // 8)
    yield "codes", f"must be {num_bytes} bytes", _are_bytes(codes, num_bytes)
    yield "codes", f"must be below {len(code_map)}", _are_below(len(code_map), codes, bits, num_values)


def _is_map(code_map: Tensor, most: int) -> bool:
    values = code_map.double()
    return 2 <= len(values) <= most and bool((values.diff() > 0).all() and (values.abs() <= 1).all())


def _are_below(limit: int, codes: Any, bits: int, num_values: int) -> bool:
    if limit == 2**bits:
        return True
    flat = codes.reshape(-1)
    for start in range(0, num_values, _CHUNK):
        num = min(_CHUNK, num_values - start)
        if int(unpack(flat[start * bits // 8 : -(-(start + num) * bits // 8)], bits, num).amax()) >= limit:
            return False
    return True


def _is_of_floats(value: Any) -> TypeGuard[Tensor]:
    is_strided = isinstance(value, Tensor) and value.layout == torch.strided
    return is_strided and (value.is_floating_point() or value.is_complex())


def _is_vector(value: Any, size: int) -> bool:
    return _is_of_floats(value) and value.shape == (size,) and value.dtype == torch.float32


def _are_bytes(value: Any, num_bytes: int) -> bool:
    is_strided = isinstance(value, Tensor) and value.layout == torch.strided
    return is_strided and value.dtype == torch.uint8 and value.numel() == num_bytes


def _is_of_mappings(value: Any) -> TypeGuard[Mapping[Any, Mapping[Any, Any]]]:
    return isinstance(value, Mapping) and all(isinstance(each, Mapping) for each in value.values())


def _damaged(setting: str, rule: str, value: Any) -> ValueError:
    if isinstance(value, Tensor):
        value = f"{tuple(value.shape)} of {value.dtype}"
    return setting_error(setting, rule, value if len(text := repr(value)) < 80 else f"{text[:80]}...", _DAMAGED)


_COUNTED = {"square_avg", "exp_avg_sq", "sum", "exp_inf", "prev"}
"""Moments of torch's optimizers that count their steps."""


def _moments_in(state: Mapping[str, Any], expected: Sequence[str]) -> set[str]:
    if "variance" in state or {"row_var", "col_var"} <= state.keys():  # `torch.optim.Adafactor`'s
        return {"exp_avg", "exp_avg_sq"}
    return {name for name in (*SIGNED, *POSITIVE, *expected) if state.get(name) is not None}


def _shapes(state: Mapping[str, Any], p: Tensor, expected: Sequence[str]) -> dict[str, Sequence[int]]:
    """Return the shapes of the entries of a parameter's state, by name."""
    if projection.PROJECTION in state:
        shapes = dict.fromkeys((*SIGNED, *POSITIVE), projection.shape_of(p, state))
        return {**shapes, projection.PROJECTION: projection.shape_of_projection(p, state)}
    adafactor = {"variance": p.shape, "row_var": (*p.shape[:-1], 1), "col_var": (*p.shape[:-2], 1, *p.shape[-1:])}
    return {**dict.fromkeys((*SIGNED, *POSITIVE, *expected), p.shape), **adafactor}


def _check_subspace(state: Mapping[str, Any], p: Tensor | None, subspaces: tuple[str, int] | None) -> None:
    """Saved moments of `p` in a subspace, against the format and rank of the optimizer."""
    if not any(isinstance(state.get(name), Tensor) and state[name].dim() == 2 for name in (*SIGNED, *POSITIVE)):
        raise _damaged("optimizer_states", "must have moments of matrices beside a projection", sorted(map(str, state)))
    saved_format, saved = projection.format_of(state), projection.rank_of(state)
    own_format, own = subspaces or (None, 0)
    if own_format != saved_format:
        raise setting_error(
            "optimizer_states",
            "must have moments of whole gradients, or of the same subspaces",
            f"those of a subspace of {saved_format!r}",
            f"Resume with `{spelled(saved_format)}`.",
        )
    if saved != own or (p is not None and not projection.is_worth_it(p, saved)):
        raise setting_error(
            "OptimizerState.rank", "must be that of the checkpoint", own, f"Use `OptimizerState(rank={saved})`."
        )


def _check_side(side: Any, by_number: Mapping[int, Tensor]) -> None:
    """Check what stands beside the moments.

    The number of steps, exact means, and gradients that wait for their step.
    """
    setting = f"optimizer_states[{SIDE_KEY!r}]"
    if not isinstance(side, Mapping):
        raise _damaged(setting, "must be a dictionary", side)
    _check_version(f"{setting}['version']", side.get("version"))
    if type(steps := side.get("num_steps", 0)) is not int or steps < 0:
        raise _damaged(f"{setting}['num_steps']", "must be a number of steps", steps)
    means, pending = side.get("means", {}), side.get("pending", {})
    if not _is_of_mappings(means) or not means.keys() <= by_number.keys():
        raise _damaged(f"{setting}['means']", "must be dictionaries, by the numbers of parameters", means)
    if not isinstance(pending, Mapping) or not pending.keys() <= by_number.keys():
        raise _damaged(f"{setting}['pending']", "must be by the numbers of parameters", pending)
    for number, p in by_number.items():
        for name, pair in means.get(number, {}).items():
            if not isinstance(pair, Sequence) or len(pair) != 2 or None in map(_length, pair):
                raise _damaged(
                    f"{setting}['means'][{number}][{name!r}]", "must be float32 means of rows, columns", pair
                )
        if number in pending and not _is_pending(pending[number], p.numel()):
            raise _damaged(f"{setting}['pending'][{number}]", "must be gradients that wait", pending[number])


def _length(value: Any) -> int | None:
    return value.numel() if isinstance(value, Tensor) and _is_vector(value, value.numel()) else None


def _is_pending(value: Any, num_elements: int) -> bool:
    """Return whether it is a factor, a number of microbatches, and sums by their place: (start, length)."""
    if not isinstance(value, Sequence) or len(value) < 2:
        return False
    factor, num_parts, *rest = value
    sums = rest[0] if rest and isinstance(rest[0], Mapping) else {}  # others are an earlier version's, and not read
    is_counted = isinstance(factor, (int, float)) and type(num_parts) is int and num_parts > 0
    return is_counted and all(_is_sum(place, each, num_elements) for place, each in sums.items())


def _is_sum(place: Any, sums: Any, num_elements: int) -> bool:
    """Return whether it is the sum of a gradient, or totals [2], and for each side signed sums [q, N] and squares [N].

    At the place (-1, -1), whether it is what goes into the agreement, [2].
    """
    if place == (-1, -1):  # the agreement's
        return isinstance(sums, Sequence) and list(map(_length, sums)) == [2]
    is_place = isinstance(place, tuple) and len(place) == 2 and all(type(each) is int and each >= 0 for each in place)
    if not is_place or sum(place) > num_elements or not isinstance(sums, Sequence) or not sums:
        return False
    if len(sums) == 1:
        return _is_of_floats(sums[0]) and sums[0].numel() == place[1]
    return _length(sums[0]) == 2 and all(_is_signed(each) for each in sums[1:])


def _is_signed(value: Any) -> bool:
    if not isinstance(value, Sequence) or len(value) != 2 or not all(map(_is_of_floats, value)):
        return False
    sums, squares = value
    return bool(sums.dim() == 2 and squares.shape == sums.shape[1:])
