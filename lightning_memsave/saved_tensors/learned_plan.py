"""Learned plans: what one scope decided is applied again while a later scope does the same.

Most steps do what the step before did. To decide anew for each tensor who keeps it, what its consumers need and whether
it can be computed again takes 40 to 60 us, as long as several kernels of a small model. So a scope whose first call has
been seen before is written down: each call of a function, each tensor that is kept, and when it is coded. Later scopes
follow that plan.

*What must agree.* A plan is followed only while everything that a decision was made from is the same: of each call the
function, its numbers, strings and flags, and which node of the graph made each tensor that it is given; of each tensor
that is kept its class, shape, strides, dtype, device, version and the size of its storage, the node that made it, the
call that keeps it, the codec of the module around, and whether it shares a storage with one that was kept before. What
follows from values is decided anew: whether a code can hold them, whether a normalisation would multiply its noise,
whether there are only two of them. A recomputation is read off the graph of its own step, never off the plan. Calls
that change tensors unseen, hook gradients, or are answered by the store run as without a plan.

*Where a scope does something else*, the store goes on deciding from there, beside what it has kept so far, and learns
again. A plan that is left three times in a row is given up.

A storage is coded at the same moment and with the same noise with a plan and without, so results are equal to the bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memsave.saved_tensors.byte_tally import Tally
from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.saved_tensors.saved_storage import SavedStorage, SavedTensor
from lightning_memsave.torch_internals.autograd_graph import Edge, is_inside_transform, sequence_nr_of, storage_key

_MOST_PLANS = 256
_MOST_STARTS = 1024
_MOST_STRIKES = 3

OUTSIDE = -1
"""Number of the call that keeps a tensor while none is seen."""
_FACTS = (
    *("need", "interval", "derivative", "derivative_rank", "keeps_sign", "is_guarded", "rows"),
    *("nonlinear", "num_uses", "is_coupled"),
)
"""What the consumers of a storage need of it so far, by the names of `SavedStorage`."""


class Act(Enum):
    """What is done with a storage at once when a tensor of it is kept."""

    RECOMPUTE = "recomputed"
    FUSE = "fused with a normalisation"
    WINDOW = "kept as a position in a window"


@dataclass(slots=True)
class PlannedCall:
    """One call of a function."""

    func: Any
    marks: tuple[Any, ...]
    is_watched: bool
    """Whether it leaves notes for the store, so that it runs as without a plan."""


@dataclass(slots=True)
class PlannedTensor:
    """One tensor that is kept."""

    traits: tuple[Any, ...]
    call: int
    """Number of the call that keeps it, or `OUTSIDE`."""
    storage: int | None = None
    """Number of its storage; `None`: it is left alone."""
    is_first: bool = False
    """Whether nothing of that storage was kept before."""
    is_source: bool = False
    """Whether others are computed from that storage."""
    is_normalised: bool = False
    """Whether a normalisation with a mean keeps it."""
    facts: tuple[Any, ...] = ()
    """What is known of the storage then: its `_FACTS`."""
    is_taken_back: bool = False
    """Whether the storage was coded for less than is needed now."""
    act: Act | None = None
    codes: Sequence[int] = ()
    """Storages that are coded then."""


@dataclass(slots=True)
class Plan:
    """Everything that one scope did."""

    calls: list[PlannedCall] = field(default_factory=list)
    tensors: list[PlannedTensor] = field(default_factory=list)
    last_codes: Sequence[int] = ()
    """Storages that are coded at the end."""
    kinds: dict[int, str] = field(default_factory=dict)
    """Encoding in which each storage was left."""
    tally: Tally = field(default_factory=Tally)


class _Marks:
    """What is compared in one scope. Nodes are numbered from the first that is met."""

    def __init__(self) -> None:
        self._first: int | None = None

    def of(self, value: Any) -> Any:
        """Return what is compared of an argument: its value, or which node made it."""
        kind = type(value)
        if kind is Tensor or kind is _Parameter:
            node = value.grad_fn
            return (value.requires_grad,) if node is None else (self._number(node), value.output_nr)
        if kind in _PLAIN:
            return value
        if isinstance(value, Tensor):
            node = value.grad_fn
            return (kind, value.requires_grad) if node is None else (kind, self._number(node), value.output_nr)
        if isinstance(value, (int, float, complex, str)):  # NumPy's among them
            return kind, value
        if isinstance(value, (tuple, list)):
            return (kind, len(value), *map(self.of, value[:_MOST_ITEMS]))
        if isinstance(value, dict):
            return (kind, *value, *map(self.of, value.values()))
        if isinstance(value, slice):
            return (kind, *map(self.of, (value.start, value.stop, value.step)))
        return kind

    def of_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return what is compared of a call."""
        return (*map(self.of, args), self.of(kwargs)) if kwargs else tuple(map(self.of, args))

    def of_tensor(self, tensor: Tensor, within: Fidelity | None) -> tuple[Any, ...]:
        """Return what is compared of a tensor that is kept, inside modules for which a codec holds."""
        node = tensor.grad_fn
        return (
            type(tensor),
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),
            tensor.dtype,
            tensor.device,
            tensor.requires_grad,
            tensor._version,
            tensor.is_neg(),
            tensor.untyped_storage().nbytes(),
            within,
            type(node),
            None if node is None else (self._number(node), tensor.output_nr),
        )

    def edge(self, traits: tuple[Any, ...]) -> Edge | None:
        """Return the edge that a tensor with these traits leaves its node by."""
        if traits[-1] is None or self._first is None:
            return None
        number, output_nr = traits[-1]
        return Edge(self._first + number, output_nr)

    def _number(self, node: Any) -> int:
        number = sequence_nr_of(node)
        if self._first is None:
            self._first = number
        return number - self._first


