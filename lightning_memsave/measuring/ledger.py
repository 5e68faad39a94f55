"""The ledger: the peak of live tensor bytes in one training step, and what those bytes were.

Method. A `TorchDispatchMode` sees the output of every operation below autograd. Each *storage* is booked once, with a
weak reference whose callback books its end, so a view costs nothing and a free is seen when it happens. What exists
before the step (parameters, buffers, gradients, optimizer state, the batch) is booked at the start. The peak is exact
for everything that is a tensor; what a kernel takes and gives back inside one operation is invisible here and belongs
to `measuring.profiler_peak`.

Categories come from lifetimes, not from guesses. A storage made while a graph is recorded and still alive when autograd
starts to run is an activation; this holds for every backward of the step, and for the recomputed forward of a
checkpoint region (inside backward, gradient mode on) as well. Parameters, gradients and optimizer state are known by
identity, at the latest when the step ends. The rest is temporary.

Cost: some tens of microseconds for each operation, so callers measure some steps, not all (`measuring.meter`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lightning_memsave.core.report import CATEGORIES, Timeline
from lightning_memsave.measuring.gradient_sums import replaces_first
from lightning_memsave.measuring.source_lines import Line, Survivor, line_text, user_line
from lightning_memsave.measuring.storage_resizing import resizes_seen
from lightning_memsave.measuring.storages import storages, tensors_in
from lightning_memsave.measuring.timeline import timeline
from lightning_memsave.torch_internals.autograd_graph import WeakStorage, autograd_is_running, running_node
from lightning_memsave.torch_internals.dispatch_mode import DispatchMode, count_edits_of_lists
from lightning_memsave.torch_internals.fake_tensors import ASKS_DEVICE, device_of, is_fake
from lightning_memsave.torch_internals.held_optimizers import with_held

if TYPE_CHECKING:
    from typing_extensions import Self  # in `typing` from Python 3.11 on


class LedgerEntry:
    """One storage, from the moment it is booked."""

    __slots__ = ("category", "made", "node", "num_bytes", "place", "reference", "reserved")

    def __init__(self, num_bytes: int, category: str | None, reserved: bool = False) -> None:
        self.num_bytes, self.category = num_bytes, category
        self.reserved = reserved  # its bytes are part of a reservation and are not counted again
        self.reference: weakref.ref[torch.UntypedStorage] | None = None
        self.made: tuple[torch.Size, torch.dtype, Line | None] | None = None  # in this step: as what, and where
        self.place = ""  # the module, where a subclass tells it
        self.node = running_node()  # that made it, inside of backward


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The peak of one step.

    `by_category` has every name of `CATEGORIES` and adds up to `peak_bytes`; `held_bytes` were alive when it began.
    """

    peak_bytes: int
    by_category: dict[str, int] = field(default_factory=dict)
    held_bytes: int = 0
    timeline: Timeline | None = field(default=None, compare=False)
    by_line: dict[str, int] = field(default_factory=dict, compare=False)
    """What of the peak was made in the step, by the line of code that made it."""
    survivors: tuple[Survivor, ...] = field(default=(), compare=False)
    """What the step made and left alive: neither weights nor gradients nor optimizer state."""


