"""The meter: decides which steps of a run are measured, measures them, and keeps the highest peak.

Tracking costs some tens of microseconds per operation, so it runs on steps 2 and 3 and every `every`-th. A step is what
lies between two optimizer steps: with gradient accumulation, several batches. The first step is never tracked: it
creates state (optimizers, caches, compiled code) that the later ones start with. Under the ledger `torch.compile`d
modules would run eagerly, take what eager code takes, and draw other random numbers. So their steps are measured by the
allocator: its peak where it counts one, its events on CPU. What was not there before the step goes under `activations`.
So are all steps where a subclass of Tensor exists that cannot be made under the ledger.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import MemoryReport
from lightning_memsave.measuring import allocator
from lightning_memsave.measuring.ledger import Ledger, Measurement
from lightning_memsave.measuring.profiler_peak import AllocationProfile
from lightning_memsave.measuring.storages import storages
from lightning_memsave.torch_internals.compiled_regions import compiled_regions, num_compiled_graphs
from lightning_memsave.torch_internals.private_names import missing
from lightning_memsave.torch_internals.tensor_subclasses import made_only_unwatched

_LONGEST_STEP = 256  # batches
_MOST_TIMED = 10_000  # steps


class Meter:
    """Measures a run step by step: `begin` before a step's first operation, `end` after its last.

    Args:
        every: measure every this many steps, besides the first ones.
        workspace: profile the step after each measured one, to learn the workspace inside kernels (CPU only).
        first: the first steps that are measured; of training not the very first, in which optimizers make their state.
        is_timed: whether steps that are not measured are timed.
    """

    def __init__(
        self, every: int = 200, *, workspace: bool = False, first: tuple[int, ...] = (2, 3), is_timed: bool = True
    ) -> None:
        if every < 1:
            raise setting_error("every", "must be a positive integer", every, "Use 200, or 1 to measure each step.")
        if workspace and every < 2:
            raise setting_error("every", "must be 2 or more with `workspace=True`", every, "The next step is profiled.")
        self.every, self._first, self._has_clock = every, first, is_timed
        self._workspace = workspace
        self._ledger: Ledger | None = None
        self._held: Measurement | None = None  # when the step began, if it is left to the allocator
        self._profile: AllocationProfile | None = None
        self._profile_next: Measurement | None = None
        self._profile_place = 0  # of the measured batch within its step
        self._workspace_bytes: int | None = None
        self._device = torch.device("cpu")
        self._num_graphs: int | None = None  # that were compiled before the run
        self._num_steps = 0
        self._num_updates: int | None = None
        self._num_batches_in_step = 0
        self._stop: Callable[[], Seconds] | None = None  # of this batch's stopwatch
        self._is_timed = True  # nothing is measured in this step
        self._batches: list[tuple[Seconds, int | None]] = []  # seconds and samples, of this step
        self._speeds: deque[tuple[float, int | None]] = deque(maxlen=_MOST_TIMED)  # seconds and samples, of each step
        self._unread: tuple[tuple[Seconds, ...], int | None] | None = None  # the latest step
        self._num_samples: int | None = None
        self._peak: Measurement | None = None
        self._reserved_bytes: int | None = None
        self.num_steps_measured, self._last_measured = 0, 0
        self.tracked: Measurement | None = None
        """The step that has just ended, if it was measured."""
        self._is_scheduled, self._measured_until = False, 0

    def begin(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        batch: object,
        device: torch.device,
        num_updates: int | None = None,
        num_samples: int | None = None,
        is_compiled: bool = False,
    ) -> None:
        """Start a batch; enters the ledger when its step is to be measured.

        Args:
            model: its parameters, buffers and gradients are booked.
            optimizers: their state is booked.
            batch: the tensors of the batch are booked.
            device: where memory is measured.
            num_updates: how often optimizers have stepped so far. Batches between two updates are one step; by default
                each batch is.
            num_samples: in the batch, for the samples per second.
            is_compiled: whether the model runs compiled in a way that it does not show itself.
        """
        self.abandon()  # a batch that Lightning skipped has had no end
        if self._num_graphs is None:
            self._num_graphs = num_compiled_graphs()
        self._is_timed &= self._stop is None
        self._num_batches_in_step += 1
        is_new = num_updates is None or num_updates != self._num_updates
        if is_new:
            self._num_updates, self._num_batches_in_step = num_updates, 0
        # A step without end belongs to a loop that hides its optimizers; there, each batch counts.
        if is_new or self._num_batches_in_step > _LONGEST_STEP:
            self._end_step()
            self._num_steps += 1
        self._device = device
        allocator.reset_peak(device)
        self._is_scheduled = not missing("autograd") and (
            self._num_steps in self._first or (self._num_steps > 1 and self._num_steps % self.every == 0)
        )
        if self._is_scheduled or self._num_steps <= self._measured_until:
            ledger = Ledger(device).watching(model, optimizers, batch)
            has_compiled = is_compiled or num_compiled_graphs() != self._num_graphs or any(compiled_regions(model))
            if (has_compiled or made_only_unwatched()) and (device.type == "cpu" or allocator.counts_peaks(device)):
                self._held = self._leave_to_allocator(ledger)
            else:
                ledger.__enter__()
                self._ledger = ledger
                _measuring.add(self)
        elif self._workspace and self._profile_next is not None and device.type == "cpu" and self._is_its_like:
            self._leave_to_allocator(Ledger(device).watching(model, optimizers, batch))
        self._num_samples = num_samples
        self._stop = _stopwatch(device) if self._has_clock else _no_stopwatch

    def _leave_to_allocator(self, ledger: Ledger) -> Measurement | None:
        """Return what there is when the step begins.

        `None` on CPU while somebody else profiles: there can be one profiler.
        """
        if not allocator.counts_peaks(self._device):
            profile = AllocationProfile(ledger.booked())
            try:
                profile.__enter__()
            except RuntimeError:
                return None
            self._profile = profile
        with ledger:
            pass
        return ledger.measurement

    @property
    def _is_its_like(self) -> bool:
        """Whether this batch has the place in its step that the measured one had, the last, which updates."""
        return self._num_batches_in_step % (self._profile_place + 1) == self._profile_place

    def _end_step(self) -> None:
        if self._is_timed and self._num_steps > 1 and self._batches:
            self._read_seconds()
            taken, num_samples = zip(*self._batches, strict=True)
            self._unread = taken, None if None in num_samples else sum(num_samples)
        self._is_timed, self._batches = True, []

    def _read_seconds(self) -> None:
        """Wait for the latest step: when the next one has ended, so that a device has work while it is asked."""
        if self._unread is not None:
            (taken, num_samples), self._unread = self._unread, None
            self._speeds.append((sum(seconds() for seconds in taken), num_samples))

    @property
    def scheduled_bytes(self) -> int | None:
        """The peak of the step that has just ended, if it was one that is measured anyway: the same ones on every rank.

        Reserved bytes where an allocator tells them.
        """
        if self.tracked is None or not self._is_scheduled:
            return None
        allocated = allocator.read_peak(self._device)
        return self.tracked.peak_bytes if allocated is None else allocated.reserved_bytes

    def measure_next(self) -> None:
        """Measure what is left of this step, and the next one as well: something about memory has changed."""
        self._measured_until = self._num_steps + 1

    def end(self) -> Measurement | None:
        """Finish a step and return what was measured.

        That is `None` for a step that was not tracked, unless an allocator shows that it went beyond the highest peak.
        """
        self.tracked = None
        if self._stop is None:
            return None
        seconds, self._stop = self._stop(), None
        allocated = allocator.read_peak(self._device)
        profiled, expected = self._profile, self._profile_next
        rest, held = ("temporary", None) if self._held is None else ("activations", self._held)
        tracked = self.abandon() or held
        if held is not None and profiled is not None:
            num_bytes = held.held_bytes + profiled.peak_bytes
            allocated_on_cpu = allocator.AllocatorBytes(allocated_bytes=num_bytes, reserved_bytes=num_bytes)
            self.tracked = _with_allocator(held, allocated_on_cpu, rest)
        elif tracked is not None:
            self.tracked = _with_allocator(tracked, allocated, rest)
        else:
            self._note_workspace(profiled, expected)
        if tracked is not None:
            self._profile_next = None if held is not None else dataclasses.replace(tracked, survivors=())
            self._profile_place = self._num_batches_in_step % (_LONGEST_STEP + 1)
        self._is_timed &= tracked is None and profiled is None
        self._batches.append((seconds, self._num_samples))
        if allocated is not None:
            self._reserved_bytes = max(self._reserved_bytes or 0, allocated.reserved_bytes)
        highest = self._peak
        if self.tracked is not None:
            measured = self.tracked
        elif allocated is not None and highest is not None and allocated.allocated_bytes > highest.peak_bytes:
            measured = _with_allocator(highest, allocated)  # the highest tracked step's split, and what came on top
        else:
            return None
        if self._num_steps != self._last_measured:
            self._last_measured, self.num_steps_measured = self._num_steps, self.num_steps_measured + 1
        if highest is None or measured.peak_bytes > highest.peak_bytes:
            self._peak = dataclasses.replace(measured, survivors=())
        return measured

    def _note_workspace(self, profiled: AllocationProfile | None, like: Measurement | None) -> None:
        if profiled is not None and like is not None:
            found = like.held_bytes + profiled.peak_bytes - like.peak_bytes
            self._workspace_bytes = max(self._workspace_bytes or 0, found)

    def abandon(self) -> Measurement | None:
        """Leave the ledger whatever happened in the step; safe to call at any time."""
        ledger, self._ledger, self._held = self._ledger, None, None
        _measuring.discard(self)
        profiled, self._profile = self._profile, None
        if profiled is not None:
            profiled.__exit__(None, None, None)
            self._profile_next = None
        if ledger is None:
            return None
        ledger.__exit__(None, None, None)
        return ledger.measurement

    def end_step(self, num_updates: int | None = None) -> None:
        """End the step, as no further batch belongs to it, and count it among those that are timed.

        Args:
            num_updates: how often optimizers have stepped, where the run has broken off: what has not come to its
                update has no time.
        """
        is_whole = num_updates is None or (self._stop is None and num_updates != self._num_updates)
        self.abandon()  # a skipped batch has had no end
        if is_whole:
            self._end_step()
        self._read_seconds()

    @property
    def highest(self) -> Measurement | None:
        """The measured step with the highest peak."""
        return self._peak

    def report(self) -> MemoryReport:
        """Return the highest peak so far, as the part of a report that the meter knows.

        Times are medians of the steps that were not measured; samples per second only where each batch told its own.
        """
        rates = [n / seconds for seconds, n in self._speeds if n is not None]
        speed = MemoryReport(
            step_seconds=statistics.median(seconds for seconds, _ in self._speeds) if self._speeds else None,
            samples_per_second=statistics.median(rates) if rates else None,
        )
        if self._peak is None:
            return speed
        return dataclasses.replace(
            speed,
            peak_bytes=self._peak.peak_bytes,
            by_category=dict(self._peak.by_category),
            workspace_bytes=self._workspace_bytes,
            reserved_bytes=self._reserved_bytes,
            num_steps_measured=self.num_steps_measured,
            timeline=self._peak.timeline,
        )


_measuring: weakref.WeakSet[Meter] = weakref.WeakSet()


def stop_measuring() -> bool:
    """Leave the ledger, under which a step takes more than it does alone; whether a step was being tracked.

    It counts as measured all the same, by what was seen until now, and on an accelerator by the allocator: what is due
    after a measured step happens on every process.
    """
    found = False
    for meter in list(_measuring):
        if (seen := meter.abandon()) is not None:
            meter._held, found = seen, True
    return found


class SeenEdits:
    """Tensors that a step edits from now on, also through `.data`: seen where the step is measured, else none.

    Args:
        named: the tensors, by name.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]]) -> None:
        self._ledgers = [meter._ledger for meter in _measuring if meter._ledger is not None]
        self._named = [(n, s._cdata) for n, t in named for s in storages(t)] if self._ledgers else []
        forget_edits()

    def names(self) -> set[str]:
        """Return the names of those that were edited, even if they have the same values again."""
        return {name for name, address in self._named if any(ledger.has_edited(address) for ledger in self._ledgers)}


