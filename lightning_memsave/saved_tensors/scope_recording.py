"""Recordings: what one scope decided is applied again while a later scope does the same.

Most steps do what the step before did. To decide for each tensor who keeps it, what its consumers need and whether it
can be computed again takes as long as some kernels of a small model. So a scope whose first call has been seen before
is recorded: each call of a function, each tensor that is kept, and when it is coded. Later scopes replay the recording.

*What must agree.* A recording is replayed only while everything that a decision was made from is the same. Of each
call: the function, its numbers, strings and flags, and which node of the graph made each tensor that it is given. Of
each tensor that is kept: its class, shape, strides, dtype, device, version and the size of its storage, the node that
made it, the call that keeps it, the codec of the module around, and whether it shares a storage with one that was kept
before. What follows from values is decided anew: whether a code can hold them, whether a normalisation would multiply
its noise, whether there are only two of them. A recomputation is read off the graph of its own step. Calls that change
tensors unseen, hook gradients, or are answered by the store run as without a recording.

*Where a scope does something else*, the store goes on deciding from there, with all that it has kept so far, and the
next such scope is recorded anew. A first call whose recordings are left three times in a row is recorded no more.

A storage is coded at the same moment and with the same noise either way, so results are equal to the bit.
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

_MOST_RECORDINGS = 256
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
class RecordedCall:
    """One call of a function."""

    func: Any
    marks: tuple[Any, ...]
    is_watched: bool
    """Whether it leaves notes for the store, so that it runs as without a recording."""


@dataclass(slots=True)
class RecordedTensor:
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
class Recording:
    """Everything that one scope did."""

    calls: list[RecordedCall] = field(default_factory=list)
    tensors: list[RecordedTensor] = field(default_factory=list)
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


class Recorder:
    """Writes down what a scope does."""

    def __init__(self) -> None:
        self.running, self.call = OUTSIDE, None
        """Number of the call that is running."""
        self.recording, self._marks = Recording(), _Marks()
        self._numbers: weakref.WeakKeyDictionary[SavedStorage, int] = weakref.WeakKeyDictionary()
        self._num_storages = 0
        self._next = RecordedTensor((), OUTSIDE)
        self._codes: list[int] = []
        self._sources: set[int] = set()

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RecordedCall:
        """Note a call that begins."""
        recorded = RecordedCall(func, self._marks.of_call(args, kwargs), is_watched=False)
        self.running = len(self.recording.calls)
        self.recording.calls.append(recorded)
        return recorded

    def take_back(self) -> None:
        """Note that the storage of the tensor that is being kept is to be coded anew."""
        self._next.is_taken_back = True

    def act(self, act: Act, sources: Iterable[SavedStorage] = ()) -> None:
        """Note what is done at once with the tensor that is being kept, with the help of what is kept of `sources`."""
        self._next.act = act
        self._sources |= {self._numbers[source] for source in sources if source in self._numbers}
        if act is not Act.RECOMPUTE and self.running != OUTSIDE:
            self.recording.calls[self.running].is_watched = True

    def code(self, entry: SavedStorage) -> None:
        """Note that a storage is coded."""
        self._codes.append(self._numbers[entry])

    def keep(self, tensor: Tensor, kept: object, within: Fidelity | None, call_number: int) -> None:
        """Note a tensor that has been kept by the call with this number."""
        recorded, self._next = self._next, RecordedTensor((), OUTSIDE)
        recorded.call, recorded.codes, self._codes = self.running, self._codes, []
        self.recording.tensors.append(recorded)
        if not isinstance(kept, SavedTensor):
            recorded.traits = _seen_of(tensor)
            return
        entry = kept.entry
        if entry not in self._numbers:
            self._numbers[entry], recorded.is_first = self._num_storages, True
            self._num_storages += 1
        recorded.storage, recorded.traits = self._numbers[entry], self._marks.of_tensor(tensor, within)
        recorded.is_normalised = call_number in entry.normalised_by
        recorded.facts = tuple(getattr(entry, name) for name in _FACTS)

    def finish(self, entries: Iterable[SavedStorage], tally: Tally) -> None:
        """Complete the recording when the scope has ended."""
        recording = self.recording
        recording.last_codes, recording.tally = self._codes, tally
        recording.kinds = {self._numbers[entry]: entry.encoding.kind for entry in entries}
        for recorded in recording.tensors:
            recorded.is_source = recorded.storage in self._sources


def set_facts(entry: SavedStorage, facts: tuple[Any, ...]) -> None:
    """Note what the consumers of a storage need, as recorded."""
    entry.need, entry.interval, entry.derivative, entry.derivative_rank, entry.keeps_sign, *others = facts
    entry.is_guarded, entry.rows, entry.nonlinear, entry.num_uses, entry.is_coupled = others


class Replayer:
    """Replays a recording."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.running = OUTSIDE
        """Number of the call that is running."""
        self.call: tuple[Any, tuple[Any, ...], Mapping[str, Any]] | None = None
        """Function and arguments of the call that is running."""
        self._marks = _Marks()
        self._num_calls = self._num_tensors = 0
        self._storages: list[weakref.ref[SavedStorage]] = []
        self._handles: list[tuple[RecordedTensor, weakref.ref[SavedTensor]]] = []
        self._waiting: dict[int, None] = {}

    def begin(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RecordedCall | None:
        """Return what is recorded for the call that begins; `None` where another one is recorded."""
        number = self._num_calls
        if number >= len(self.recording.calls):
            return None
        recorded = self.recording.calls[number]
        if func is not recorded.func and func != recorded.func:  # a property's getter is another object each time
            return None
        if self._marks.of_call(args, kwargs) != recorded.marks:
            return None
        self._num_calls, self.running = number + 1, number
        return recorded

    def keep(self, tensor: Tensor, within: Fidelity | None) -> RecordedTensor | None:
        """Return what is recorded for a tensor that is to be kept; `None` where another one is recorded."""
        number = self._num_tensors
        if number >= len(self.recording.tensors) or is_inside_transform():
            return None
        recorded = self.recording.tensors[number]
        if recorded.call != self.running:
            return None
        try:
            traits = _seen_of(tensor) if recorded.storage is None else self._marks.of_tensor(tensor, within)
        except RuntimeError:  # it has no strides or no version, and is not the one that was recorded
            return None
        if traits != recorded.traits or not self._is_shared(recorded, tensor):
            return None
        self._num_tensors = number + 1
        return recorded

    def _is_shared(self, recorded: RecordedTensor, tensor: Tensor) -> bool:
        """Return whether a tensor lies in the storage of which others have been kept, as recorded."""
        if recorded.is_first or recorded.storage is None:
            return True
        entry = self.storage(recorded.storage)
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

    def add_handle(self, recorded: RecordedTensor, handle: SavedTensor) -> None:
        """Add what autograd holds of a tensor that was kept as recorded."""
        self._handles.append((recorded, weakref.ref(handle)))

    def handles(self) -> Iterator[tuple[Edge, SavedTensor]]:
        """Yield what autograd holds of results, by their edges."""
        for recorded, reference in self._handles:
            if (handle := reference()) is not None and (edge := self._marks.edge(recorded.traits)) is not None:
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

    def is_as_recorded(self) -> bool:
        """Return whether every storage has the encoding that the recording expects."""
        found = {number: entry.encoding.kind for number, r in enumerate(self._storages) if (entry := r()) is not None}
        return found == self.recording.kinds

    @property
    def is_complete(self) -> bool:
        """Whether everything that is recorded has been done."""
        return self._num_tensors == len(self.recording.tensors) and self._num_calls == len(self.recording.calls)


class Recordings:
    """The recordings of a store, by the call that a scope begins with."""

    def __init__(self) -> None:
        self._recordings: dict[Any, Recording] = {}
        self._num_strikes: dict[Any, int] = {}  # in a row, of each call that has been seen

    def follow(self, start: Any) -> Recorder | Replayer | None:
        """Return what to do in a scope that begins with this call: nothing, then record, then replay."""
        if (recording := self._recordings.get(start)) is not None:
            return Replayer(recording)
        num_strikes = self._num_strikes.setdefault(start, -1)
        if num_strikes < 0:
            self._num_strikes[start] = 0
            _forget_first(self._num_strikes, _MOST_STARTS)
            return None
        return Recorder() if num_strikes < _MOST_STRIKES else None

    def end(self, start: Any, follower: Recorder | Replayer | None) -> None:
        """Note how a scope ended that was recorded or replayed; `None`: it did something else."""
        if isinstance(follower, Recorder):
            self._recordings[start] = follower.recording
            _forget_first(self._recordings, _MOST_RECORDINGS)
        elif follower is None:
            self._recordings.pop(start, None)
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
