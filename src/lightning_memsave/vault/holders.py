"""What the graph holds in place of a region's tensors, and what fills it when the region is repeated."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_memsave.core.errors import RegionError
from lightning_memsave.vault.entries import Passed
from lightning_memsave.vault.graph import Kept, version_of
from lightning_memsave.vault.inputs import Keeper
from lightning_memsave.vault.vault import Vault


class Repeats(Protocol):
    """A region, as its holders know it."""

    def repeat(self) -> None:
        """Give every holder that waits its tensor."""


class Stop(BaseException):
    """Nothing that follows in a repetition is wanted."""


class Holder:
    """What the graph holds in place of a tensor.

    Args:
        region: what fills it.
        tensor: whose place it takes.
    """

    __slots__ = ("__weakref__", "dtype", "region", "shape", "value")

    def __init__(self, region: Repeats, tensor: Tensor) -> None:
        self.region, self.shape, self.dtype = region, tensor.shape, tensor.dtype
        self.value: Tensor | Kept | None = None


def unpack(kept: Holder | Passed) -> Tensor:
    """The tensor that autograd asks for; what comes first has its region repeated."""
    if isinstance(kept, Passed):
        return kept.get()
    if kept.value is None:
        kept.region.repeat()
    value, kept.value = kept.value, None  # whoever asks twice has it computed twice
    assert value is not None
    return value.get() if isinstance(value, Kept) else value


class Collector(Keeper):
    """Gives what a repetition keeps to those who wait for it.

    Args:
        holders: all of the region, in the order in which it made them.
    """

    def __init__(self, holders: list[weakref.ref[Holder]]) -> None:
        self._holders = holders
        waiting = [number for number, reference in enumerate(holders) if _waits(reference())]
        self._last, self._num_seen = waiting[-1], 0
        self._unfilled: tuple[torch.Size, torch.dtype] | None = None
        """Of the latest tensor, where the kernel that comes may be what fills it."""
        self.vault: Vault | None = None

    @contextlib.contextmanager
    def scope(self, vault: Vault | None) -> Iterator[None]:
        """What autograd keeps inside comes here, through `vault` if there is one."""
        self.vault = vault
        if vault is None:
            with saved_tensors_hooks(self.pack, _same):
                yield
        else:
            with vault.scope(self.pack):
                yield

    def pack(self, tensor: Tensor) -> Tensor | Kept:
        """Fill one holder, and stop behind the last."""
        kept = tensor.detach() if self.vault is None else self.vault.pack(tensor)
        if tensor.is_leaf and tensor.requires_grad:
            return kept
        number, unfilled = self._num_seen, self._unfilled
        self._num_seen += 1
        self._unfilled = (tensor.shape, tensor.dtype) if _may_be_unfilled(tensor) else None
        if number > self._last:
            raise Stop
        holder = self._holders[number]()
        if _waits(holder):
            assert holder is not None
            if (holder.shape, holder.dtype) != (tensor.shape, tensor.dtype):
                raise RegionError(
                    f"A checkpointed region kept {list(holder.shape)} {holder.dtype} in forward and "
                    f"{list(tensor.shape)} {tensor.dtype} when it was run again. {_ADVICE}"
                )
            holder.value = kept
        # RReLU's noise is kept before its input, and both before the kernel that draws it.
        if number == self._last and not (tensor.requires_grad and unfilled == (tensor.shape, tensor.dtype)):
            raise Stop
        return kept

    def check(self) -> None:
        """Raise `RegionError` unless everybody got a tensor."""
        if self._num_seen <= self._last:
            raise RegionError(
                f"A checkpointed region kept {len(self._holders)} tensors in forward and {self._num_seen} when it was "
                f"run again. {_ADVICE}"
            )


_ADVICE = "It must do the same twice: no Python or numpy randomness, no counters. Leave this module out."


def _may_be_unfilled(tensor: Tensor) -> bool:
    """Whether it may be noise that is yet to be drawn; what torch has filled has a version above 0, as dropout's."""
    return not tensor.requires_grad and tensor.is_floating_point() and version_of(tensor) == 0


def _waits(holder: Holder | None) -> bool:
    return holder is not None and holder.value is None


def _same(kept: Any) -> Any:
    return kept
