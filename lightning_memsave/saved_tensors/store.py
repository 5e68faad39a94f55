"""The store: what is kept between forward and backward, through autograd's saved-tensor hooks.

Inside `scope()`, every tensor that autograd keeps becomes a handle on an entry; one entry per storage, so views and
several consumers share it and the bytes go with the last of them. What an entry holds follows from what its consumers
need (`policy`): the latest entry waits, raw, until another one has come, because its next consumer may need more of it
than the first; then it is coded, and its own bytes die as soon as the forward pass lets go of them.

Never touched: parameters and what is computed from them alone, tensors below `min_numel` elements, subclasses of
`Tensor`, windows into larger storages that carry no gradient (slices of a data set). At the end of the scope, an entry
whose original somebody still holds (the batch, a returned output) takes the original back: coding it saved nothing.

Limits: tensors that a custom autograd Function stores on `ctx` directly are invisible to hooks; inside
`torch.utils.checkpoint` (non-reentrant) torch's own hooks come first, so its regions are left to themselves. Our own
(`checkpoint_regions`) are repeated under the store.
"""

from __future__ import annotations

import copy
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_memsave.saved_tensors import encodings, policy
from lightning_memsave.saved_tensors.byte_tally import Consequences, Tally
from lightning_memsave.saved_tensors.call_site import Call
from lightning_memsave.saved_tensors.code_rows import covers_its_storage
from lightning_memsave.saved_tensors.compiled_operators import told_to
from lightning_memsave.saved_tensors.deferred_logits import DeferredLogits, HeadCall, defer
from lightning_memsave.saved_tensors.derivative_levels import Levels
from lightning_memsave.saved_tensors.dropout import dropout
from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.saved_tensors.function_mode import CallContext, CallTracker, window_index
from lightning_memsave.saved_tensors.fused_norm_relu import chain, relu_input
from lightning_memsave.saved_tensors.linear_cross_entropy import linear_cross_entropy
from lightning_memsave.saved_tensors.norm_recompute import note_rows
from lightning_memsave.saved_tensors.offload import Offloader
from lightning_memsave.saved_tensors.rebuilt_weights import cast_of_frozen, left_alone
from lightning_memsave.saved_tensors.recompute import Derivation, kept_of
from lightning_memsave.saved_tensors.samples import Sampling
from lightning_memsave.saved_tensors.saved_storage import Recent, SavedStorage, SavedTensor
from lightning_memsave.saved_tensors.seeds import NoiseSeeds
from lightning_memsave.saved_tensors.smallest_encoding import smallest_encoding
from lightning_memsave.torch_internals.autograd_graph import (
    Edge,
    Kept,
    edge_of,
    innermost_hooks,
    inputs_of,
    is_inside_transform,
    is_made_of_weights,
    sequence_nr_of,
    storage_key,
)
from lightning_memsave.torch_internals.fake_tensors import is_plain
from lightning_memsave.torch_internals.partitioning import partitioned_by

_NUM_WAITING = 1  # entries that stay raw for their next consumer; more would raise the peak
_NUM_COMPLETE = 2  # exact entries that stay raw: a kernel may fill what it kept before it ran (rrelu: noise, input)


