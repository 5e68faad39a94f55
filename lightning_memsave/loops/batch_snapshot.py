"""What a batch starts with: kept, so that it can be run again, or rehearsed, as if nothing had happened."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Container, Iterable, Iterator, Mapping
from numbers import Number
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_memsave.lightning_compat import Batch
from lightning_memsave.loops.batch_objects import Objects
from lightning_memsave.loops.batch_structure import OF_LIGHTNING, Structure, is_same, objects_of
from lightning_memsave.loops.late_reduction import num_collectives
from lightning_memsave.loops.step_settings import StepSettings
from lightning_memsave.measuring.meter import SeenEdits
from lightning_memsave.measuring.storages import tensors_in
from lightning_memsave.saved_tensors.buffers import Buffers
from lightning_memsave.saved_tensors.module_state import is_class_of_torch, is_replaced, named_parameters
from lightning_memsave.saved_tensors.parameter_edits import ParameterEdits
from lightning_memsave.saved_tensors.randomness import Randomness, generators_in
from lightning_memsave.saved_tensors.seeds import NoiseSeeds
from lightning_memsave.techniques.sparsity.layers import SparseLayer
from lightning_memsave.torch_internals.containers import CONTAINERS, nested, refill, values
from lightning_memsave.torch_internals.module_tree import modules_by_name
from lightning_memsave.torch_internals.registered_hooks import number_of_next_hook, remove_hooks_since
from lightning_memsave.torch_internals.sharded_parameters import (
    has_unreduced_gradients,
    is_sharding,
    reduces_gradients,
    with_shards,
    written_part,
)


class BatchStart:
    """What a batch starts with, as far as a try may change it.

    Args:
        module: the LightningModule.
        changing: names of buffers that a step changes; `None` while that is unknown, in a first batch: then what a
            first forward pass may build is kept as well (`structure`).
        gradients: what may happen to them: `"made"` (there are none yet), `"added to"` (those of earlier batches stay:
            a copy is kept), `"watched"` (the same without a copy: a try that has added to them is final).
        batch: its containers are put back, its tensors are watched.
        noise: of codes, whose stream is put back.
        small_bytes: while it is not known which buffers change, those up to this size are cloned, larger ones watched.
        reads: names of parameters that a step edits through `.data`, whose values are read; `None` while unknown: all.
        most_entries: containers of the module up to this size are copied; a larger one must not change its length.
        objects: that a step changes, as `changed_objects` has told them of a first batch.
    """

    @torch.no_grad()  # what is kept here is no activation
    def __init__(
        self,
        module: L.LightningModule,
        changing: set[str] | None,
        gradients: str = "made",
        batch: Batch = None,
        noise: NoiseSeeds | None = None,
        small_bytes: float = 2**20,
        reads: Container[str] | None = (),
        most_entries: float = 2**12,
        objects: Container[str] = (),
    ) -> None:
        self._module = module
        self._noise, self._place = noise, None if noise is None else noise.place
        owners = modules_by_name(module)  # once, as this happens before each batch
        kinds = {type(m) for _, m in owners}  # classes are far fewer than modules
        of_metrics, sparse = ({k for k in kinds if issubclass(k, base)} for base in (Metric, SparseLayer))
        of_users = {k for k in kinds - of_metrics if not is_class_of_torch(k)}
        users = [(prefix, m) for prefix, m in owners if type(m) in of_users]
        self.metrics = [m for _, m in owners if isinstance(m, Metric)] if of_metrics else []
        """Metrics of the module."""
        self._parameters = list(named_parameters(owners))
        self._frees_weights = any(map(is_sharding, kinds))
        counted: Iterable[tuple[str, Tensor]] = ((name, p) for name, *_, p in self._parameters)
        self.edits = ParameterEdits(with_shards(module, counted) if self._frees_weights else counted, reads)
        """Edits of parameters, of which no copies are kept."""
        self._seen_edits = SeenEdits((name, p) for name, *_, p in self._parameters)
        parameters = list({id(p): p for _, m in owners for p in m._parameters.values() if p is not None}.values())
        devices = {p.device for p in parameters} if torch.accelerator.is_available() else ()
        self._randomness = Randomness(devices, generators_in(*(m for _, m in users)))
        self._modes = [(m, m.training) for _, m in owners]
        self._settings = StepSettings(module, owners)
        self._children = [(m._modules, m._modules.copy()) for _, m in owners if isinstance(m._modules, dict)]
        self._fx_name, self._next_hook = module._current_fx_name, number_of_next_hook()
        self._attributes = [(m, {k: value for k, value in vars(m).items() if _is_plain(k, value)}) for _, m in users]
        named = {
            f"{prefix}.{key}".removeprefix("."): value
            for (prefix, _), (_, plain) in zip(users, self._attributes, strict=True)
            for key, value in plain.items()
            if not isinstance(value, _IMMUTABLE)
        }
        inside = {name: nested(value, most_entries) for name, value in named.items()}
        self._large = [(key, each, len(each)) for key, (_, large) in inside.items() for each in large]
        self._buffers = Buffers(owners, changing, small_bytes)
        self._structure = Structure([m for _, m in owners], [m for _, m in users]) if changing is None else None
        if self._structure is not None:
            self._objects: Objects | None = self._structure.objects
        else:
            self._objects = objects_of((m for _, m in users), objects) if objects else None
        # By reference, as a sum makes a new tensor.
        layers = (m for _, m in owners if type(m) in sparse) if sparse else ()
        self._dense_gradients = [(layer, layer.dense_gradient) for layer in layers]
        self._summed: list[tuple[nn.Parameter, Tensor]] = []
        self._watched = [(t, t._version, "the batch") for t in tensors_in(batch) if not t.is_inference()]
        self._watched += [
            (t, t._version, f"`{name}`")
            for name, value in named.items()
            for t in (value, *(each for container in inside[name][0] for each in values(container)))
            if isinstance(t, Tensor) and not t.is_inference()
        ]
        if gradients == "watched":
            gradients_now = [written_part(p.grad) for p in parameters if p.grad is not None]
            self._watched += [(gradient, gradient._version, "gradients") for gradient in gradients_now]
            self._summed = [(p, p.grad) for p in parameters if p.grad is not None]
            parameters = [p for p in parameters if p.grad is None]
        self._gradients = [
            (p, p.grad.clone() if gradients == "added to" and p.grad is not None else None) for p in parameters
        ]
        own = [each for small, _ in inside.values() for each in small]
        self._containers = [(container, copy.copy(container)) for container in (*_containers(batch), *own)]
        self._num_collectives = num_collectives()
        self._has_unreduced = self._frees_weights and has_unreduced_gradients(module)

    def changed_buffers(self) -> set[str]:
        """The names of the buffers that have changed since, as far as their values were kept or their edits counted."""
        return self._buffers.changed() | self._buffers.moved()

    def not_put_back(self) -> list[str]:
        """Return the names of parameters that were edited, as far as versions, values or a ledger tell.

        So are attributes whose objects hold tensors that were edited, or containers that are too large to be copied.
        """
        edited = {*self.edits.edited(), *self.hidden_edits()}
        held = [] if self._objects is None else self._objects.not_kept()
        return [*(name for name, *_ in self._parameters if name in edited), *held]

    def hidden_edits(self) -> set[str]:
        """Return those that were edited behind their version, even where they have the same values again."""
        return self.edits.without_version() | self._seen_edits.names()

    def changed_objects(self) -> set[str]:
        """Return the objects that have changed since, in a first batch; in others none."""
        return set() if self._structure is None else self._structure.objects.changed()

    def moved_buffers(self) -> set[str]:
        """Return the names of the buffers that were edited, of which no copy was kept."""
        return self._buffers.moved()

    def why_final(self) -> str | None:
        """Return why what has happened since cannot be undone; `None` if it can."""
        if (stays := self.what_stays()) is not None:
            return stays
        if num_collectives() != self._num_collectives:
            return "processes have exchanged something during the failed try: they would wait for each other"
        return None

    def what_stays(self) -> str | None:
        """Return what `restore` would not put back on this process; `None` for nothing."""
        if self._has_unreduced or (self._frees_weights and not reduces_gradients(self._module)):
            return (
                "the step accumulates gradients that FSDP2 has not reduced, of which no copy is kept: leave out "
                "`set_requires_gradient_sync(False)` and `set_requires_all_reduce(False)`"
            )
        edited = next((what for tensor, version, what in self._watched if tensor._version != version), None)
        if any(p.grad is not gradient for p, gradient in self._summed):  # summed out of place, for higher derivatives
            edited = "gradients"
        if edited == "gradients":
            return (
                "the failed try has added to gradients of earlier batches, of which no copy was kept: ask for one with "
                '`microbatch="auto"`, without a budget'
            )
        if edited is not None:
            return f"the step edits a tensor of {edited} in place: let it work on copies"
        grown = next((key for key, value, length in self._large if len(value) != length), None)
        if grown is not None:
            return f"the step changes `{grown}`, which is too large to be copied before each batch"
        if moved := self._buffers.moved():
            return f"the step has changed the buffer {min(moved).removeprefix('.')} for the first time"
        return None

    def restore(self, *, gradients: bool = True) -> None:
        """Put everything back, in place where others may hold on to it.

        Args:
            gradients: whether they were touched; else they are as they were.
        """
        self._randomness.restore()
        if self._noise is not None and self._place is not None:
            self._noise.go_to(self._place)
        for module, mode in self._modes:
            module.training = mode
        self._module._current_fx_name = self._fx_name
        self._settings.restore()
        self._restore_attributes()
        remove_hooks_since(self._next_hook, (module for module, _ in self._modes))
        if self._structure is not None:
            self._structure.restore()
        if self._structure is None and self._objects is not None:
            self._objects.restore()
        for container, before in self._containers:
            refill(container, before)
        self._buffers.put_back()
        for layer, dense_gradient in self._dense_gradients:
            layer.dense_gradient = dense_gradient
        for parameter, gradient in self._gradients if gradients else ():
            parameter.grad = gradient

    def _restore_attributes(self) -> None:
        """Give modules back what they had by name: children, parameters, and what is plain."""
        for children, before in self._children:
            if not is_same(children, before):
                refill(children, before)
        for module, key, p in [(m, k, p) for _, m, k, p in self._parameters if is_replaced(m, k, p)]:
            module._parameters[key] = p
        for module, plain in self._attributes:
            attributes = vars(module)
            for key in [k for k, value in attributes.items() if k not in plain and _is_plain(k, value)]:
                del attributes[key]
            attributes.update(plain)


_IMMUTABLE = (Number, str, bytes, type(None))
_PLAIN = (*_IMMUTABLE, Tensor)
_PLAIN_TYPES = frozenset((*CONTAINERS, bool, int, float, str, type(None), Tensor))  # told apart sooner than by bases


def _is_plain(key: str, value: object) -> bool:
    """Return whether an attribute of a module is put back: exact types, as others may mind being copied."""
    return key not in OF_LIGHTNING and (type(value) in _PLAIN_TYPES or isinstance(value, _PLAIN))


def _containers(batch: Batch, seen: set[int] | None = None) -> Iterator[list[Any] | dict[Any, Any]]:
    """Yield the lists and dictionaries of a batch, those of dataclasses and `BatchEncoding` as well; each once."""
    seen = set() if seen is None else seen
    if id(batch) in seen:
        return
    seen.add(id(batch))
    children: Any = ()
    if type(batch) in (list, dict):
        yield batch
        children = batch.values() if isinstance(batch, dict) else batch
    elif isinstance(batch, Mapping):
        children = (batch.data,) if isinstance(batch, UserDict) else batch.values()
    elif isinstance(batch, (list, tuple)):
        children = batch
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        children = (getattr(batch, f.name, None) for f in dataclasses.fields(batch))
    for child in children:
        yield from _containers(child, seen)
