"""The trace: every allocation, operation and module call of one training step, for whoever plans or predicts.

Bytes are booked as in the ledger: each storage once, with a weak reference whose callback books its end. Besides, the
trace says which operation made a storage, when forward last used it, whether it waits for backward, and between which
events each module ran. It works on fake tensors as well (`simulation.fake_model`), where a step takes neither time nor
memory.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memsave.core.selection import is_scripted, scripted_in
from lightning_memsave.measuring.gradient_sums import replaces_first
from lightning_memsave.measuring.operation_cost import cost_of, measure_again
from lightning_memsave.measuring.storages import storages, tensors_in
from lightning_memsave.saved_tensors.deferred_logits import DeferredLogits
from lightning_memsave.saved_tensors.module_state import Attributes
from lightning_memsave.torch_internals.autograd_graph import autograd_is_running, running_node, version_of
from lightning_memsave.torch_internals.dispatch_mode import DispatchMode
from lightning_memsave.torch_internals.fake_tensors import ASKS_DEVICE, device_of


@dataclass(slots=True)
class StorageRecord:
    """One storage."""

    num_bytes: int
    born: int
    """The event that books it; -1 for what existed before the step."""
    op: int
    """The operation that made it; -1 for what existed before."""
    died: int | None = None
    """The event that frees it; `None` when it is alive at the end."""
    last_forward_use: int = -1
    """How many events there were when forward used it last."""
    is_kept: bool = False
    """Whether it was made in forward and is alive when backward begins."""


@dataclass(slots=True)
class OpRecord:
    """One operation below autograd."""

    name: str
    event: int
    """How many events there were when it had run."""
    seconds: float
    """Modelled."""
    workspace_bytes: int
    """Modelled: what its kernel takes and gives back."""


@dataclass(slots=True)
class CallRecord:
    """One call of a module in forward. Ranges are half open."""

    name: str
    index: int
    parent: int | None
    first_event: int
    first_op: int
    inputs: tuple[int, ...]
    """Storages of the tensors among its arguments."""
    passed: frozenset[int]
    """Numbers among these whose tensors an earlier call returned, not views of them."""
    last_event: int = -1
    last_op: int = -1
    outputs: tuple[int, ...] = ()
    children: list[int] = field(default_factory=list)
    requires_grad: bool = False
    edits_input: bool = False
    """Whether it changed a tensor that it was given, or put one into an object that it was given (a cache of keys)."""
    side_effect: str | None = None
    """What it changed and a repetition would find changed, its own or of a module inside: mostly an attribute. Or that
    it made logits which nobody computes unless they are made in a region."""
    buffer_bytes: int = 0
    """Bytes of the buffers that it changed, its own or of modules inside."""
    backward_event: int | None = None
    """How many events there were when backward reached an output."""


@dataclass
class Trace:
    """One step."""

    storages: list[StorageRecord] = field(default_factory=list)
    ops: list[OpRecord] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)
    """(change in bytes, storage), in order."""
    start_bytes: int = 0
    """What existed before the step."""
    backward_begins: int | None = None
    """How many events there were before the first operation of backward."""

    @property
    def peak_bytes(self) -> int:
        """The highest total of live bytes."""
        live = peak = self.start_bytes
        for change, _ in self.events:
            live += change
            peak = max(peak, live)
        return peak

    def kept_before(self, op: int) -> int:
        """Return bytes that wait for backward and were made by operations before number `op`."""
        return self._kept_before[op]

    @functools.cached_property
    def _kept_before(self) -> list[int]:
        made = [0] * len(self.ops)
        for storage in self.storages:
            if storage.is_kept:
                made[storage.op] += storage.num_bytes
        return [0, *itertools.accumulate(made)]


def trace_step(model: nn.Module, run: Callable[[], object], *, held: Iterable[Tensor] = ()) -> Trace:
    """Record one step.

    Args:
        model: its parameters, buffers and gradients are booked as there before; its modules' calls are recorded.
        run: does forward and backward.
        held: other tensors that exist: the batch, optimizer state.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> trace = trace_step(model, lambda: model(torch.zeros(2, 4)).sum().backward())
        >>> [call.name for call in trace.calls]
        ['', '0', '1']
    """
    measure_again()
    tracer = _Tracer(model)
    tracer.hold(p for p in model.parameters())
    tracer.hold(b for b in model.buffers())
    tracer.hold(p.grad for p in model.parameters() if p.grad is not None)
    tracer.hold(held)
    with tracer:
        run()
    return tracer.trace


class _Open:
    """A call that is running."""

    def __init__(self, record: CallRecord, module: nn.Module, inputs: list[Tensor]) -> None:
        self.record, self.module, self.parts = record, module, _parts_of(module)
        self.attributes = Attributes([("", module)]) if record.name else None
        self.versions = [(weakref.ref(tensor), id(tensor), version_of(tensor)) for tensor in inputs]
        # Batch normalisation's kernels change running statistics without telling.
        is_changing = isinstance(module, nn.modules.batchnorm._NormBase) and module.training
        buffers = [buffer for buffer in module._buffers.values() if buffer is not None]
        self.buffers = [(buffer, -1 if is_changing else version_of(buffer)) for buffer in buffers]


def _parts_of(module: nn.Module) -> list[object]:
    """Return what a module consists of.

    Some build that in their first forward pass, which then cannot be made again.
    """
    named = (
        part
        for inner in module.modules()
        for part in (inner._modules, inner._parameters, inner._forward_pre_hooks, inner._forward_hooks)
    )
    return [*(id(each) for part in named for each in part.values()), [name for name, _ in module.named_buffers()]]


class _Live(NamedTuple):
    """A storage that is alive."""

    number: int
    made_by: int
    """The node of autograd's graph; -1 outside of backward."""
    storage: weakref.ref[torch.UntypedStorage]


