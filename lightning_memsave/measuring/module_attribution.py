"""A ledger that also knows modules: what of a peak belongs where, which tensors are largest, and a modelled time."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memsave.core.selection import is_scripted
from lightning_memsave.measuring.allocation_trace import Allocations
from lightning_memsave.measuring.ledger import Ledger, LedgerEntry
from lightning_memsave.measuring.operation_cost import cost_of
from lightning_memsave.measuring.source_lines import line_text
from lightning_memsave.measuring.storages import storages, tensors_in
from lightning_memsave.torch_internals.autograd_graph import autograd_is_running
from lightning_memsave.torch_internals.fake_tensors import ASKS_DEVICE, num_alike

if TYPE_CHECKING:
    from typing_extensions import Self  # in `typing` from Python 3.11 on

_NUM_KINDS = 50
BACKWARD, BATCH, ELSEWHERE = "(backward)", "(batch)", "(outside of modules)"
"""Places of what no module owns."""


@dataclass(frozen=True, kw_only=True)
class TopTensor:
    """Tensors of one kind that are alive at the peak."""

    num_bytes: int
    """Bytes of all of them together."""
    count: int
    shape: tuple[int, ...]
    dtype: str
    category: str
    """Category: one of `CATEGORIES`."""
    line: str
    """The line of code that made them; empty for what was there before the step."""
    module: str
    """The innermost module that ran, or that owns them, by the name that it shares with its repetitions."""


def shared_names(model: nn.Module) -> dict[str, str]:
    """Return for each module's name the one that it shares with its repetitions.

    Those are members of one list, of one class, whose parameters have the same shapes: modules with children, as the
    blocks of a network, or all members of the list. Two linear layers among others of one block are no repetitions.

    >>> import copy
    >>> block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> shared_names(nn.ModuleDict({"blocks": nn.ModuleList([block, copy.deepcopy(block)])}))["blocks.1.0"]
    'blocks.*.0'
    """
    found = {"": ""}
    for prefix, parent in model.named_modules():
        numbered = Counter(_make_of(child) for name, child in parent.named_children() if name.isdecimal())
        for name, child in parent.named_children():
            is_block = len(numbered) == 1 or next(child.children(), None) is not None
            shared = "*" if name.isdecimal() and is_block and numbered[_make_of(child)] > 1 else name
            found[f"{prefix}.{name}" if prefix else name] = f"{found[prefix]}.{shared}" if prefix else shared
    return found


def _make_of(module: nn.Module) -> tuple[Any, ...]:
    return type(module), *(p.shape for p in module.parameters())


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """What a peak consists of."""

    top: tuple[TopTensor, ...]
    """The fifty largest kinds of tensors."""
    seconds: float
    """Seconds of the whole step, modelled (`measuring.operation_cost`)."""
    num_operations: int
    """Number of operations of modules and of backward, without views: each microbatch has as many."""
    allocations: Allocations
    """All of the step."""
    shared_names: Mapping[str, str]
    """The names that modules share with their repetitions."""


class BreakdownLedger(Ledger):
    """A ledger with a `breakdown` beside its measurement."""

    def __init__(self, device: torch.device | str = "cpu", *, fake: bool = False) -> None:
        super().__init__(device, fake=fake)
        self.breakdown: Breakdown | None = None
        self._running: list[str] = []
        self._shared_names: dict[str, str] = {}
        self._owners: dict[Tensor, str] = {}
        self._owned: dict[LedgerEntry, tuple[torch.Size, torch.dtype]] = {}
        self._seconds, self._num_operations = 0.0, 0

    def watching(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), batch: object = ()) -> Self:
        """Watch as the ledger does; modules are told by their names in `model`."""
        super().watching(model, optimizers, batch)
        self._shared_names = shared_names(model)
        for name, module in model.named_modules():
            where = name or type(module).__name__
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                self._owners.setdefault(tensor, where)
                self._belongs(tensor, where)
                self._belongs(tensor.grad if tensor.is_leaf else None, where)
        for optimizer in self._optimizers:
            for p, state in optimizer.state.items():
                for leaf in tree_leaves(state):
                    self._belongs(leaf, self._owners.get(p, ELSEWHERE))
        for tensor in tensors_in(batch):
            self._belongs(tensor, BATCH)
        return self

    def _belongs(self, tensor: object, where: str) -> None:
        """Note that a tensor belongs to a module: its own, or what is kept for its parameters."""
        if not isinstance(tensor, Tensor):
            return
        for storage in storages(tensor):
            entry = self._live.get(storage._cdata)
            if entry is not None:
                entry.place = where
                self._owned.setdefault(entry, (tensor.shape, tensor.dtype))

    def _name_gradient(self, parameter: Tensor) -> None:
        super()._name_gradient(parameter)
        self._belongs(parameter.grad, self._owners.get(parameter, ELSEWHERE))

    def _book(self, storage: torch.UntypedStorage, category: str | None, reserved: bool = False) -> LedgerEntry:
        entry = super()._book(storage, category, reserved)
        entry.place = self._running[-1] if self._running else BACKWARD if autograd_is_running() else ELSEWHERE
        return entry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func is ASKS_DEVICE:
            return out
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self._seconds += num_alike() * cost_of(func, args, kwargs or {}, out, inputs, outputs)[0]
        if not func.is_view and (self._running or autograd_is_running()):
            self._num_operations += num_alike()
        return out

    def __enter__(self) -> Self:
        super().__enter__()
        assert self._model is not None, "it watches a model"
        for name, module in self._model.named_modules():
            if is_scripted(module):
                continue
            where = name or type(module).__name__
            self._hooks.append(module.register_forward_pre_hook(functools.partial(self._begins, where)))
            self._hooks.append(module.register_forward_hook(self._ends, always_call=True))
        return self

    def _begins(self, where: str, *_: object) -> None:
        self._running.append(where)

    def _ends(self, *_: object) -> None:
        if self._running:
            self._running.pop()

    def _split_at_peak(self) -> tuple[dict[str, int], dict[str, int]]:
        self._running.clear()
        alive = self._alive_at_peak()
        kinds: dict[tuple[Any, ...], list[LedgerEntry]] = {}
        for entry, num_bytes in alive.items():
            if num_bytes:
                kinds.setdefault(self._kind(entry), []).append(entry)
        found = [self._top_tensor(entries, sum(alive[entry] for entry in entries)) for entries in kinds.values()]
        self.breakdown = Breakdown(
            top=tuple(sorted(found, key=lambda each: -each.num_bytes)[:_NUM_KINDS]),
            seconds=self._seconds,
            num_operations=self._num_operations,
            allocations=self._allocations(),
            shared_names=self._shared_names,
        )
        self._owners.clear()
        self._owned.clear()
        return super()._split_at_peak()

    def _allocations(self) -> Allocations:
        numbers = {entry: number for number, (_, entry) in enumerate(self._at_start)}
        changes = tuple((num_bytes, numbers.setdefault(entry, len(numbers))) for num_bytes, entry in self._events)
        labels = tuple((entry.category or "temporary", entry.place) for entry in numbers)
        return Allocations(tuple(size for size, _ in self._at_start), changes, labels)

    def _kind(self, entry: LedgerEntry) -> tuple[Any, ...]:
        shape, dtype = self._owned.get(entry) or (entry.made or ((), ""))[:2]
        line = "" if entry.made is None else line_text(entry.made[2])
        return entry.category or "temporary", self._shared_names.get(entry.place, entry.place), shape, dtype, line

    def _top_tensor(self, entries: Sequence[LedgerEntry], num_bytes: int) -> TopTensor:
        """Return what tensors of one kind are, which are alive at the peak."""
        category, module, shape, dtype, line = self._kind(entries[0])
        return TopTensor(
            num_bytes=num_bytes,
            count=len(entries),
            shape=tuple(shape),
            dtype=str(dtype).removeprefix("torch."),
            category=category,
            line=line,
            module=module,
        )
