"""Verification: the peak again, from the allocator's own events, with the workspace inside kernels.

`torch.profiler` records every allocation and every free of the CPU allocator. Their running sum, on top of what was
alive at the start, is the true peak; the ledger's peak subtracted from it is the workspace. It costs memory and a few
per cent of time, so it is asked for, never on by itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_memsave.torch_internals.private_names import missing


def allocation_peak(step: Callable[[], object], held_bytes: int) -> int:
    """Run `step` twice, and return the peak of allocated CPU bytes in the second, kernel workspace included.

    The first lets the profiler know what the second frees, such as its gradients.

    Args:
        step: one training step; runs under the profiler.
        held_bytes: what is alive before a step and was allocated before it, as `Measurement.held_bytes` counts it.
    """
    with AllocationProfile() as profiled:
        step()
        profiled.mark()
        step()
    return held_bytes + profiled.peak_bytes


_MARK_BYTES = 1_000_003
"""A size that no tensor has."""


class AllocationProfile:
    """Profiles CPU allocations between its start and its end; afterwards `peak_bytes` is the peak above the start.

    The profiler does not see the end of what was allocated before it, such as gradients of the last step that this one
    frees, unless it is told. Another way is `mark`: it makes the present moment the start, so that what the step before
    allocates is known.

    Args:
        held: storages that were there before; each end counts.

    Raises:
        RuntimeError: when it starts, if another profiler runs, or this torch has no events of allocation.
    """

    def __init__(self, held: Iterable[torch.UntypedStorage] = ()) -> None:
        # With `acc_events` torch makes objects of all events, which takes ten times as long as the rest.
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._held = [weakref.ref(each, functools.partial(self._mark, -each.nbytes())) for each in held]
        self._marks: list[int | None] = []
        """Changes in bytes that the marks stand for, in order; `None` for a start."""
        self.peak_bytes = 0

    def mark(self) -> None:
        """Count from here on."""
        self._mark(None)

    def _mark(self, change: int | None, _: object = None) -> None:
        self._marks.append(change)
        torch.empty(_MARK_BYTES, dtype=torch.uint8, device="cpu")  # its two events are found again

    def __enter__(self) -> AllocationProfile:
        if gone := missing("allocation events"):
            raise RuntimeError(f"This version of torch has no `{gone[0]}`.")
        if torch._C._autograd._profiler_enabled():  # torch would end the other one silently
            raise RuntimeError("Another profiler runs, and torch can have one at a time.")
        with _without_log_lines(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # up to 2.12 it warns that only the last cycle is kept, and there is one
            self._profile.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._held.clear()
        self._profile.__exit__(*exc_info)
        self.peak_bytes = peak_of_changes(self._changes())

    def _changes(self) -> list[int]:
        """Return the changes in bytes, from the latest start on."""
        found, marks = list[int](), iter(self._marks)
        for size in _allocation_sizes(self._profile):
            if size == -_MARK_BYTES:
                change = next(marks)
                if change is None:
                    found.clear()
                else:
                    found.append(change)
            elif size != _MARK_BYTES:
                found.append(size)
        return found


def peak_of_changes(changes: Iterable[int]) -> int:
    """Return the highest running sum of signed byte counts, at least 0.

    >>> peak_of_changes([5, -2, 4, -7])
    7
    """
    running = peak = 0
    for change in changes:
        running += change
        peak = max(peak, running)
    return peak


@contextlib.contextmanager
def _without_log_lines() -> Iterator[None]:
    """Keep torch's profiler from writing a line for each start and end; it asks for its log level once."""
    name, before = "KINETO_LOG_LEVEL", os.environ.get("KINETO_LOG_LEVEL")
    os.environ.setdefault(name, "6")  # above all levels
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _allocation_sizes(profiler: profile) -> list[int]:
    """Return the signed sizes of every CPU allocation since the profiler's start, and of its free, in time order.

    A free of what an *earlier* profile saw allocated is left out: torch keeps such an address until it sees it freed,
    and by then it may belong to something else, of another size.
    """
    from torch._C._profiler import _ExtraFields_Allocation

    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    found: list[tuple[int, int, int]] = []
    pending = list(profiler.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation) and fields.device.type == "cpu":
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    sizes, known = list[int](), set[int]()
    for _, address, size in sorted(found, key=itemgetter(0)):
        if size > 0:
            known.add(address)
        elif address in known:
            known.remove(address)
        else:
            continue
        sizes.append(size)
    return sizes
