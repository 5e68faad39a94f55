"""Optimizers whose moments are something smaller between their steps: codes, means, or tensors in host memory.

Any optimizer whose moments are known or found (`moment_names.py`), with its own `step`; AdamW, Adam and SGD on a CPU in
one kernel (`fused_step.py`). Before a parameter steps its moments are decoded, as the optimizer itself would hold them,
and afterwards they are encoded again (`moment_codecs.py`), so that the transient is of one parameter; with codes or
means of one part of it, where it is large (`torch_internals/optimizer_class.py`). With
`"lowrank"` and `"apollo"` they are moments of the gradient in a subspace (`projection.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.numerics.kbit import mix
from lightning_memsave.numerics.kernels.coded_step import ShortWeights
from lightning_memsave.techniques.optimizer_state import optimizer_accumulation as accumulation
from lightning_memsave.techniques.optimizer_state import projection, state_checks
from lightning_memsave.techniques.optimizer_state import state_dict_layout as layout
from lightning_memsave.techniques.optimizer_state.fused_step import step_fused
from lightning_memsave.techniques.optimizer_state.host_offload import fetch_ahead
from lightning_memsave.techniques.optimizer_state.moment_codecs import (
    Codec,
    Factored,
    RoundingNoise,
    bound_step,
    codec_of,
    decode,
    encode,
    put_back,
    unit_of,
)
from lightning_memsave.techniques.optimizer_state.moment_names import Moments, check_signs, find_moments
from lightning_memsave.torch_internals.optimizer_class import (
    PENDING,
    SCALES_ITSELF,
    Counts,
    MadeClass,
    bare_step,
    bounded,
    change_class,
    check_latest,
    local_of,
    name_of,
    num_steps_in,
    original,
    shard_of,
    span_of,
    step_each,
    step_one,
    step_together,
)
from lightning_memsave.torch_internals.sharded_parameters import as_local, as_sharded, is_sharded

MEMORY = "_memsave_coded"
_GOLDEN, _ROOT_OF_2 = 0x9E3779B9, 0x6A09E667  # the fractions of the golden ratio and of the square root, times 2**32


@dataclass(kw_only=True)
class QuantizedState(Counts):
    """What such an optimizer remembers besides its state."""

    plain_class: type[torch.optim.Optimizer]
    moments: Moments
    """What is kept for each parameter in its shape."""
    state_format: str
    kept: set[Tensor]
    """Parameters whose state stays as it is."""
    min_size: int
    """Parameters of fewer elements keep theirs as well, also where they come later."""
    rank: int
    is_compact: bool
    """Whether checkpoints have codes instead of float32 moments."""
    numbers: dict[Tensor, int]
    scales_itself: Any = None
    """What the plain class says to a GradScaler, where steps need gradients as they are."""
    takes_gradients: bool = False
    """Whether gradients go into the moments (`optimizer_accumulation.py`)."""
    last_number: int = -1
    order: list[Tensor] = field(default_factory=list)

    def format_of(self, p: Tensor) -> str:
        """Return how the state of `p` is kept; of a shard, as the whole parameter decides, unless it is empty."""
        whole = original(p)
        is_kept = whole in self.kept or whole.numel() < self.min_size or whole.is_complex() or not p.numel()
        return "32bit" if is_kept else self.state_format

    def codec_of(self, p: Tensor, name: str) -> Codec | None:
        """Return how an entry of the state of `p` is kept; `None`: as it is."""
        is_positive = self.moments.is_positive.get(name)
        return None if is_positive is None else codec_of(self.format_of(p), is_positive)

    def unit(self, p: Tensor) -> int:
        """Return how many elements of `p` step together: whole blocks of codes, rows, or all."""
        unit = unit_of(self.format_of(p), p.shape)
        return math.lcm(unit, accumulation.row_length(p)) if self.takes_gradients else unit

    def noise_of(self, p: Tensor, draw: int = 0) -> RoundingNoise:
        """Return the noise of this step for `p`; `draw` tells several of one step apart."""
        number = self.numbers.setdefault(original(p), len(self.numbers))
        seed = mix(8 * number + 1)
        if shard := shard_of(p):
            seed = mix(~seed & 0xFFFFFFFF ^ shard)
        if start := span_of(p).start:
            seed = mix(seed ^ start)
        return RoundingNoise(seed, (self.num_steps * _GOLDEN + draw * _ROOT_OF_2) & 0xFFFFFFFF)


def _subspaces_of(memory: QuantizedState) -> tuple[str, int] | None:
    return (memory.state_format, memory.rank) if memory.state_format in projection.METHODS else None


def _is_projected(memory: QuantizedState, p: Tensor) -> bool:
    return memory.format_of(p) in projection.METHODS


def memory_of(optimizer: torch.optim.Optimizer) -> QuantizedState:
    """Return what an optimizer remembers that `quantize_state` has changed."""
    memory: QuantizedState = vars(optimizer)[MEMORY]
    return memory


def moments_of(optimizer: torch.optim.Optimizer) -> Moments:
    """Return what `optimizer` keeps of each parameter, as `find_moments` does."""
    return memory_of(optimizer).moments if is_quantized(optimizer) else find_moments(optimizer)


def is_quantized(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `quantize_state` has changed this optimizer."""
    return MEMORY in vars(optimizer)


