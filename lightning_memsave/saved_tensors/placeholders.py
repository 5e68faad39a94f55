"""What the graph holds in place of a region's tensors, and what fills it when the region is repeated."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_memsave.core.errors import RegionError
from lightning_memsave.saved_tensors.fingerprints import Fingerprint, fingerprint, is_near
from lightning_memsave.saved_tensors.region_inputs import Keeper
from lightning_memsave.saved_tensors.saved_storage import Passed
from lightning_memsave.saved_tensors.store import SavedTensorStore
from lightning_memsave.torch_internals.autograd_graph import Kept, storage_key, version_of


class Repeats(Protocol):
    """A region, as its holders know it."""

    def repeat(self) -> None:
        """Give every holder that waits its tensor."""


class Stop(BaseException):
    """Signal that ends a repetition, since nothing that follows in it is wanted."""


class Holder:
    """What the graph holds in place of a tensor.

    Args:
        region: what fills it.
        tensor: whose place it takes.
    """

    __slots__ = ("__weakref__", "dtype", "fingerprint", "region", "shape", "value")

    def __init__(self, region: Repeats, tensor: Tensor) -> None:
        self.region, self.shape, self.dtype = region, tensor.shape, tensor.dtype
        self.fingerprint: Fingerprint | None = None
        """Fingerprint of the tensor, where what fills its place is compared with it."""
        self.value: Tensor | Kept | None = None


def unpack(kept: Holder | Passed) -> Tensor:
    """Return the tensor that autograd asks for; what comes first has its region repeated."""
    if isinstance(kept, Passed):
        return kept.get()
    if kept.value is None:
        kept.region.repeat()
    value, kept.value = kept.value, None  # whoever asks twice has it computed twice
    assert value is not None
    return value.get() if isinstance(value, Kept) else value


class Fingerprints:
    """Takes the fingerprints of what a call keeps in forward.

    Args:
        buffers: of its module, which it may change after they were kept; they have a way of their own.
    """

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._buffers = {storage_key(buffer) for buffer in buffers}
        self._unfilled: list[tuple[weakref.ref[Holder], Tensor]] = []

    def take(self, holder: Holder, tensor: Tensor) -> None:
        """Take the fingerprint of `tensor`.

        Of what may be yet to be filled, when two others have come or the call ends.
        """
        if self._unfilled and _is_alike(self._unfilled[-1][1], tensor):
            self._unfilled.pop()  # RReLU's noise, which is kept before its input, and in evaluation never drawn
        while len(self._unfilled) > 1:
            self._take_first()
        if storage_key(tensor) in self._buffers:
            return
        if not is_unfilled(tensor):
            holder.fingerprint = fingerprint(tensor)
        elif tensor.device.type == "cpu":  # elsewhere kernels leave parts of what they keep as it was allocated
            self._unfilled.append((weakref.ref(holder), tensor))

    def finish(self) -> None:
        """End the call."""
        while self._unfilled:
            self._take_first()

    def _take_first(self) -> None:
        reference, tensor = self._unfilled.pop(0)
        if (holder := reference()) is not None:
            holder.fingerprint = fingerprint(tensor)


class Collector(Keeper):
    """Gives what a repetition keeps to those who wait for it.

    Args:
        holders: all of the region, in the order in which it made them.
        modules: names those that the region calls, for messages.
        edited: names parameters that the calls have edited in place.
    """

    def __init__(self, holders: list[weakref.ref[Holder]], modules: str, edited: Sequence[str] = ()) -> None:
        self._holders, self._modules, self._edited = holders, modules, tuple(edited)
        waiting = [number for number, reference in enumerate(holders) if _waits(reference())]
        self._last, self._num_seen = waiting[-1], 0
        self._unfilled: tuple[torch.Size, torch.dtype] | None = None
        """Latest tensor, where the kernel that comes may be what fills it."""
        self._to_compare: list[tuple[Fingerprint, Tensor]] = []
        """Fingerprints, and tensors that may be yet to be filled."""
        self.store: SavedTensorStore | None = None
        self.is_complete = False
        """Whether everybody has got a tensor, so that what follows is not wanted."""

    @contextlib.contextmanager
    def scope(self, store: SavedTensorStore | None) -> Iterator[None]:
        """Take what autograd keeps inside, through `store` if there is one."""
        self.store = store
        if store is None:
            with saved_tensors_hooks(self.pack, _same):
                yield
        else:
            with store.scope(self.pack):
                yield

    def pack(self, tensor: Tensor) -> Tensor | Kept:
        """Fill one holder, and stop behind the last."""
        kept = tensor.detach() if self.store is None else self.store.pack(tensor)
        if tensor.is_leaf and tensor.requires_grad:
            return kept
        number, unfilled = self._num_seen, self._unfilled
        self._num_seen += 1
        self._unfilled = (tensor.shape, tensor.dtype) if is_unfilled(tensor) else None
        if number > self._last:
            self._stop()
        holder = self._holders[number]()
        if _waits(holder):
            assert holder is not None
            if (holder.shape, holder.dtype) != (tensor.shape, tensor.dtype):
                raise self._error(
                    f"kept {list(holder.shape)} {holder.dtype} in forward and {list(tensor.shape)} {tensor.dtype} when "
                    "it was run again"
                )
            if holder.fingerprint is not None:
                self._to_compare.append((holder.fingerprint, tensor))
                if not is_unfilled(tensor):
                    self._compare()
            holder.value = kept
        # RReLU's noise comes before its input, and both before the kernel that draws it.
        if number == self._last and not (tensor.requires_grad and unfilled == (tensor.shape, tensor.dtype)):
            self._stop()
        return kept

    def _stop(self) -> NoReturn:
        self.is_complete = True
        raise Stop

    def _compare(self) -> None:
        """Compare with what was kept in forward, as far as that is known."""
        before, tensor = self._to_compare.pop()
        again = fingerprint(tensor)
        if again is not None and not is_near(before, again, tensor.dtype, tensor.numel()):
            raise self._error("computed other values when it was run again than in forward")

    def check(self) -> None:
        """Raise `RegionError` unless everybody got a tensor, and the right one."""
        while self._to_compare:
            self._compare()
        if self._num_seen <= self._last:
            raise self._error(
                f"kept {len(self._holders)} tensors in forward and {self._num_seen} when it was run again"
            )

    def _error(self, what: str) -> RegionError:
        named = ", ".join(f"`{name}`" for name in self._edited)
        why = f"It edits in place, each time that it runs, the parameters {named}" if named else _UNKNOWN
        error = RegionError(
            f"A checkpointed region {what}: {self._modules}. {why}. Leave this module out of checkpointing."
        )
        error.edited = self._edited
        return error


_UNKNOWN = (
    "It reads something that has changed in between: a global variable, an object that it was given, a generator that "
    "nobody knows; or it calls a function that TorchScript has compiled in between"
)


def _is_alike(unfilled: Tensor, tensor: Tensor) -> bool:
    return tensor.requires_grad and (unfilled.shape, unfilled.dtype) == (tensor.shape, tensor.dtype)


def is_unfilled(tensor: Tensor) -> bool:
    """Return whether it may be noise that is yet to be drawn.

    What torch has filled has a version above 0, as dropout's.
    """
    return not tensor.requires_grad and tensor.is_floating_point() and version_of(tensor) == 0


def _waits(holder: Holder | None) -> bool:
    return holder is not None and holder.value is None


def _same(kept: Any) -> Any:
    return kept