def forget_edits() -> None:
    """Take everything as not edited so far, in a step that is measured."""
    for meter in _measuring:
        if meter._ledger is not None:
            meter._ledger.forget_edits()


Seconds = Callable[[], float]
"""Tells how long something took; may wait for a device to have done it."""


def _no_stopwatch() -> Seconds:
    return float  # 0 seconds


def _stopwatch(device: torch.device) -> Callable[[], Seconds]:
    """Start a stopwatch and return what stops it; a device that works by itself gets marks among its work.

    Nothing waits until the figure is read.
    """
    if device.type in ("cpu", "mps") or not torch.accelerator.is_available():
        began = time.perf_counter()

        def stop() -> Seconds:
            seconds = time.perf_counter() - began
            return lambda: seconds

        return stop
    first, last = (torch.Event(device, enable_timing=True) for _ in range(2))
    first.record()

    def stop_on_device() -> Seconds:
        last.record()

        def read() -> float:
            last.synchronize()
            return float(first.elapsed_time(last)) / 1000

        return read

    return stop_on_device


def _with_allocator(
    tracked: Measurement, peak: allocator.AllocatorBytes | None, rest: str = "temporary"
) -> Measurement:
    """Replace the peak by the allocator's on an accelerator; what the ledger did not see goes under `rest`."""
    if peak is None:
        return tracked
    untracked = peak.allocated_bytes - tracked.peak_bytes
    split = dict(tracked.by_category)
    split[rest] += untracked
    for name in sorted(split, key=lambda each: -split[each]):  # less than was seen of a try that has failed
        moved = min(split[name], max(0, -split[rest]))
        split[name], split[rest] = split[name] - moved, split[rest] + moved
    return dataclasses.replace(tracked, peak_bytes=peak.allocated_bytes, by_category=split)