def _is_pending(tensor: Tensor) -> bool:
    """Return whether these are logits that nobody has computed, which a look at their memory would compute."""
    return type(tensor) is DeferredLogits and tensor.is_pending


def _made(tree: object) -> Iterator[Tensor]:
    return (tensor for tensor in tensors_in(tree) if not _is_pending(tensor))


class _Tracer(DispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = Trace()
        self._names = {module: name for name, module in model.named_modules()}
        self._live: dict[int, _Live] = {}
        self._open: list[_Open] = []
        self._returned: dict[int, weakref.ref[Tensor]] = {}
        self._hooks: list[Any] = []
        self._stance: Any = None

    # ------------------------------------------------------------------ storages
    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Book what exists."""
        for tensor in tensors:
            for storage in storages(tensor):
                if storage._cdata not in self._live:
                    self._book(storage, born=-1, op=-1)
                    self.trace.start_bytes += storage.nbytes()

    def _book(self, storage: torch.UntypedStorage, born: int, op: int) -> int:
        number, address = len(self.trace.storages), storage._cdata
        self.trace.storages.append(StorageRecord(storage.nbytes(), born, op))
        self._live[address] = _Live(number, running_node(), weakref.ref(storage, lambda _: self._end(address)))
        return number

    def _end(self, address: int) -> None:
        ended = self._live.pop(address, None)
        if ended is None:
            return  # what no operation has returned
        record = self.trace.storages[ended.number]
        record.died = len(self.trace.events)
        self.trace.events.append((-record.num_bytes, ended.number))

    def _see(self, storage: torch.UntypedStorage, came_in: set[int]) -> None:
        address = storage._cdata
        if address in self._live:
            number = self._live[address].number
            record = self.trace.storages[number]
            grown = storage.nbytes() - record.num_bytes
            if grown:  # resize_ keeps the storage
                record.num_bytes += grown
                self.trace.events.append((grown, number))
        elif address in came_in:  # a view or an update of what existed before
            self._book(storage, born=-1, op=-1)
            self.trace.start_bytes += storage.nbytes()
        else:
            number = self._book(storage, born=len(self.trace.events), op=len(self.trace.ops))
            self.trace.events.append((storage.nbytes(), number))

    def _numbers(self, tree: object) -> tuple[int, ...]:
        found = (self._live.get(s._cdata) for t in _made(tree) for s in storages(t))
        return tuple(dict.fromkeys(entry.number for entry in found if entry is not None))

    # ------------------------------------------------------------------ operations
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE:
            return device_of(args[0])
        in_backward = autograd_is_running()
        if in_backward and self.trace.backward_begins is None:
            self._backward_begins()
        kwargs = kwargs or {}
        if replaces_first(func, args):
            first = self._live.get(args[0].untyped_storage()._cdata)
            if first is not None and first.made_by != running_node():
                self._end(args[0].untyped_storage()._cdata)
        out = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        came_in = {storage._cdata for tensor in inputs for storage in storages(tensor)}
        for tensor in outputs:
            for storage in storages(tensor):
                self._see(storage, came_in)
        num_events = len(self.trace.events)
        cost = cost_of(func, args, kwargs, out, inputs, outputs)
        if not in_backward:
            for number in self._numbers([*inputs, *outputs]):
                self.trace.storages[number].last_forward_use = num_events
        self.trace.ops.append(OpRecord(str(func.overloadpacket), num_events, *cost))
        return out

    def _backward_begins(self) -> None:
        self.trace.backward_begins = len(self.trace.events)
        for live in self._live.values():
            record = self.trace.storages[live.number]
            record.is_kept = record.born >= 0

    # ------------------------------------------------------------------ modules
    def _enter_module(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if autograd_is_running():
            return
        trace, parent = self.trace, self._open[-1].record if self._open else None
        inputs = list(_made((args, kwargs)))
        record = CallRecord(
            name=self._names[module],
            index=len(trace.calls),
            parent=None if parent is None else parent.index,
            first_event=len(trace.events),
            first_op=len(trace.ops),
            inputs=self._numbers(inputs),
            passed=frozenset(self._numbers([t for t in inputs if self._is_returned(t)])),
        )
        if parent is not None:
            parent.children.append(record.index)
        trace.calls.append(record)
        self._open.append(_Open(record, module, inputs))

    def _is_returned(self, tensor: Tensor) -> bool:
        reference = self._returned.get(id(tensor))
        return reference is not None and reference() is tensor

    def _leave_module(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if autograd_is_running():
            return
        if not self._open or self._open[-1].module is not module:
            return  # a hook of somebody else's raised before ours, and the model went on
        call = self._open.pop()
        record, trace = call.record, self.trace
        record.last_event, record.last_op = len(trace.events), len(trace.ops)
        record.outputs = self._numbers(out)
        given = [id(tensor) for tensor in _made((args, kwargs))]
        record.edits_input = given != [identity for _, identity, _ in call.versions] or any(
            (tensor := reference()) is not None and version_of(tensor) != version
            for reference, _, version in call.versions
        )
        changed = sum(buffer.nbytes for buffer, version in call.buffers if version_of(buffer) != version)
        record.buffer_bytes = changed + sum(trace.calls[index].buffer_bytes for index in record.children)
        inside = [trace.calls[index].side_effect for index in record.children]
        own = call.attributes.changed(but_filled=True) if call.attributes is not None else None
        own = own if call.parts == _parts_of(call.module) else "what it consists of"
        own = "TorchScript" if scripted_in(call.module) is not None else own
        own = "logits" if any(map(_is_pending, tensors_in(out))) else own
        record.side_effect = next((f"{n}" for n in inside if n), None) or (own and f"{record.name}.{own}")
        for tensor in _made(out):
            self._returned[id(tensor)] = weakref.ref(tensor)
            if tensor.grad_fn is not None:
                record.requires_grad = True
                self._hooks.append(tensor.grad_fn.register_prehook(functools.partial(_reached, trace, record)))

    # ------------------------------------------------------------------ a step
    def __enter__(self) -> _Tracer:
        # As in the ledger: a compiled region that is met under a dispatch mode would stay eager for ever.
        self._stance = torch.compiler.set_stance("force_eager")
        for module in self._names:
            if is_scripted(module):
                continue
            self._hooks.append(module.register_forward_pre_hook(self._enter_module, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leave_module, with_kwargs=True, always_call=True))
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        for hook in self._hooks:
            hook.remove()
        self._stance.__exit__(None, None, None)
        self._live.clear()  # and with it the callbacks
        self._names.clear()
        self._returned.clear()


def _reached(trace: Trace, record: CallRecord, *_: object) -> None:
    if record.backward_event is None:
        record.backward_event = len(trace.events)
