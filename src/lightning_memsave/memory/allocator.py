"""The accelerator allocator's own peak: the figure that decides whether a run fits on a GPU.

CUDA, ROCm and XPU count allocated and reserved bytes and keep their maxima; CPU and MPS keep none.
"""

from __future__ import annotations

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
    """Whether the allocator of `device` keeps peak counters."""
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device), "reset_peak_memory_stats")


def reset_peak(device: torch.device) -> None:
    """Start a new maximum; does nothing where the allocator keeps none."""
    if counts_peaks(device):
        torch.get_device_module(device).reset_peak_memory_stats(device)


def read_peak(device: torch.device) -> AllocatorBytes | None:
    """The maxima since the last reset, or `None` where the allocator keeps none."""
    if not counts_peaks(device):
        return None
    module = torch.get_device_module(device)
    return AllocatorBytes(
        allocated_bytes=module.max_memory_allocated(device), reserved_bytes=module.max_memory_reserved(device)
    )


def read_current(device: torch.device) -> AllocatorBytes | None:
    """What is allocated and reserved now, or `None` where the allocator keeps no count."""
    if not counts_peaks(device):
        return None
    module = torch.get_device_module(device)
    return AllocatorBytes(
        allocated_bytes=module.memory_allocated(device), reserved_bytes=module.memory_reserved(device)
    )


def total_bytes(device: torch.device) -> int | None:
    """The memory of the device, or `None` where it is not told."""
    if not counts_peaks(device):
        return None
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def address_space_left() -> float:
    """Bytes of addresses that this process may still take; infinite without a limit (`ulimit -v`)."""
    if sys.platform != "linux":
        return math.inf
    import resource  # of Unix

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return math.inf
    return limit - mmap.PAGESIZE * int(Path("/proc/self/statm").read_text().split()[0])
