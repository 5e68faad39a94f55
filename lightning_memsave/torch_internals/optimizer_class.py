"""Optimizers that change their class, and an optimizer's own step taken for one parameter, or a part of it, at a time.

Attributes that torch sets and reads privately stand here alone: `step.hooked`, `_opt_called`, `_wrapped_by_lr_sched`
and `_step_supports_amp_scaling`. Without one of them, a warning of torch's may be missing or too many.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_memsave.torch_internals.fake_tensors import is_fake, standing_for
from lightning_memsave.torch_internals.group_changes import changes_once, note_changes
from lightning_memsave.torch_internals.sharded_parameters import (
    as_local,
    as_sharded,
    is_sharded,
    local_gradient,
    shard_number,
)


class MadeClass(type):
    """The kind of classes that are made at run time from a plain one: pickled as how they are made.

    Such a class has three attributes: `made_by`, a function of a module; `made_from`, what it was given; and
    `memory_name`, the attribute in which its instances remember what is theirs. Its `__name__` is the plain one's, by
    which Lightning's `LearningRateMonitor` names what it logs; `__qualname__` says what it has become.
    """

    made_by: Callable[[Any], type]
    made_from: Any
    memory_name: str


def name_of(cls: type) -> str:
    """Return the name of a class of optimizers.

    Of one that was made at run time, what it has become (`"AdamWCoded"`).
    """
    return cls.__qualname__ if isinstance(cls, MadeClass) else cls.__name__


def _make(function: Callable[[Any], Any], plain: Any) -> Any:
    return function(plain)


copyreg.pickle(MadeClass, lambda cls: (_make, (cls.made_by, cls.made_from)))


def change_class(optimizer: torch.optim.Optimizer, new: type[torch.optim.Optimizer]) -> None:
    """Let `optimizer` be of another class, so that every reference to it (schedulers, the trainer) stays good."""
    optimizer.__class__ = new
    counted = vars(optimizer).pop("step", None)
    optimizer._patch_step_function()  # torch profiles `step` per class
    if counted is not None:
        _count_steps_for_schedulers(optimizer)


SCALES_ITSELF = "_step_supports_amp_scaling"
"""An optimizer's attribute under `fused=True`: a GradScaler leaves gradients scaled, as such a step divides them."""


def is_latest(optimizer: torch.optim.Optimizer, memory: str) -> bool:
    """Return whether the change to which the attribute `memory` belongs is the latest one of this optimizer's class."""
    return bool(getattr(type(optimizer), "memory_name", None) == memory)


def check_latest(optimizer: torch.optim.Optimizer, memory: str) -> None:
    """Refuse to undo a change of class beneath another one.

    Raises:
        RuntimeError: another change came later and is still there.
    """
    if not is_latest(optimizer, memory):
        raise RuntimeError(
            f"{name_of(type(optimizer))} was changed again after what is being undone. Undo the latest change first."
        )


