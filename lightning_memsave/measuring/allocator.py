"""The accelerator allocator's own peak: the figure that decides whether a run fits on a GPU.

CUDA, ROCm and XPU count allocated and reserved bytes and keep their maxima; CPU and MPS keep none.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import mmap
import sys
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class AllocatorBytes:
    """Bytes handed out to tensors and bytes held from the device: now, or each at its own maximum since a reset."""

    allocated_bytes: int
    reserved_bytes: int


def counts_peaks(device: torch.device) -> bool:
    """Return whether the allocator of `device` keeps peak counters."""
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "reset_peak_memory_stats")


def reset_peak(device: torch.device) -> None:
    """Start a new maximum; does nothing where the allocator keeps none."""
    if counts_peaks(device):
        torch.get_device_module(device).reset_peak_memory_stats(device)


def read_peak(device: torch.device) -> AllocatorBytes | None:
    """Return the maxima since the last reset, or `None` where the allocator keeps none."""
    if not counts_peaks(device):
        return None
    module = torch.get_device_module(device)
    return AllocatorBytes(
        allocated_bytes=module.max_memory_allocated(device), reserved_bytes=module.max_memory_reserved(device)
    )


def read_current(device: torch.device) -> AllocatorBytes | None:
    """Return what is allocated and reserved now, or `None` where the allocator keeps no count."""
    if not counts_peaks(device):
        return None
    module = torch.get_device_module(device)
    return AllocatorBytes(
        allocated_bytes=module.memory_allocated(device), reserved_bytes=module.memory_reserved(device)
    )


def total_bytes(device: torch.device) -> int | None:
    """Return the memory of the device, or `None` where it is not told."""
    if not counts_peaks(device):
        return None
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def address_space_left() -> float:
    """Return bytes of addresses that this process may still take; infinite without a limit (`ulimit -v`)."""
    if sys.platform != "linux":
        return math.inf
    import resource  # of Unix

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return limit - mmap.PAGESIZE * int(Path("/proc/self/statm").read_text().split()[0])


_RESERVE_BYTES = 2**25
_held_back: list[mmap.mmap] = []


def hold_addresses_back() -> None:
    """Keep some addresses, under a limit, for what runs once memory has run out: threads, kernels compiled then.

    They take no memory, and are there again for everybody after `free_memory`.
    """
    if not _held_back and 4 * _RESERVE_BYTES <= address_space_left() < math.inf:
        with contextlib.suppress(OSError):
            _held_back.append(mmap.mmap(-1, _RESERVE_BYTES, prot=mmap.PROT_READ))


def free_memory() -> None:
    """Give back what a try that ran out of memory has left behind."""
    while _held_back:
        _held_back.pop().close()
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # other C libraries than GNU's have none
            ctypes.CDLL(None).malloc_trim(0)