def quantize_state(
    optimizer: torch.optim.Optimizer,
    state_format: str,
    kept: set[Tensor],
    *,
    min_size: int = 0,
    rank: int = 0,
    is_compact: bool = False,
) -> None:
    """Change the class of `optimizer`, so that every reference to it stays good; state that exists is encoded."""
    plain_class: Any = type(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    memory = QuantizedState(
        plain_class=plain_class,
        moments=find_moments(optimizer),
        state_format=state_format,
        kept=kept,
        min_size=min_size,
        rank=rank,
        is_compact=is_compact,
        numbers={p: number for number, p in enumerate(parameters)},
        order=parameters,
    )
    if state_format in projection.METHODS:  # they read gradients outside of the fused step
        memory.scales_itself = vars(optimizer).pop(SCALES_ITSELF, None)
    change_class(optimizer, _quantized_class(plain_class))
    vars(optimizer)[MEMORY] = memory
    for p, state in optimizer.state.items():
        load_state(optimizer, p, state)


def dequantize_state(optimizer: torch.optim.Optimizer) -> None:
    """Undo `quantize_state`; moments keep the rounding that they have suffered, and the dtype of their parameter.

    Raises:
        RuntimeError: the optimizer was changed again since.
    """
    check_latest(optimizer, MEMORY)
    memory = memory_of(optimizer)
    for p, state in optimizer.state.items():
        if projection.PROJECTION in state:
            state.clear()  # moments of a subspace say nothing about the others
        local = local_of(p)
        for name, value in state.items():
            state[name] = as_sharded(_decoded(memory, name, as_local(value), local), p)
    del vars(optimizer)[MEMORY]
    vars(optimizer).pop(PENDING, None)
    if memory.scales_itself is not None:
        vars(optimizer)[SCALES_ITSELF] = memory.scales_itself
    change_class(optimizer, memory.plain_class)


def load_state(optimizer: torch.optim.Optimizer, p: Tensor, state: dict[str, Any]) -> None:
    """Encode the moments of `p` in place, to the nearest, which finds codes again exactly."""
    memory, local = memory_of(optimizer), local_of(p)
    if _is_projected(memory, p) and projection.PROJECTION not in state:
        projection.project_state(state, p, memory.state_format, memory.rank)
    for name, value in state.items():
        state[name] = as_sharded(encode(memory.codec_of(local, name), as_local(value), local.shape, None), p)


def _decoded(memory: QuantizedState, name: str, stored: Any, p: Tensor) -> Any:
    """Return the moment as the optimizer itself would hold it."""
    value = decode(memory.codec_of(p, name), stored, p.shape)
    if value is stored and (name not in memory.moments.is_positive or value.dtype == p.dtype):
        return value
    return layout.as_strided_as(value.to(p.device, p.dtype), p)


def _step_one(step: Callable[[Any], Any], optimizer: Any, group: dict[str, Any], p: Tensor) -> None:
    memory = memory_of(optimizer)
    pending = vars(optimizer).get(PENDING, {}).get(original(p))
    if pending is not None:
        accumulation.move(optimizer, memory, group, p, pending)
        return
    if _is_projected(memory, p) and projection.is_worth_it(p, memory.rank):
        projection.step_projected(step, optimizer, group, p, memory)
        return
    if not step_fused(optimizer, memory, group, [p]):
        return
    state = optimizer.state.get(p, {})
    before = dict(state)
    if memory.state_format == "offload":
        fetch_ahead([optimizer.state.get(other, {}) for other in _next(memory, p)])
    for name, stored in before.items():
        state[name] = _decoded(memory, name, stored, p)
    if isinstance(before.get("exp_avg_sq"), Factored):
        bound_step(state["exp_avg"], state["exp_avg_sq"], group["betas"])
    step_one(step, optimizer, group, p)
    noise, state = memory.noise_of(p), optimizer.state[p]
    check_signs(memory.moments, state, name_of(memory.plain_class))
    for name, value in state.items():
        state[name] = put_back(memory.codec_of(p, name), before.get(name), value, p.shape, noise.of(name))


def _step_several(
    step: Callable[[Any], Any], optimizer: Any, group: dict[str, Any], parameters: list[Tensor]
) -> list[Tensor]:
    memory = memory_of(optimizer)
    if memory.state_format == "offload":
        return parameters  # each fetches the state of the next one
    left = step_fused(optimizer, memory, group, parameters)
    plain = [p for p in left if memory.format_of(p) == "32bit" and not _has_codes(optimizer, p)]
    for together in bounded(plain):
        step_together(step, optimizer, group, together)
    return [p for p in left if p not in set(plain)]


def _has_codes(optimizer: torch.optim.Optimizer, p: Tensor) -> bool:
    return any(not isinstance(value, Tensor) for value in optimizer.state.get(p, {}).values())


def _next(memory: QuantizedState, p: Tensor) -> Iterator[Tensor]:
    """Yield the parameter that steps after `p`: backward goes from the last to the first."""
    number = memory.numbers.get(original(p), 0)
    goes_up = number == memory.last_number + 1 or (number == 0 and memory.last_number != 1)
    following, memory.last_number = number + (1 if goes_up else -1), number
    if 0 <= following < len(memory.order):
        yield memory.order[following]


@functools.cache
def _quantized_class(plain: Any) -> Any:
    class Coded(plain, metaclass=MadeClass):  # type: ignore[misc]  # a base known at run time
        made_by, made_from, memory_name = _quantized_class, plain, MEMORY

        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            memory = memory_of(self)
            step = bare_step(memory.plain_class)
            one = functools.partial(_step_one, step, self)
            return step_each(self, closure, one, several=functools.partial(_step_several, step, self))

        def step_fused(
            self, group: dict[str, Any], parameters: list[Tensor], short: Mapping[Tensor, ShortWeights]
        ) -> list[Tensor]:
            """Step those of `parameters` that a kernel knows; return the others. See `StepsFused`."""
            return parameters if PENDING in vars(self) else step_fused(self, memory_of(self), group, parameters, short)

        def state_dict(self) -> dict[str, Any]:
            return _to_disk(self, super().state_dict())

        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            moments = memory_of(self).moments
            names = {id(group): moments.in_group(number, group) for number, group in enumerate(self.param_groups)}
            known = _subspaces_of(memory_of(self))
            state_checks.check_state_dict(self, state_dict, lambda group: names[id(group)], known)
            super().load_state_dict({**state_dict, "state": {}, "param_groups": layout.groups_for(self, state_dict)})
            _from_disk(self, state_dict)

        def __getstate__(self) -> dict[str, Any]:
            memory = memory_of(self)
            own: dict[str, Any] = {MEMORY: replace(memory, numbers=dict(memory.numbers))}
            if PENDING in vars(self):
                own[PENDING] = vars(self)[PENDING]
            return {**super().__getstate__(), **own}

    Coded.__name__, Coded.__qualname__ = plain.__name__, f"{name_of(plain)}Coded"
    return Coded


def _to_disk(optimizer: torch.optim.Optimizer, found: dict[str, Any]) -> dict[str, Any]:
    """Return torch's own state dict with moments as checkpoints have them, one after the other."""
    memory = memory_of(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Any]] = {}
    exact: dict[int, dict[str, Any]] = {}
    for number, values in sorted(found["state"].items()):  # however they have stepped
        whole = parameters[number]
        p = local_of(whole)
        write = functools.partial(layout.write, shape=p.shape, is_compact=memory.is_compact)
        written = {name: write(memory.codec_of(p, name), as_local(value)) for name, value in values.items()}
        in_place = {k: layout.as_strided_as(v, p) if isinstance(v, Tensor) else v for k, v in written.items()}
        state[number] = {name: as_sharded(value, whole) for name, value in in_place.items()}
        if not memory.is_compact and (means := layout.means_of(values)):
            exact[number] = means
    pending = vars(optimizer).get(PENDING, {})
    if any(map(is_sharded, pending)):
        raise RuntimeError(
            "A checkpoint of sharded parameters between a backward and `optimizer.step()`: distributed checkpoints "
            'leave out the gradients that wait in the moments (`gradients="into-state"`). Save after the step.'
        )
    side = {
        "version": state_checks.VERSION,
        "num_steps": memory.num_steps,
        "means": exact,
        "pending": {memory.numbers[p]: tuple(each) for p, each in pending.items()},
    }
    return {**found, "state": state, state_checks.SIDE_KEY: side}


