"""Offload: what an entry holds leaves the device's memory between forward and backward, and comes back bit for bit.

On CUDA to pinned host memory: copies run on a stream of their own, and while backward works on one entry the next ones
are already being fetched. On CPU to a temporary file, which the system's page cache may or may not hold: those pages
are free to be dropped, but a limit on a container's memory may count them.
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_memsave.saved_tensors.encodings import Encoding, Identity, Recompute
from lightning_memsave.torch_internals.compiled_regions import call_at_end
from lightning_memsave.torch_internals.fake_tensors import is_fake

_MIN_BYTES = 1 << 16  # smaller tensors stay
_NUM_AHEAD = 2  # entries that are fetched before backward asks for them


class Offloader:
    """Moves what encodings hold somewhere else.

    Args:
        folder: where the file of CPU tensors lies; the system's temporary folder by default.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._file: File | None = None
        self._streams: dict[torch.device, Stream] = {}

    def __getstate__(self) -> dict[str, object]:  # a copied module opens a file of its own
        return {"_folder": self._folder, "_file": None, "_streams": {}}

    def take(self, encoding: Encoding) -> Encoding | None:
        """Return an encoding that holds the same elsewhere; `None` when it is not worth moving."""
        # Of a view the whole storage moves: every byte, in the order in which they lie.
        payload = [encoding.flat()] if isinstance(encoding, Identity) else list(encoding.payload())
        if isinstance(encoding, (Recompute, Offloaded)) or sum(t.nbytes for t in payload) < _MIN_BYTES:
            return None
        return Offloaded(encoding, [self._place(tensor) for tensor in payload])

    def _place(self, tensor: Tensor) -> OffloadSlot:
        if tensor.device.type == "cuda":
            if tensor.device not in self._streams:
                self._streams[tensor.device] = Stream(tensor.device)
            return InHostMemory(tensor, self._streams[tensor.device])
        if self._file is None:
            self._file = File(self._folder)
        return InFile(tensor, self._file)


class OffloadSlot(Protocol):
    """Place of one tensor that was moved."""

    def get(self) -> Tensor:
        """Return the tensor, back on its device."""


class Offloaded:
    """An encoding whose tensors are elsewhere."""

    kind = "offloaded"

    def __init__(self, encoding: Encoding, places: list[OffloadSlot]) -> None:
        self.fidelity, self._places = encoding.fidelity, places
        self._encoding = None if isinstance(encoding, Identity) else encoding
        self._empty()

    def flat(self) -> Tensor:
        """Return the elements, fetched and decoded."""
        values = [place.get() for place in self._places]
        if self._encoding is None:
            return values[0]
        for tensor, value in zip(self._encoding.payload(), values, strict=True):
            tensor.data = value
        try:
            return self._encoding.flat()
        finally:
            self._empty()

    def _empty(self) -> None:
        for tensor in self._encoding.payload() if self._encoding is not None else ():
            tensor.data = tensor.new_empty(0)

    def payload(self) -> Iterator[Tensor]:
        """Yield nothing: no tensor is on the device."""
        return iter(())


# ------------------------------------------------------------------------------- CPU: a file
class File:
    """A temporary file without a name; places that were given back are used anew by tensors of the same size."""

    def __init__(self, folder: str | None) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # lives as long as this object
        call_at_end(self, self._file.close)
        self._lock, self._end = threading.RLock(), 0  # taken again where the collector runs inside of it
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def write(self, tensor: Tensor) -> int:
        """Write a tensor's bytes; returns where they lie."""
        with self._lock:
            if free := self._free[tensor.nbytes]:
                offset = free.pop()
            else:
                offset = self._end
                self._end += tensor.nbytes
            self._file.seek(offset)
            self._file.write(_bytes(tensor))
            return offset

    def read(self, offset: int, out: Tensor) -> None:
        """Fill `out` with the bytes at `offset`."""
        with self._lock:
            self._file.seek(offset)
            count = self._file.readinto(_bytes(out))
            if count != out.nbytes:
                raise OSError(f"offload file: {count} of {out.nbytes} bytes read at {offset}")

    def give_back(self, offset: int, num_bytes: int) -> None:
        """Free the place at `offset`, from which nobody reads any more."""
        with self._lock:
            self._free[num_bytes].append(offset)


def _bytes(tensor: Tensor) -> memoryview:
    flat: Any = tensor.view(-1).view(torch.uint8).numpy()  # an array has the buffer protocol, says only Python 3.12
    return memoryview(flat)


class InFile:
    """A CPU tensor in a file."""

    def __init__(self, tensor: Tensor, file: File) -> None:
        self._shape, self._dtype, self._file = tensor.shape, tensor.dtype, file
        self._offset: int | None = None  # of a fake tensor, which has no bytes
        if not is_fake(tensor):
            self._offset = file.write(tensor.contiguous())
            call_at_end(self, file.give_back, self._offset, tensor.nbytes)

    def get(self) -> Tensor:
        """Read it."""
        out = torch.empty(self._shape, dtype=self._dtype, device="cpu")
        if self._offset is not None:
            self._file.read(self._offset, out)
        return out


# ------------------------------------------------------------------------------- CUDA: pinned host memory
class Stream:
    """The copying stream of one device, and what went over it, in order."""

    def __init__(self, device: torch.device) -> None:
        self.side = torch.cuda.Stream(device)
        self._sent: weakref.WeakValueDictionary[int, InHostMemory] = weakref.WeakValueDictionary()
        self._num_sent = 0

    def sent(self, place: InHostMemory) -> int:
        """Note a tensor; returns its number, which stays its own."""
        self._sent[self._num_sent] = place
        self._num_sent += 1
        return self._num_sent - 1

    def fetch_before(self, number: int) -> None:
        """Start fetching what backward asks for next: it goes from the last to the first."""
        for earlier in range(number - 1, number - 1 - _NUM_AHEAD, -1):
            if (place := self._sent.get(earlier)) is not None:
                place.fetch()


class InHostMemory:
    """A CUDA tensor in pinned host memory."""

    def __init__(self, tensor: Tensor, stream: Stream) -> None:
        self._device, self._stream = tensor.device, stream
        self._fetched: Tensor | None = None
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        stream.side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream.side):
            self._host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream.side)  # its memory is not given away before the copy is done
        self._number = stream.sent(self)
        self._ready = torch.cuda.Event()

    def fetch(self) -> None:
        """Start the copy back; the stream's order puts it behind the copy out."""
        if self._fetched is None:
            with torch.cuda.stream(self._stream.side):
                self._fetched = self._host.to(self._device, non_blocking=True)
                self._ready.record(self._stream.side)

    def get(self) -> Tensor:
        """Wait for it on the device, not on the host."""
        self.fetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._ready)
        fetched.record_stream(current)
        self._stream.fetch_before(self._number)
        return fetched