_Parameter = nn.Parameter
_MOST_ITEMS = 256  # of a list, which may be data
_PLAIN = frozenset(
    (int, float, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
)


def _seen_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what is compared of a tensor that is left alone."""
    return type(tensor), None if tensor.is_nested else tensor.shape


class Learner:
    """Writes down what a scope does."""

    def __init__(self) -> None:
        self.running, self.call = OUTSIDE, None
        """Number of the call that is running."""
        self.plan, self._marks = Plan(), _Marks()
        self._numbers: weakref.WeakKeyDictionary[SavedStorage, int] = weakref.WeakKeyDictionary()
        self._num_storages = 0
        self._next = PlannedTensor((), OUTSIDE)
        self._codes: list[int] = []
        self._sources: set[int] = set()

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlannedCall:
        """Note a call that begins."""
        planned = PlannedCall(func, self._marks.of_call(args, kwargs), is_watched=False)
        self.running = len(self.plan.calls)
        self.plan.calls.append(planned)
        return planned

    def take_back(self) -> None:
        """Note that the storage of the tensor that is being kept is to be coded anew."""
        self._next.is_taken_back = True

    def act(self, act: Act, sources: Iterable[SavedStorage] = ()) -> None:
        """Note what is done at once with the tensor that is being kept, with the help of what is kept of `sources`."""
        self._next.act = act
        self._sources |= {self._numbers[source] for source in sources if source in self._numbers}
        if act is not Act.RECOMPUTE and self.running != OUTSIDE:
            self.plan.calls[self.running].is_watched = True

    def code(self, entry: SavedStorage) -> None:
        """Note that a storage is coded."""
        self._codes.append(self._numbers[entry])

    def keep(self, tensor: Tensor, kept: object, within: Fidelity | None, call_number: int) -> None:
        """Note a tensor that has been kept by the call with this number."""
        planned, self._next = self._next, PlannedTensor((), OUTSIDE)
        planned.call, planned.codes, self._codes = self.running, self._codes, []
        self.plan.tensors.append(planned)
        if not isinstance(kept, SavedTensor):
            planned.traits = _seen_of(tensor)
            return
        entry = kept.entry
        if entry not in self._numbers:
            self._numbers[entry], planned.is_first = self._num_storages, True
            self._num_storages += 1
        planned.storage, planned.traits = self._numbers[entry], self._marks.of_tensor(tensor, within)
        planned.is_normalised = call_number in entry.normalised_by
        planned.facts = tuple(getattr(entry, name) for name in _FACTS)

    def finish(self, entries: Iterable[SavedStorage], tally: Tally) -> None:
        """Complete the plan when the scope has ended."""
        plan = self.plan
        plan.last_codes, plan.tally = self._codes, tally
        plan.kinds = {self._numbers[entry]: entry.encoding.kind for entry in entries}
        for planned in plan.tensors:
            planned.is_source = planned.storage in self._sources


def set_facts(entry: SavedStorage, facts: tuple[Any, ...]) -> None:
    """Note what the consumers of a storage need, as planned."""
    entry.need, entry.interval, entry.derivative, entry.derivative_rank, entry.keeps_sign, *others = facts
    entry.is_guarded, entry.rows, entry.nonlinear, entry.num_uses, entry.is_coupled = others


class Replay:
    """Follows a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.running = OUTSIDE
        """Number of the call that is running."""
        self.call: tuple[Any, tuple[Any, ...], Mapping[str, Any]] | None = None
        """Function and arguments of the call that is running."""
        self._marks = _Marks()
        self._num_calls = self._num_tensors = 0
        self._storages: list[weakref.ref[SavedStorage]] = []
        self._handles: list[tuple[PlannedTensor, weakref.ref[SavedTensor]]] = []
        self._waiting: dict[int, None] = {}

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlannedCall | None:
        """Return what is planned for the call that begins; `None` where another one is planned."""
        number = self._num_calls
        if number >= len(self.plan.calls):
            return None
        planned = self.plan.calls[number]
        if func is not planned.func and func != planned.func:  # a property's getter is another object each time
            return None
        if self._marks.of_call(args, kwargs) != planned.marks:
            return None
        self._num_calls, self.running = number + 1, number
        return planned

    def keep(self, tensor: Tensor, within: Fidelity | None) -> PlannedTensor | None:
        """Return what is planned for a tensor that is to be kept; `None` where another one is planned."""
        number = self._num_tensors
        if number >= len(self.plan.tensors) or is_inside_transform():
            return None
        planned = self.plan.tensors[number]
        if planned.call != self.running:
            return None
        try:
            traits = _seen_of(tensor) if planned.storage is None else self._marks.of_tensor(tensor, within)
        except RuntimeError:  # it has no strides or no version, and is not the one that was planned
            return None
        if traits != planned.traits or not self._is_shared(planned, tensor):
            return None
        self._num_tensors = number + 1
        return planned

    def _is_shared(self, planned: PlannedTensor, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the storage of which others have been kept, as planned."""
        if planned.is_first or planned.storage is None:
            return True
        entry = self.storage(planned.storage)
        return (
            entry is not None
            and entry.storage_key == storage_key(tensor)
            and entry.is_unchanged
            and entry.original.is_alive  # else its address was given to another storage
        )

    def add(self, entry: SavedStorage) -> None:
        """Add the next storage, of which a tensor is kept for the first time."""
        self._waiting[len(self._storages)] = None
        self._storages.append(weakref.ref(entry))

    def add_handle(self, planned: PlannedTensor, handle: SavedTensor) -> None:
        """Add what autograd holds of a tensor that was kept as planned."""
        self._handles.append((planned, weakref.ref(handle)))

    def handles(self) -> Iterator[tuple[Edge, SavedTensor]]:
        """Yield what autograd holds of results, by their edges."""
        for planned, reference in self._handles:
            if (handle := reference()) is not None and (edge := self._marks.edge(planned.traits)) is not None:
                yield edge, handle

    def storage(self, number: int) -> SavedStorage | None:
        """Return a storage by its number; `None` when nobody keeps anything of it any more."""
        return self._storages[number]()

    def entries(self) -> list[SavedStorage]:
        """Return all storages of which something is kept."""
        return [entry for reference in self._storages if (entry := reference()) is not None]

    def code(self, number: int) -> SavedStorage | None:
        """Return a storage that is to be coded now; `None` when nobody keeps anything of it any more."""
        self._waiting.pop(number, None)
        return self.storage(number)

    def wait(self, number: int) -> None:
        """Note that a storage is to be coded later."""
        self._waiting[number] = None

    def waiting(self) -> list[SavedStorage]:
        """Return the storages that are yet to be coded."""
        return [entry for number in self._waiting if (entry := self._storages[number]()) is not None]

    def is_as_planned(self) -> bool:
        """Return whether every storage has the encoding that the plan expects."""
        found = {number: entry.encoding.kind for number, r in enumerate(self._storages) if (entry := r()) is not None}
        return found == self.plan.kinds

    @property
    def is_complete(self) -> bool:
        """Whether everything that is planned has been done."""
        return self._num_tensors == len(self.plan.tensors) and self._num_calls == len(self.plan.calls)


class Plans:
    """The plans of a store, by the call that a scope begins with."""

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}
        self._num_strikes: dict[Any, int] = {}  # in a row, of each call that has been seen

    def follow(self, start: Any) -> Learner | Replay | None:
        """Return what a scope is to do that begins with this call: learn the second time, and then follow the plan."""
        if (plan := self._plans.get(start)) is not None:
            return Replay(plan)
        num_strikes = self._num_strikes.setdefault(start, -1)
        if num_strikes < 0:
            self._num_strikes[start] = 0
            _forget_first(self._num_strikes, _MOST_STARTS)
            return None
        return Learner() if num_strikes < _MOST_STRIKES else None

    def end(self, start: Any, follower: Learner | Replay | None) -> None:
        """Note how a scope ended that was to learn or to follow a plan; `None`: it did something else."""
        if isinstance(follower, Learner):
            self._plans[start] = follower.plan
            _forget_first(self._plans, _MOST_PLANS)
        elif follower is None:
            self._plans.pop(start, None)
            self._num_strikes[start] = self._num_strikes.get(start, 0) + 1
        elif follower.is_complete:
            self._num_strikes[start] = 0


def _forget_first(known: dict[Any, Any], most: int) -> None:
    if len(known) > most:
        del known[next(iter(known))]


def start_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *settings: Any) -> Any:
    """Return what tells the scopes apart that begin with a call: the function, its arguments and their shapes."""
    shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and not value.is_nested]
    return func, _Marks().of_call(args, kwargs), tuple(shapes), settings