class SavedTensorStore:
    """Keeps the tensors that backward needs, in fewer bytes.

    Args:
        lossy: what is enough for a tensor whose consumers bear noise.
        recompute: whether tensors may be computed again from what is kept anyway.
        fuse: whether normalisation and ReLU share one code.
        chunk_loss: whether cross-entropy on a Linear's output is computed in chunks.
        overrides: fidelities by function name; they go before the policy's tables.
        sampling: of what layers read for their weights' gradients alone.
        derivative_bits: activations keep a level of their derivative, in so many bits.
        min_numel: tensors with fewer elements are left alone.
        seed: of the dither.
        offloader: moves what is left out of the device's memory.
        partitioner: divides what is compiled while the store is open (`compiled_partitioner`).
    """

    def __init__(
        self,
        *,
        lossy: Fidelity = Fidelity.EXACT,
        recompute: bool = False,
        fuse: bool = False,
        chunk_loss: bool = False,
        overrides: Mapping[str, Fidelity] | None = None,
        sampling: Sampling | None = None,
        derivative_bits: int | None = None,
        min_numel: int = 1024,
        seed: int = 0,
        offloader: Offloader | None = None,
        partitioner: Any = None,
    ) -> None:
        self.lossy, self.recompute, self.fuse, self.min_numel = lossy, recompute, fuse, min_numel
        self.overrides, self.offloader, self.chunk_loss = dict(overrides or {}), offloader, chunk_loss
        self.sampling, self.derivative_bits = sampling, derivative_bits
        self.noise, self.partitioner = NoiseSeeds(seed), partitioner
        self.keeps_derivatives = True
        """Whether activations may be kept as codes of their derivatives, which nobody can differentiate."""
        self.weights_stay = True
        """Whether weights are there until backward: where they are freed before, nothing can be computed from them."""
        self.tally = Tally()
        """What the latest scope kept."""
        self.consequences = Consequences()
        """What the codes of all scopes so far did to the gradient's mean, those of regions included."""
        self._start()

    def _start(self) -> None:
        self.within: list[Fidelity] = []
        """Fidelities that the codecs of the running modules ask for, the innermost last."""
        self._recent = Recent()
        self._heads, self._heads_in_evaluation = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._depth, self._is_evaluating = 0, False
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings: a copy keeps nothing yet, and has no say in what is compiled."""
        settings = {name: value for name, value in vars(self).items() if name[0] != "_" and name != "within"}
        return {**settings, "partitioner": None}

    def __setstate__(self, settings: dict[str, Any]) -> None:
        vars(self).update(settings)
        self._start()

    def _begin(self) -> None:
        self._entries: weakref.WeakValueDictionary[tuple[int, int, torch.dtype], SavedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._handles: dict[Edge, weakref.ref[SavedTensor]] = {}
        self._calls = CallTracker(self._answer, self._before_edit, notes_heads=self.chunk_loss)
        self._waiting: deque[weakref.ref[SavedStorage]] = deque()
        self._derivation = Derivation(self._handles, self._calls)
        self._head_calls: list[weakref.ref[HeadCall]] = []
        self._compiled = Tally()
        self._coded_there: set[int] = set()

    @contextmanager
    def scope(self, pack: Callable[[Tensor], Any] | None = None) -> Iterator[None]:
        """Keep everything that autograd keeps inside. An inner scope of the same store does nothing.

        Args:
            pack: called instead of the store's own `pack`, which it calls.
        """
        if self._depth or not torch.is_grad_enabled():
            yield
            return
        with self.opened(), torch.autograd.graph.saved_tensors_hooks(pack or self.pack, _unpack), self._calls:
            yield

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Settle what is kept inside by hand, under `hooks()`, together at the end."""
        self._depth += 1
        self._recent.replace(None)
        try:
            if self.partitioner is None:
                yield
            else:
                with partitioned_by(self.partitioner), told_to(self):
                    yield
            self._settle()
        finally:
            self._depth -= 1
            self._begin()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Answer losses as in a scope, where there are no gradients: no logits of a vocabulary are computed there."""
        if self._depth or not self.chunk_loss:
            yield
            return
        self._depth, self._is_evaluating = 1, True
        try:
            with self._calls:
                yield
        finally:
            self._depth, self._is_evaluating = 0, False
            self._begin()

    def hooks(self) -> AbstractContextManager[None]:
        """Take what autograd keeps inside. Only while the store is open."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)

    def note_compiled(self, kind: str, plain_bytes: int, kept: tuple[Tensor, ...]) -> None:
        """Count a tensor that compiled code keeps as `kept`, which nobody codes once more."""
        self._compiled.add(kind, plain_bytes, sum(each.nbytes for each in kept))
        self._coded_there.update(map(storage_key, kept))

    def unseen(self, name: str) -> AbstractContextManager[None]:
        """Look at no call inside: what they keep is kept for one function of that `name`.

        For compiled regions: a function mode that is active would be compiled into them.
        """
        return self._calls.unseen(name)

    def _answer(self, call: Call) -> Tensor | None:
        if self._is_evaluating == torch.is_grad_enabled():
            return None
        # Inside a checkpointed region, where torch's own hooks come first, its recomputation would not be answered.
        if innermost_hooks()[0] != (None if self._is_evaluating else self.pack) or (
            call.name != "dropout" and not self.chunk_loss
        ):
            return None
        if call.name == "linear":
            return self._deferred(call)
        return dropout(call) if call.name == "dropout" else linear_cross_entropy(call, self._calls)

    def _deferred(self, call: Call) -> DeferredLogits | None:
        heads = self._heads_in_evaluation if self._is_evaluating else self._heads
        found = defer(call, heads) if self.weights_stay and not self.within else None
        if found is not None:
            self._head_calls.append(weakref.ref(found.call))
        return found

    def compute_held_logits(self) -> None:
        """Compute the logits of the scope that somebody holds: their weight may change before they are read."""
        for reference in self._head_calls:
            if (head_call := reference()) is not None and head_call.is_unchanged:
                head_call.begin_to_read()

    # --------------------------------------------------------------------------- checkpointed regions
    def branch(self) -> SavedTensorStore:
        """Return a store with the same settings, for what a region keeps when it is repeated."""
        branch = copy.copy(self)
        branch.within = self.within  # the hooks that tell of it know this store
        return branch

    @property
    def place(self) -> CallContext:
        """Place in the model where the scope is now."""
        return CallContext(tuple(self.within), self._calls.unseen_as)

    @contextmanager
    def again_at(self, place: CallContext) -> Iterator[None]:
        """Return to a `place` of the forward pass, when a region is repeated."""
        before = list(self.within)
        self.within[:] = place.within
        try:
            with nullcontext() if place.unseen_as is None else self.unseen(place.unseen_as):
                yield
        finally:
            self.within[:] = before

    def entries(self) -> list[SavedStorage]:
        """Return the entries of the scope that is open."""
        return list(self._entries.values())

    # --------------------------------------------------------------------------- packing
    def pack(self, tensor: Tensor) -> Kept:
        """Keep a tensor: what the hook does.

        Inside of a transform of torch.func and in forward mode tensors may have no memory, or be several in one.
        """
        if is_inside_transform():
            return left_alone(tensor)
        casts = self.recompute and self.weights_stay and tensor.numel() >= self.min_numel
        if not self._manages(tensor):
            return left_alone(tensor, casts)
        if casts and not tensor.requires_grad and (cast := cast_of_frozen(tensor, self._calls.current)) is not None:
            return cast
        key = storage_key(tensor), tensor._version, tensor.dtype
        if key[0] in self._coded_there:
            return left_alone(tensor)
        entry = self._entries.get(key)
        if entry is None or not entry.original.is_alive:  # its address was given to another storage
            entry = self._entries[key] = SavedStorage(tensor, self._recent)
            self._waiting.append(weakref.ref(entry))
        handle = SavedTensor(entry, tensor)
        # What its node made is another tensor where somebody has edited it since without autograd.
        if (edge := edge_of(tensor)) is not None and not self._calls.has_changed_itself(tensor):
            # Under `create_graph` backward keeps what it has unpacked or decoded under its old edge: the first stands.
            first = kept_of(self._handles, edge)
            if first is None or first.entry is entry:
                self._handles[edge] = weakref.ref(handle)
        self._raise_need(entry, tensor)
        self._code_all_but_the_latest(entry.need == Fidelity.EXACT)
        return handle

    def _manages(self, tensor: Tensor) -> bool:
        if (
            tensor.numel() < self.min_numel
            or not is_plain(tensor)
            or tensor.layout is not torch.strided
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.untyped_storage().nbytes() % tensor.element_size()
        ):
            return False
        if not tensor.requires_grad:
            return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()
        return not is_made_of_weights(tensor)

    def _raise_need(self, entry: SavedStorage, tensor: Tensor) -> None:
        """Keep what the function that is running needs, besides what others need."""
        if not tensor.dtype.is_floating_point:
            entry.need = Fidelity.EXACT
            if tensor.dtype == torch.int64 and (index := window_index(tensor, self._calls.current)) is not None:
                entry.become(index)
            return
        before, entry.need = entry.need, self._joint_need(entry, tensor)
        if entry.need < Fidelity.EXACT and self._note_rows(entry, tensor) and entry.is_lossy:
            self._take_back(entry, tensor)
        if Fidelity.SHAPE < entry.need <= before:
            return
        if self.fuse and self._fused(entry, tensor):
            return
        if entry.encoding.fidelity < entry.need:  # coded for somebody who needed less
            self._take_back(entry, tensor)
        if self.recompute and entry.is_raw and entry.needs_values and covers_its_storage(tensor):
            self._recompute(entry, tensor)

    def _recompute(self, entry: SavedStorage, tensor: Tensor) -> None:
        """Compute a tensor again when it is asked for, where that is possible."""
        source = self._derivation.of(tensor, entry.need)
        # What a normalisation reads has its noise bounded by rows of its own: another tensor's are not enough.
        if source is None or (source.fidelity < Fidelity.EXACT and entry.normalised_by):
            return
        entry.become(encodings.Recompute(source.values, tensor, source.fidelity, source.needs, source.depth))
        for need in source.needs:
            if isinstance(need, SavedTensor):
                need.entry.need = need.entry.need_of_values

    def _before_edit(self, edited: Tensor) -> None:
        """Hold what would be computed again from a tensor that is about to be edited in place.

        Its own keeper may be a graph that no backward runs, of a value that is only logged.
        """
        key = storage_key(edited)
        for entry in self.entries():
            needs = entry.encoding.needs if isinstance(entry.encoding, encodings.Recompute) else ()
            if any(isinstance(need, SavedTensor) and need.entry.storage_key == key for need in needs):
                entry.become_raw(entry.encoding.flat().untyped_storage())

    def _note_rows(self, entry: SavedStorage, tensor: Tensor) -> bool:
        call, num_before = self._calls.current, len(entry.normalised_by)
        is_any = note_rows(entry, tensor, call)
        self._calls.notes_statistics |= len(entry.normalised_by) > num_before
        return is_any

    def _joint_need(self, entry: SavedStorage, tensor: Tensor) -> Fidelity:
        lossy = self.within[-1] if self.within else self.lossy
        wanted = policy.need(tensor, self._calls.current, lossy, self.overrides)
        part = self._part_for(tensor, wanted)
        if part is not None or Fidelity.MASK < wanted.fidelity < Fidelity.EXACT:
            entry.num_uses += 1
            entry.is_coupled |= not wanted.is_last
            if not wanted.is_linear:
                entry.nonlinear |= {self._calls.current.name}
        need, interval = entry.joint_need(wanted.fidelity, part), wanted.interval
        keeps_sign = wanted.keeps_sign or (need == Fidelity.PART and Fidelity.MASK in (wanted.fidelity, entry.need))
        if keeps_sign and not entry.keeps_sign:
            entry.keeps_sign = True
            if entry.is_lossy:  # coded without
                self._take_back(entry, tensor)
        if interval is not None and entry.need == Fidelity.SHAPE:
            entry.interval = interval
        elif entry.interval != interval and max(need, entry.need) > Fidelity.SHAPE:
            return Fidelity.EXACT  # no mask and no code serves both
        return max(entry.need, need)

    def _part_for(self, tensor: Tensor, wanted: policy.Need) -> encodings.Part | None:
        """Return what is enough for the call that is running instead of values, if anything is."""
        call = self._calls.current
        is_open = not self.within and call.name not in self.overrides  # nobody asked for something else here
        if (derivative := wanted.derivative) is not None and self.keeps_derivatives:
            if self.derivative_bits is not None and is_open:
                return Levels(derivative, self.derivative_bits)
            return derivative if wanted.fidelity in encodings.BITS else None
        return self.sampling.of(call, tensor) if self.sampling is not None and is_open and wanted.is_last else None

    def _take_back(self, entry: SavedStorage, tensor: Tensor) -> None:
        """Hold the bytes again, to be coded anew."""
        entry.become_raw(tensor.untyped_storage())
        self._waiting.append(weakref.ref(entry))

    def _fused(self, entry: SavedStorage, y: Tensor) -> bool:
        """Put ReLU's output and the normalisation's input on one code, where both may be lossy."""
        norm = relu_input(y)
        if norm is None or not entry.is_raw or not self.lossy <= Fidelity.INT8 or entry.need > self.lossy:
            return False
        producer, producer_nr = inputs_of(norm)[0]
        source = None if producer is None else kept_of(self._handles, Edge(sequence_nr_of(producer), producer_nr))
        if source is None or not source.entry.is_raw or source.entry.need != self.lossy or source.entry.keeps_sign:
            return False
        is_new = self._calls.current.name in policy.SIGN_ONLY  # the ReLU itself keeps it, before its call has returned
        if not source.entry.is_unchanged or not (is_new or not self._calls.has_changed_itself(y)):
            return False
        if self._calls.has_changed(norm, 0):
            return False
        x, argument = source.get(), self._calls.current.argument(0, "input")
        is_z = isinstance(argument, Tensor) and argument.grad_fn is norm and argument.shape == y.shape
        z, seed = argument if is_z else None, self.noise.next_seed()
        found = chain(y, x, norm, z, self.lossy, seed, self._calls.operands, source.entry.rows)
        if found is None:
            return False
        entry.become(found[0])
        source.entry.become(found[1])
        return True

    # --------------------------------------------------------------------------- coding
    def _code_all_but_the_latest(self, is_complete: bool) -> None:
        """Code waiting entries of one kind: those that need every bit already, or those whose need may still rise.

        So statistics push no activation out of the queue.
        """
        same = [w for w in self._waiting if (entry := w()) is None or (entry.need == Fidelity.EXACT) == is_complete]
        for waiting in same[: -(_NUM_COMPLETE if is_complete else _NUM_WAITING)]:
            self._waiting.remove(waiting)
            self._code(waiting())

    def _code(self, entry: SavedStorage | None) -> None:
        """Give an entry the smallest encoding that its consumers allow."""
        if entry is None or not entry.is_raw or not entry.is_unchanged:
            return
        encoding = smallest_encoding(entry, self._calls.statistics, self.noise)
        if self.offloader is not None:
            encoding = self.offloader.take(encoding or entry.encoding) or encoding
        if encoding is not None:
            entry.become(encoding)

    def draw_for(self, step: int) -> None:
        """Draw the dither from a stream of this step's own, in which several scopes go on; repeats when resumed."""
        self.noise.begin(step)

    def _settle(self) -> None:
        """Code what still waits; give back what coding did not free; count."""
        self._calls.latest_input = None
        while self._waiting:
            self._code(self._waiting.popleft()())
        for entry in (entries := self.entries()):
            if not entry.is_raw and (storage := entry.original.get()) is not None:
                entry.become_raw(storage)
        self.tally = Tally.of(entries) + self._compiled
        self.consequences.note(entries)
        self.consequences.note_compiled(self._compiled)


_unpack = operator.methodcaller("get")
