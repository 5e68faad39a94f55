"""Memory that ran out: how to tell it from other errors, and what to say about it."""

from __future__ import annotations

from collections.abc import Collection

import torch

from lightning_memsave.core.remedies import remedies_for
from lightning_memsave.core.units import format_bytes
from lightning_memsave.measuring.allocator import read_current
from lightning_memsave.measuring.ledger import Measurement

_MESSAGES = (
    "out of memory",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "std::bad_alloc",
    "could not create a primitive",  # oneDNN, as are those that follow
    "could not create a memory",
    "could not execute a primitive",
    "can't start new thread",  # threads need address space; Python's, and autograd's
    "unable to mmap",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudnn error: cudnn_status_not_supported.",  # of an input too large for its kernels
    "device_allocation_failed",
    "ur_result_error_out_of_device_memory",
    "ur_result_error_out_of_host_memory",
)
_NO_ENGINE, _NEARLY_FULL = "unable to find an engine to execute this computation", 0.1
_FRAGMENTED_FRACTION = 0.1  # of the reserved bytes


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out.

    Torch's class, Python's, or the texts of CUDA, cuDNN, XPU and CPU; also of an error that was raised from such a one.

    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."))
    True
    """
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return any(map(_says_out_of_memory, causes))


def _says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error).lower()
    return any(m in text for m in _MESSAGES) or (_NO_ENGINE in text and _is_nearly_full())


def _is_nearly_full() -> bool:
    """Whether CUDA's current device has little left, for which cuDNN has the words that it has for unknown shapes."""
    if not torch.cuda.is_available():
        return False
    free, total = torch.cuda.mem_get_info()
    return free < _NEARLY_FULL * total


class OutOfMemoryUnrecoverableError(torch.OutOfMemoryError):
    """Memory ran out, and there is nothing left to do about it."""


def fragmentation(device: torch.device) -> str:
    """Return what the allocator of `device` holds, and what to do when much of that is in pieces.

    Empty where it is unknown.

    Call it while the failed step is still alive: what was allocated then says how much was in use.
    """
    held = read_current(device)
    if held is None:
        return ""
    unused = held.reserved_bytes - held.allocated_bytes
    text = f" Allocated are {format_bytes(held.allocated_bytes)} of {format_bytes(held.reserved_bytes)} reserved."
    if unused > _FRAGMENTED_FRACTION * held.reserved_bytes:
        text += (
            f" The other {format_bytes(unused)} lie between tensors, in pieces: start the program with "
            "PYTORCH_ALLOC_CONF=expandable_segments:True."
        )
    return text


def nothing_left(
    module: torch.nn.Module,
    last_try: Measurement,
    can_cut: bool,
    applied: Collection[str],
    error: str,
    fixed: Collection[str] = (),
    why_whole: str = "",
) -> str:
    """Return the message when every measure is taken.

    Args:
        module: the model.
        last_try: what was alive at its highest point.
        can_cut: whether smaller microbatches were possible at all.
        applied: what is on, by the names of the compatibility table.
        error: what the allocator said.
        fixed: what of it was set, and the way of training: what these refuse is no help.
        why_whole: why they were not, if that is known.
    """
    found = {name: size for name, size in last_try.by_category.items() if size}
    largest_first = sorted(found, key=found.__getitem__, reverse=True)
    alive = ", ".join(f"{name} {format_bytes(found[name])}" for name in largest_first)
    tried = {*applied, "out-of-memory recovery", "microbatching", "checkpointing"}  # as far as they work here
    remedies = dict.fromkeys(remedy for name in largest_first for remedy in remedies_for(name, tried, fixed)[:1])
    advice = f"What would save most, in this order: {', '.join(remedies)}" if remedies else "Nothing else would help"
    last = "at one sample per microbatch" if can_cut else "and this batch cannot be cut into microbatches"
    if why_whole and not can_cut:
        last += f" ({why_whole.rstrip('.')})"
    return (
        f"Memory runs out {last}, after every exact measure. At its highest point the last try of "
        f"{type(module).__name__} held: {alive}. {advice}. Nothing of this batch was "
        f"applied, and checkpoints are as they were. The error was: {error}"
    )


def nothing_left_jointly(applied: Collection[str], fixed: Collection[str]) -> str:
    """Return the message when every measure is taken that processes can take together.

    Args:
        applied: what is on, by the names of the compatibility table.
        fixed: what of it was set, and the way of training: what these refuse is no help.
    """
    tried = {*applied, "out-of-memory recovery", "microbatching"}
    regions = {
        "checkpointing": '`checkpointing="blocks"` (computes activations again)',
        "tiling": '`tiling="samples"` (modules in slices, where these are independent)',
    }
    blocks = [remedy for name, remedy in regions.items() if name not in tried]
    found = [remedies_for(name, tried, fixed)[:1] for name in ("optimizer_state", "weights")]
    advice = ", ".join([*blocks, *(remedy for remedies in found for remedy in remedies), "more processes"])
    return (
        "Memory runs out after every measure that processes take together (activations recomputed, and microbatches "
        f"of fewer samples, as far as the batch can be cut). What would save more: {advice}. Nothing of this batch was "
        "applied, and checkpoints are as they were."
    )