def _from_disk(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    memory, side = memory_of(optimizer), state_dict.get(state_checks.SIDE_KEY, {})
    betas = layout.second_betas(optimizer.param_groups)
    for number, whole in state_checks.numbered(optimizer, state_dict).items():
        if saved := state_dict["state"].get(number):
            p = local_of(whole)
            # What is encoded, or what whole microbatches go into, has more than the 16 bits that a weight may have.
            is_wide = memory.format_of(p) not in ("32bit", "offload") or PENDING in vars(optimizer)
            dtype = torch.promote_types(p.dtype, torch.float32) if is_wide else p.dtype
            means = side.get("means", {}).get(number, {})
            read = functools.partial(layout.read, p=p, means=means, dtype=dtype)
            plain = layout.plain_state(saved, whole.shape, betas.get(whole))
            state = {name: read(memory.codec_of(p, name), name, as_local(value)) for name, value in plain.items()}
            load_state(optimizer, whole, state)
            optimizer.state[whole] = state
    layout.move_counts(optimizer)
    memory.num_steps = side.get("num_steps", num_steps_in(optimizer))
    if PENDING in vars(optimizer):
        known = {number: p for p, number in memory.numbers.items()}
        found = side.get("pending", {}).items()
        vars(optimizer)[PENDING] = {p: accumulation.on_device(each, p) for p, each in ((known[n], e) for n, e in found)}
