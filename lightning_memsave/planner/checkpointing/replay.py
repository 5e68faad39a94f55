"""What the peak of a traced step would be with some regions: the trace's own events, moved.

What the calls of a region make and only they read is gone from its last use in forward until backward reaches the
region; their inputs stay where nobody else keeps them, and a copy of each buffer that they change; when backward
arrives, the region's forward peak stands on top of what lives then. What happens between the calls of a group is not
part of the region. Left out: that a region's input may outlive its backward a little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memsave.measuring.step_trace import CallRecord, Trace
from lightning_memsave.planner.checkpointing.candidates import Candidate


@dataclass(frozen=True, eq=False)
class Effect:
    """What one candidate does to the curve of live bytes."""

    candidate: Candidate
    changes: tuple[tuple[int, int], ...]
    """(event, change in bytes from there on)."""
    spikes: tuple[tuple[int, int], ...]
    """(event, bytes that repeating takes before that event)."""
    saved_bytes: int
    """Bytes that are kept less when backward begins."""
    seconds: float
    """How long repeating takes."""

    @property
    def highest_spike(self) -> int:
        """The most that repeating one of its calls takes."""
        return max(num_bytes for _, num_bytes in self.spikes)


class Replay:
    """Predicts peaks of the step that a trace recorded.

    Args:
        trace: the step without regions.
        extra_bytes: what the trace did not see and every later step has, such as optimizer state.
    """

    def __init__(self, trace: Trace, extra_bytes: int = 0) -> None:
        self._trace = trace
        changes = torch.tensor([change for change, _ in trace.events] or [0], dtype=torch.int64, device="cpu")
        start = trace.start_bytes + extra_bytes
        self._live = torch.cat(
            [torch.tensor([start], device="cpu"), start + changes.cumsum(0)]
        )  # [E + 1]: before each event, at end
        self._scratch = torch.zeros_like(self._live)
        for op in trace.ops:
            if op.workspace_bytes > self._scratch[op.event]:
                self._scratch[op.event] = op.workspace_bytes
        self._made_by_op: dict[int, list[int]] = {}
        for number, storage in enumerate(trace.storages):
            if storage.born >= 0:
                self._made_by_op.setdefault(storage.op, []).append(number)

    def peak_bytes(self, effects: Sequence[Effect] = (), *, workspace: bool = True) -> int:
        """Return the highest total of the step with these regions.

        Kernels' workspace included unless said otherwise.
        """
        live = self._live + self._adjustment(effects)
        peak = int((live + self._scratch if workspace else live).max())
        return max([peak, *(int(live[event]) + spike for effect in effects for event, spike in effect.spikes)])

    def curve(self) -> Tensor:
        """Return live bytes of the plain step before each event and at the end, with workspace, int64 [E + 1]."""
        return self._live + self._scratch

    def adjustment(self, effect: Effect) -> Tensor:
        """Return by how much one region changes that curve, int64 [E + 1]."""
        return self._adjustment([effect])

    def live_before(self, event: int) -> int:
        """Return live bytes of the plain step before an event."""
        return int(self._live[event])

    def _adjustment(self, effects: Sequence[Effect]) -> Tensor:
        changes = [change for effect in effects for change in effect.changes]
        adjustment = torch.zeros_like(self._live)
        if changes:
            events, amounts = torch.tensor(changes, dtype=torch.int64, device="cpu").T
            adjustment.index_add_(0, events, amounts)
        return adjustment.cumsum(0)

    def effect_of(self, candidate: Candidate) -> Effect:
        """Return what `candidate` would do as a region."""
        changes: list[tuple[int, int]] = []
        spikes: list[tuple[int, int]] = []
        saved_bytes, seconds = 0, 0.0
        for run in candidate.runs:
            first, last = run[0], run[-1]
            made = [n for c in run for op in range(c.first_op, c.last_op) for n in self._made_by_op.get(op, ())]
            kept = self._kept_inputs(run)
            dropped = [number for number in self._dropped(made, run) if number not in kept]
            arrives, leaves = self._backward_of(last, dropped)
            for number in dropped:
                storage = self._trace.storages[number]
                changes += [(max(min(storage.last_forward_use, last.last_event), storage.born + 1), -storage.num_bytes)]
                changes += [(min(arrives, self._end_of(number)) + 1, storage.num_bytes)]
                saved_bytes += storage.num_bytes
            copies = sum(call.buffer_bytes for call in run)
            changes += [(first.first_event, copies), (leaves + 1, -copies)]
            saved_bytes -= copies
            for number in kept:
                storage = self._trace.storages[number]
                if self._end_of(number) < leaves:
                    changes += [(self._end_of(number) + 1, storage.num_bytes), (leaves + 1, -storage.num_bytes)]
                    saved_bytes -= 0 if storage.is_kept else storage.num_bytes
            most_copies = max(call.buffer_bytes for call in run)  # a call that is repeated changes copies of the copies
            spikes.append((arrives, self._local_peak(first, last, set(made)) + most_copies))
            stop = max((self._trace.storages[n].op + 1 for n in dropped), default=first.first_op)
            seconds += sum(op.seconds for c in run for op in self._trace.ops[c.first_op : min(stop, c.last_op)])
        return Effect(candidate, tuple(changes), tuple(spikes), saved_bytes, seconds)

    def _end_of(self, number: int) -> int:
        died = self._trace.storages[number].died
        return len(self._trace.events) - 1 if died is None else died

    def _dropped(self, made: Sequence[int], run: Sequence[CallRecord]) -> list[int]:
        """Return what a region makes that backward waits for and nobody else reads.

        What no member returns cannot be seen outside (a store may look at it later than the region's end).
        """
        returned = {number for call in run for number in call.outputs}
        ends = run[-1].last_event
        return [
            number
            for number in made
            if self._trace.storages[number].is_kept
            and number not in run[-1].outputs
            and (number not in returned or self._trace.storages[number].last_forward_use <= ends)
        ]

    def _kept_inputs(self, run: Sequence[CallRecord]) -> list[int]:
        """Return the inputs that a region keeps: those made in the step that no earlier call of it handed on."""
        storages, returned, found = self._trace.storages, set[int](), dict[int, None]()
        for call in run:
            known = returned & call.passed
            found |= dict.fromkeys(n for n in call.inputs if n not in known and storages[n].born >= 0)
            returned |= set(call.outputs)
        return list(found)

    def _backward_of(self, last: CallRecord, dropped: Sequence[int]) -> tuple[int, int]:
        """Return the events at which backward reaches a region, and at which it has passed."""
        arrives = last.backward_event
        assert arrives is not None, "a candidate has gradients"
        ends = [self._end_of(number) for number in dropped if self._trace.storages[number].died is not None]
        return arrives, max([arrives, *ends])

    def _local_peak(self, first: CallRecord, last: CallRecord, made: set[int]) -> int:
        """Return the most that is alive at once of what a region's forward makes, workspace included."""
        current = peak = 0
        scratch = self._scratch
        for event in range(first.first_event, last.last_event):
            change, number = self._trace.events[event]
            if number in made:
                current += change
            peak = max(peak, current + int(scratch[event + 1]))
        return peak