def _count_steps_for_schedulers(optimizer: torch.optim.Optimizer) -> None:
    """Mark each call of `step`, as a torch LR scheduler does to warn when it is stepped too early.

    The scheduler's own wrapper is bound to the class that was.
    """
    method = type(optimizer).step
    reference = weakref.ref(optimizer)  # an optimizer in a cycle would keep its state until the collector runs

    @functools.wraps(method)
    def step(*args: Any, **kwargs: Any) -> Any:
        self: Any = reference()
        self._opt_called = True
        return method(self, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # read by torch's schedulers
    optimizer.step = step  # type: ignore[method-assign]  # as torch's schedulers do


def bare_step(cls: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """Return the `step` of a class without torch's wrapper, which runs the hooks that belong to a whole step."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


PENDING = "_memsave_pending"
"""An optimizer's attribute: the parameters whose gradients are in its state already, and that have yet to move."""


@dataclass(kw_only=True)
class Counts:
    """What an optimizer that was changed remembers; each layer of changes has one among its attributes."""

    num_steps: int = 0
    """Whole steps: noise is made from it."""

    def unit(self, p: Tensor) -> int:
        """Return how many elements of `p`, one after the other, must step together; all of them: it is not cut."""
        return 1


def num_steps_in(optimizer: torch.optim.Optimizer) -> int:
    """Return the largest count of steps in an optimizer's state; 0 where it has none, as SGD's and Lion's.

    Checkpoints under FSDP2 leave out all other counts.
    """
    return max((int(state["step"]) for state in optimizer.state.values() if "step" in state), default=0)


IN_BACKWARD = "_memsave_in_backward"
"""An optimizer's attribute, true while gradients end in backward: nobody can look at all of them."""


@torch.no_grad()
def step_each(
    optimizer: torch.optim.Optimizer,
    closure: Callable[[], Any] | None,
    one: Callable[[dict[str, Any], Tensor], object],
    is_ready: Callable[[], bool] = lambda: True,
    several: Callable[[dict[str, Any], list[Tensor]], list[Tensor]] = lambda _, parameters: parameters,
) -> Any:
    """Step the parameters of an optimizer one at a time: call `one(group, p)` for each that is due.

    Args:
        optimizer: whose parameters.
        closure: called first, with gradients.
        one: steps one parameter.
        is_ready: asked before the first parameter; when it says no, none is stepped.
        several: is given the parameters of a group that are due and not cut, steps those that it can step together,
            and returns the others.

    Returns:
        What `closure` does.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    if not is_ready():
        return loss
    groups, pending = optimizer.param_groups, vars(optimizer).get(PENDING, {})
    with changes_once(optimizer):
        for group in groups:
            _step_group(optimizer, group, pending, one, several)
    if not isinstance(groups, OneParameter):  # else this is an inner layer's part of a step
        for counts in [each for each in vars(optimizer).values() if isinstance(each, Counts)]:
            counts.num_steps += 1
    return loss


def _step_group(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    pending: dict[Tensor, Any],
    one: Callable[[dict[str, Any], Tensor], object],
    several: Callable[[dict[str, Any], list[Tensor]], list[Tensor]],
) -> None:
    due = [p for p in group["params"] if p.grad is not None or original(p) in pending]
    small = [] if pending else [p for p in due if not is_sharded(p) and p.numel() <= _part_numel(optimizer, p)]
    stepped = set(small).difference(several(group, small)) if small else set()
    for p in due:
        if p not in stepped:
            with local_shard(optimizer, p) as local:
                for part in in_parts(optimizer, local):
                    one(group, part)
            if pending:
                pending.pop(p, None)


class OneParameter(list[dict[str, Any]]):
    """The parameter groups of an optimizer while it steps a single parameter."""


def step_one(
    step: Callable[[torch.optim.Optimizer], Any], optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor
) -> None:
    """Take `step` for `p` of `group` alone.

    Raises:
        ValueError: the optimizer counts or adapts something in its groups, which would happen once per parameter.
    """
    step_together(step, optimizer, group, [p])


def step_together(
    step: Callable[[torch.optim.Optimizer], Any],
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    parameters: list[Tensor],
) -> None:
    """Take `step` for some parameters of `group`.

    Raises:
        ValueError: the optimizer counts or adapts something in its groups, which would happen once per call.
    """
    groups, alone = optimizer.param_groups, {**group, "params": parameters}
    optimizer.param_groups = OneParameter([alone])
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = groups
    note_changes(optimizer, group, alone)


def bounded(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters whose steps, together, allocate no more than that of one part."""
    together: list[Tensor] = []
    for p in parameters:
        if together and sum(each.numel() for each in together) + p.numel() > PART_NUMEL["cpu"]:
            yield together
            together = []
        together.append(p)
    if together:
        yield together


@runtime_checkable
class StepsFused(Protocol):
    """An optimizer with a kernel that steps many parameters at once, also bfloat16 ones."""

    def step_fused(self, group: dict[str, Any], parameters: list[Tensor], short: Mapping[Tensor, Any]) -> list[Tensor]:
        """Step those of `parameters` that the kernel knows; return the others.

        `short` says how each of them is written (`ShortWeights`).
        """


def stand_in(p: Tensor, values: Tensor) -> nn.Parameter:
    """Return a parameter with other values that an optimizer steps in place of `p`.

    `p.data` itself must not change its dtype for a step: torch would drop the node that accumulates its gradient, and
    with it DDP's hooks.
    """
    parameter: Any = nn.Parameter(values)
    parameter.stands_for, parameter.span, parameter.shard = original(p), span_of(p), shard_of(p)
    if undivided(p) is not p:
        parameter.part_of = undivided(p)
    return parameter  # type: ignore[no-any-return]  # attributes of our own


def original(p: Tensor) -> Tensor:
    """Return the parameter that `p` stands in for; `p` itself if it is none."""
    return getattr(p, "stands_for", p)


def undivided(p: Tensor) -> Tensor:
    """Return the tensor of which `p` is a part: a parameter, or the local shard of one; `p` itself if it is none."""
    return getattr(p, "part_of", p)


# ------------------------------------------------------------------------------- sharded parameters
def local_of(p: Tensor) -> Tensor:
    """Return `p`; of a sharded parameter, a stand-in for the local shard, which shares its memory."""
    if not is_sharded(p):
        return p
    local = stand_in(p, as_local(p))
    local.shard = shard_number(p)  # type: ignore[attr-defined]  # read by `shard_of`
    return local


def shard_of(p: Tensor) -> int:
    """Return the number of the shard that `p` stands for, or is a part of; 0 for what is whole."""
    return getattr(p, "shard", 0)


@contextlib.contextmanager
def local_shard(optimizer: torch.optim.Optimizer, p: Tensor) -> Iterator[Tensor]:
    """Yield `p`; of a sharded parameter, a stand-in for the local shard, with its gradient and state."""
    local = local_of(p)
    if local is p:
        yield p
        return
    if (gradient := local_gradient(p)) is not None:
        local.grad_dtype = gradient.dtype
        local.grad = gradient
    with state_moved(optimizer, p, local):
        if local in optimizer.state:
            optimizer.state[local] = {name: as_local(value) for name, value in optimizer.state[local].items()}
        try:
            yield local
        finally:
            if local in optimizer.state:
                optimizer.state[local] = {name: as_sharded(each, p) for name, each in optimizer.state[local].items()}


# ------------------------------------------------------------------------------- large parameters, part by part
ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Lion", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
PART_NUMEL = {"cpu": 2**20}
"""Elements that step at a time, by type of device: bounds what a step allocates besides."""
_PART_NUMEL_ELSEWHERE = 2**24  # launching kernels takes longer there, and memory is faster
_FINER_IN_BACKWARD = 4
"""How much smaller parts are where gradients go into the state: activations are still there then."""


@runtime_checkable
class Divisible(Protocol):
    """What is kept of the elements of a parameter, in a form that can be cut."""

    def part(self, span: slice, num_elements: int) -> Divisible:
        """Return what belongs to the elements `span` of all."""

    def made_for(self, num_elements: int) -> Divisible:
        """Return one like this, for more elements and not filled yet."""

    def joined(self, part: Divisible, span: slice, num_elements: int) -> Divisible:
        """Return this with `part` as what belongs to `span`.

        Parts come in order. In place, except what `part` still reads.
        """


def span_of(p: Tensor) -> slice:
    """Return which elements of its original `p` stands for."""
    return getattr(p, "span", slice(None))


def in_parts(optimizer: torch.optim.Optimizer, p: Tensor) -> Iterator[Tensor]:
    """Return `p`; or where it is large, stand-ins for one part after the other, with their gradient and state.

    Steps that treat each element, or each row, by itself need their float32 copies of one part at a time. Parts of
    whole rows are in the shape of the parameter, others flat. What is new belongs to the parameter when all have
    stepped: where a part fails, a first state is none, and means are what they were.
    """
    size = _part_numel(optimizer, p)
    if p.numel() <= size:
        yield p
        return
    shape = (-1, *p.shape[1:]) if size % p.shape[1:].numel() == 0 else (-1,)
    with torch._C.DisableTorchFunctionSubclass():  # the memory of a parameter that decodes itself
        flat, gradient = p.detach().view(-1), None if p.grad is None else p.grad.view(-1)
    at_first = dict(optimizer.state.get(p, {}))
    latest = dict(at_first)
    for span, num_alike in _spans(optimizer, p, size):
        with standing_for(num_alike):
            part = stand_in(p, flat[span].view(shape))
            part.span = span  # type: ignore[attr-defined]  # read by `span_of`
            part.part_of = p  # type: ignore[attr-defined]  # read by `undivided`
            if gradient is not None:
                part.grad_dtype = gradient.dtype
                part.grad = gradient[span].view(shape)
            before = {name: _cut(value, part, p) for name, value in at_first.items()}
            if before:
                optimizer.state[part] = before.copy()
            try:
                yield part
            finally:  # also where its step has failed: nothing else knows what stands in
                after = optimizer.state.pop(part, {})
            for name, value in after.items():
                latest[name] = _joined(latest.get(name), value, part, p)
    if latest:  # SGD without momentum keeps nothing
        optimizer.state[p].update(latest)
    for name in at_first.keys() - after.keys():
        del optimizer.state[p][name]


def _spans(optimizer: torch.optim.Optimizer, p: Tensor, size: int) -> list[tuple[slice, int]]:
    """Return the elements of each part, and how many parts it stands for.

    That is one, but where a parameter has a shape and no values: all parts between the first and the last take the
    same. Not where gradients go into the state, of which something is kept for each part.
    """
    spans = [slice(start, min(start + size, p.numel())) for start in range(0, p.numel(), size)]
    if not is_fake(p) or len(spans) <= 3 or PENDING in vars(optimizer):
        return [(span, 1) for span in spans]
    return [(spans[0], 1), (spans[1], len(spans) - 2), (spans[-1], 1)]


def _part_numel(optimizer: torch.optim.Optimizer, p: Tensor) -> int:
    """Return elements of `p` that step at a time: all of them where it is not cut."""
    size = PART_NUMEL.get(p.device.type, _PART_NUMEL_ELSEWHERE)
    wanted = size // _FINER_IN_BACKWARD if PENDING in vars(optimizer) else size
    if p.numel() <= wanted or not _may_cut(optimizer, p):
        return p.numel()
    unit = math.lcm(*(each.unit(p) for each in vars(optimizer).values() if isinstance(each, Counts)))
    return max(wanted // unit, 1) * unit if unit <= size else p.numel()


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it is known that an optimizer steps each element by itself."""
    plain: Any = type(optimizer)
    while isinstance(plain, MadeClass):
        plain = plain.made_from
    is_cautious = any(group.get("caution") for group in optimizer.param_groups)  # by a mean over a whole tensor
    return getattr(plain, "__name__", "") in ELEMENTWISE and not is_cautious


def _may_cut(optimizer: torch.optim.Optimizer, p: Tensor) -> bool:
    return (
        is_elementwise(optimizer)
        and span_of(p) == slice(None)
        and not hasattr(p, "__tensor_flatten__")  # a subclass, such as DTensor
        and p.is_contiguous()
        and (p.grad is None or (p.grad.layout is torch.strided and p.grad.is_contiguous()))
    )


def _cut(value: Any, part: Tensor, p: Tensor) -> Any:
    if isinstance(value, Divisible):
        return value.part(span_of(part), p.numel())
    if isinstance(value, Tensor):  # of another shape: a count, which every part raises
        return value.view(-1)[span_of(part)].view(part.shape) if value.shape == p.shape else value.clone()
    return value


def _joined(whole: Any, value: Any, part: Tensor, p: Tensor) -> Any:
    """Return what is kept of all of `p`, with the new `value` of a part of it."""
    if isinstance(value, Divisible):
        whole = whole if isinstance(whole, Divisible) else value.made_for(p.numel())
        return whole.joined(value, span_of(part), p.numel())
    is_of_elements = isinstance(value, Tensor) and value.shape == part.shape
    if not is_of_elements or (isinstance(whole, Tensor) and whole.shape != p.shape):
        return value
    if whole is None or whole.dtype != value.dtype:
        whole = value.new_empty(p.shape)
    put(value, whole.view(-1)[span_of(part)].view(part.shape))
    return whole


def put(value: Tensor, place: Tensor) -> None:
    """Copy `value` to `place`, unless it is there already."""
    if not value.is_set_to(place):
        place.copy_(value)


@contextlib.contextmanager
def state_moved(optimizer: torch.optim.Optimizer, p: Tensor, other: Tensor) -> Iterator[None]:
    """Give `other` the state of `p` while entered."""
    state = optimizer.state
    if p in state:
        state[other] = state.pop(p)
    try:
        yield
    finally:
        if other in state:
            state[p] = state.pop(other)
