"""A tensor of optimizer state that is not on its parameter's device: bit for bit, fetched when its parameter steps.

On CUDA: pinned host memory, which is allocated once; copies run on a stream of their own, so that the state of the
parameters that step next is on its way while one steps. On CPU: the temporary file of `saved_tensors.offload`, whose
pages the system may drop.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.saved_tensors.offload import File, InFile


@functools.cache
def _file() -> File:
    return File(None)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Elsewhere:
    """A tensor that is elsewhere.

    Args:
        tensor: is copied.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._place: Any = _Pinned(tensor) if tensor.device.type == "cuda" else InFile(tensor, _file())

    def fetch(self) -> None:
        """Start the copy, where one can be started without waiting for it."""
        if isinstance(self._place, _Pinned):
            self._place.fetch()

    def get(self) -> Tensor:
        """Return the tensor on its device, a copy."""
        found: Tensor = self._place.get()
        return found

    def put(self, tensor: Tensor) -> None:
        """Keep another value of the same shape and type."""
        if isinstance(self._place, _Pinned):
            self._place.put(tensor)
        else:
            self._place = InFile(tensor, _file())

    def host(self) -> Tensor:
        """Return the tensor in host memory, a copy: for checkpoints."""
        return self._place.host() if isinstance(self._place, _Pinned) else self.get()

    def __reduce__(self) -> tuple[Any, ...]:
        return Elsewhere, (self.get(),)  # for copies and pickles


class _Pinned:
    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._ready = torch.cuda.Event()
        self.put(tensor)

    def put(self, tensor: Tensor) -> None:
        side = _side_stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(side)  # its memory is not given away before the copy is done
        self._fetched: Tensor | None = None

    def fetch(self) -> None:
        if self._fetched is None:
            with torch.cuda.stream(_side_stream(self._device)):  # its order puts this behind the copy out
                self._fetched = self._host.to(self._device, non_blocking=True)
                self._ready.record()

    def get(self) -> Tensor:
        self.fetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._ready)
        fetched.record_stream(current)
        return fetched

    def host(self) -> Tensor:
        _side_stream(self._device).synchronize()
        return self._host.clone()


def fetch_ahead(states: Iterable[Any]) -> None:
    """Start fetching whatever is elsewhere in these states."""
    for state in states:
        for value in state.values():
            if isinstance(value, Elsewhere):
                value.fetch()