class Ledger(DispatchMode):
    """Books every tensor storage on `device` while it is entered; `measurement` holds the result afterwards.

    Args:
        device: where.
        fake: count fake tensors, which have storages of the same sizes without memory; for the device that they name.

    Example:
        >>> model, x = nn.Linear(4, 4, bias=False), torch.zeros(2, 4)
        >>> with Ledger().watching(model, batch=x) as ledger:
        ...     y = model(x)
        >>> ledger.measurement.peak_bytes == 4 * 4 * 4 + 2 * 4 * 4 + 2 * 4 * 4  # weight, input, output
        True
    """

    supports_higher_order_operators = True  # each is one operation

    def __init__(self, device: torch.device | str = "cpu", *, fake: bool = False) -> None:
        super().__init__()
        self._device_type, self._fake = torch.device(device).type, fake
        self._live: dict[int, LedgerEntry] = {}  # keyed by the address of the storage, removed when it dies
        self._at_start: list[tuple[int, LedgerEntry]] = []
        self._events: list[tuple[int, LedgerEntry]] = []  # (change in bytes, whose)
        self._recorded: list[LedgerEntry] = []  # made while a graph is recorded, not yet seen by a backward
        self._bytes = self._peak = self._peak_event = 0
        self._model: nn.Module | None = None
        self._optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self._hooks: list[Any] = []
        self._stance: Any = None
        self._resizes: Any = None
        self._ddp: list[nn.parallel.DistributedDataParallel] = []
        self._has_buckets = self._is_in_ddp = False
        self._gradients_are_buckets = False
        self._is_sharded = False
        self._edited: set[int] = set()  # addresses of storages
        self.measurement: Measurement | None = None

    # ------------------------------------------------------------------ what exists
    def hold(self, category: str, tensors: Iterable[object]) -> None:
        """Book tensors that exist already, or name the category of ones that are booked."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                for storage in storages(tensor):
                    if self._is_there(tensor, storage):
                        self._hold(storage, category)

    def _is_there(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        """Return whether a storage is on the device.

        A fake tensor's is nowhere, and the tensor says for which device.
        """
        return (device_of(tensor) if self._fake else storage.device).type == self._device_type

    def _hold(self, storage: torch.UntypedStorage, category: str) -> None:
        entry = self._live.get(storage._cdata)
        if entry is None:
            in_bucket = category == "gradients" and self._gradients_are_buckets
            entry = self._book(storage, category, reserved=in_bucket)
            self._was_there(entry)
        entry.category = category

    def booked(self) -> Iterator[torch.UntypedStorage]:
        """Yield the storages that are booked and alive now."""
        references = (entry.reference for entry in list(self._live.values()))
        return (found for reference in references if reference is not None and (found := reference()) is not None)

    @property
    def live_bytes(self) -> int:
        """What is booked and alive now."""
        return self._bytes

    def reserve(self, category: str, num_bytes: int) -> None:
        """Book bytes that no tensor in Python shows, for example DDP's buckets."""
        self._was_there(LedgerEntry(num_bytes, category))

    def _was_there(self, entry: LedgerEntry) -> None:
        if entry.reserved:
            return
        self._at_start.append((entry.num_bytes, entry))
        self._bytes += entry.num_bytes
        self._peak += entry.num_bytes  # it was alive at every earlier moment as well

    def _book(self, storage: torch.UntypedStorage, category: str | None, reserved: bool = False) -> LedgerEntry:
        address = storage._cdata
        entry = LedgerEntry(storage.nbytes(), category, reserved)

        def freed(_: object) -> None:
            self._live.pop(address, None)
            self._change(-entry.num_bytes, entry)

        entry.reference = weakref.ref(storage, freed)
        self._live[address] = entry
        return entry

    def _end(self, storage: torch.UntypedStorage, before: int | None = None) -> LedgerEntry | None:
        """End a storage that is still there; with `before`, only if another node made it."""
        entry = self._live.get(storage._cdata)
        if entry is not None and entry.node != before:
            entry.reference = None  # with its callback
            del self._live[storage._cdata]
            self._change(-entry.num_bytes, entry)
        return entry

    def _change(self, num_bytes: int, entry: LedgerEntry) -> None:
        if entry.reserved:
            return
        self._events.append((num_bytes, entry))
        self._bytes += num_bytes
        if self._bytes > self._peak:
            self._peak, self._peak_event = self._bytes, len(self._events)

    def has_edited(self, address: int) -> bool:
        """Return whether an operation has edited a storage, given by its address, since `forget_edits`."""
        return address in self._edited

    def forget_edits(self) -> None:
        """Take everything as not edited from here on."""
        self._edited.clear()

    # ------------------------------------------------------------------ what happens
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return device_of(args[0])
        kwargs = kwargs or {}
        if replaces_first(func, args):
            self._end(args[0].untyped_storage(), before=running_node())
        out = func(*args, **kwargs)
        recorded = torch.is_grad_enabled() or not autograd_is_running()
        if not recorded:
            self._backward_begins()
        if type(out) is Tensor and out.layout is torch.strided:
            storage = out.untyped_storage()
            if args and out is args[0]:
                self._edited.add(storage._cdata)
            self._see(out, storage, recorded, (args, kwargs))
        elif out is None:
            edited = count_edits_of_lists(func, args)
            self._edited.update(tensor.untyped_storage()._cdata for tensor in edited)
        else:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    for storage in storages(leaf):
                        self._see(leaf, storage, recorded, (args, kwargs))
        return out

    def _see(self, tensor: Tensor, storage: torch.UntypedStorage, recorded: bool, inputs: Any) -> None:
        if not self._is_there(tensor, storage):
            return
        entry = self._live.get(storage._cdata)
        if entry is not None:
            grown = storage.nbytes() - entry.num_bytes
            if grown:  # resize_ keeps the storage
                entry.num_bytes += grown
                self._change(grown, entry)
        elif self._is_in_ddp and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(inputs)):
            self._book(storage, "gradients", reserved=True)  # in the second step buckets are ordered anew
        elif self._came_in(storage, inputs):
            if self._has_buckets and autograd_is_running():
                self._was_there(self._book(storage, "gradients", reserved=True))
            elif self._is_sharded and autograd_is_running():  # gloo works on copies, which no operation returns
                entry = self._book(storage, "temporary")
                self._change(entry.num_bytes, entry)
            else:
                self._was_there(self._book(storage, "data"))
        else:
            entry = self._book(storage, None)
            shape = torch.Size() if tensor.is_nested else tensor.shape
            entry.made = (shape, tensor.dtype, user_line(3) if recorded else None)
            if recorded:
                self._recorded.append(entry)
            self._change(entry.num_bytes, entry)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Book a storage that was resized. FSDP2 keeps gathered parameters without memory."""
        if storage.device.type != ("meta" if self._fake else self._device_type):
            return
        entry = self._end(storage)
        again = self._book(storage, entry.category if entry is not None else "weights" if self._is_sharded else None)
        again.made = None if entry is None else entry.made
        self._recorded.append(again)
        self._change(again.num_bytes, again)

    def _came_in(self, storage: torch.UntypedStorage, inputs: Any) -> bool:
        """Return whether an operation returned memory that it was given.

        A view or an update of a tensor not booked yet.
        """
        address = storage._cdata
        given: list[Any] = [a for a in tree_leaves(inputs) if isinstance(a, Tensor)]
        # Real numbers that became a fake tensor are the same memory, too.
        became = self._fake and any(
            not is_fake(a) and not is_traceable_wrapper_subclass(a) and a.nbytes == storage.nbytes() for a in given
        )
        return became or any(s._cdata == address for a in given for s in storages(a))

    def _backward_begins(self) -> None:
        if self._recorded:
            for entry in self._recorded:
                if entry.category is None and entry.reference is not None and entry.reference() is not None:
                    entry.category = "activations"
            self._recorded.clear()

    # ------------------------------------------------------------------ a step
    def watching(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), batch: object = ()) -> Self:
        """Book what a step starts with; use the result as a context manager."""
        self._model, self._optimizers = model, tuple(with_held(optimizers))
        self.hold("weights", model.parameters())
        self.hold("weights", (t for p in model.parameters() for t in tensors_in(vars(p))))  # scales of a quantised one
        self.hold("weights", model.buffers())
        self._is_sharded = any(is_traceable_wrapper_subclass(p) for p in model.parameters())
        self._ddp = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)]
        for ddp in self._ddp:
            self._hold_buckets(ddp)
        self.hold("gradients", (p.grad for p in model.parameters()))
        self._hold_optimizer_state()
        self.hold("data", (t for t in tensors_in(batch) if not isinstance(t, nn.Parameter)))
        return self

    def _hold_optimizer_state(self) -> None:
        for optimizer in self._optimizers:
            self.hold("optimizer_state", (t for state in optimizer.state.values() for t in tree_leaves(state)))

    def _hold_buckets(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        """Book the buckets into which DDP flattens gradients: a copy of every gradient, which no operation returns."""
        self.reserve("gradients", sum(p.numel() * p.element_size() for p in ddp.parameters() if p.requires_grad))
        self._has_buckets = True
        self._gradients_are_buckets = ddp.gradient_as_bucket_view

    def _name_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.hold("gradients", [parameter.grad])

    def __enter__(self) -> Self:
        # A compiled region that is called under a dispatch mode stays eager for the rest of the run; in this stance it
        # runs eagerly now and compiled afterwards.
        self._stance = torch.compiler.set_stance("force_eager")
        if self._model is not None:
            self._hooks = [
                p.register_post_accumulate_grad_hook(self._name_gradient)
                for p in self._model.parameters()
                if p.requires_grad and p.is_leaf
            ]
        for ddp in self._ddp:  # from its own forward to that of what it wraps
            self._hooks += [
                ddp.register_forward_pre_hook(lambda *_: setattr(self, "_is_in_ddp", True)),
                ddp.module.register_forward_pre_hook(lambda *_: setattr(self, "_is_in_ddp", False), prepend=True),
            ]
        self._resizes = resizes_seen(self._resized)
        self._resizes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._resizes.__exit__(None, None, None)
        self._stance.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()
        self._hold_optimizer_state()
        split, by_line = self._split_at_peak()
        self.measurement = Measurement(
            peak_bytes=self._peak,
            by_category=split,
            by_line=by_line,
            survivors=tuple(self._survivors()),
            held_bytes=sum(num_bytes for num_bytes, _ in self._at_start),  # met in the step or before it
            timeline=timeline(_named(self._at_start), list(_named(self._events))),
        )
        # Weak callbacks of storages that live on must not keep this ledger or fire into it.
        for entry in list(self._live.values()):  # the collector may end some meanwhile
            entry.reference = None  # it holds the callback, which holds the entry
        self._live.clear()
        self._at_start.clear()
        self._events.clear()
        self._recorded.clear()
        self._hooks, self._model, self._optimizers, self._ddp = [], None, (), []

    def _alive_at_peak(self) -> Counter[LedgerEntry]:
        """Return the bytes of each storage at the peak."""
        alive: Counter[LedgerEntry] = Counter()
        for num_bytes, entry in (*self._at_start, *self._events[: self._peak_event]):
            alive[entry] += num_bytes
        return alive

    def _split_at_peak(self) -> tuple[dict[str, int], dict[str, int]]:
        split: Counter[str] = Counter(dict.fromkeys(CATEGORIES, 0))
        by_line: Counter[Line | None] = Counter()
        for entry, num_bytes in self._alive_at_peak().items():
            split[entry.category or "temporary"] += num_bytes
            if entry.made is not None:
                by_line[entry.made[2]] += num_bytes
        assert sum(split.values()) == self._peak, "the categories must add up to the peak"
        return dict(split), {line_text(line): num_bytes for line, num_bytes in by_line.most_common() if num_bytes}

    def _survivors(self) -> Iterator[Survivor]:
        kept_anyway = ("weights", "gradients", "optimizer_state")
        for entry in list(self._live.values()):
            storage = None if entry.reference is None else entry.reference()
            if storage is not None and entry.made is not None and entry.category not in kept_anyway:
                shape, dtype, line = entry.made
                where, held = line_text(line), WeakStorage(storage)
                yield Survivor(num_bytes=entry.num_bytes, shape=shape, dtype=dtype, line=where, storage=held)


def _named(changes: Iterable[tuple[int, LedgerEntry]]) -> Iterator[tuple[int, str]]:
    return ((num_bytes, entry.category or "temporary") for num_bytes, entry in changes)
