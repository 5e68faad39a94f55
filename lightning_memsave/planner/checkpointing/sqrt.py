"""`"sqrt"`: the cut of a chain into regions with the lowest predicted peak, O(sqrt n) for n equal calls.

Source: Chen et al., 2016 (https://arxiv.org/abs/1604.06174), Algorithm 3: walk along the chain and close a region
whenever it holds more than b bytes; search for the best b. Different: plans are compared by the peak that a replay of
the traced step predicts, instead of by the sum of boundaries and the largest region; and the last region stays open
where that costs nothing, as it would be repeated at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_memsave.measuring.step_trace import CallRecord, Trace
from lightning_memsave.planner.checkpointing.candidates import (
    Candidate,
    group,
    kept_bytes,
    members,
    numbered_by_depth,
    singles,
    stretches,
    units,
)
from lightning_memsave.planner.checkpointing.replay import Effect, Replay

_NUM_TRIES = 40


def plan_sqrt(trace: Trace, replay: Replay) -> list[Effect]:
    """Return the regions; none where none lowers the predicted peak."""
    best: list[Effect] = []
    lowest = replay.peak_bytes()
    known: dict[tuple[str, ...], Effect] = {}
    for candidates in _cuts(trace):
        effects = [_known(replay, candidate, known) for candidate in candidates]
        effects = [effect for effect in effects if effect.saved_bytes > 0]
        peak = replay.peak_bytes(effects)
        if peak < lowest:
            best, lowest = effects, peak
    return without_idle(replay, best)


def _cuts(trace: Trace) -> Iterator[list[Candidate]]:
    """Yield ways to cut the step: members of containers by themselves, then chains of units by many limits.

    Members may be containers themselves, and be called several times, which leaves them out of chains.
    """
    alone = singles(trace)
    for names in ({member.name for member in members(trace)}, *numbered_by_depth(trace)):
        yield [c for c in alone if c.names[0] in names]
    for are_whole in (True, False):
        chain = units(trace, members_are_whole=are_whole)
        found = stretches(trace, chain)
        in_stretches = {call.name for run in found for call in run}
        shared = [c for c in alone if c.names[0] in {u.name for u in chain} - in_stretches]
        sizes = {call.index: kept_bytes(trace, call) for run in found for call in run}
        for limit in _limits(list(sizes.values())):
            yield [*(c for run in found for c in cut_by_size(run, sizes, limit)), *shared]


def _known(replay: Replay, candidate: Candidate, known: dict[tuple[str, ...], Effect]) -> Effect:
    if candidate.names not in known:
        known[candidate.names] = replay.effect_of(candidate)
    return known[candidate.names]


def _limits(sizes: Sequence[int]) -> list[float]:
    """Return limits on the bytes of a region, from the largest unit to everything, evenly spaced in ratio."""
    total, largest = sum(sizes), max(sizes, default=0)
    if not largest:
        return [0]  # nothing to cut, but modules that are called several times
    return [0, *(largest * (total / largest) ** (step / _NUM_TRIES) for step in range(_NUM_TRIES))]


def cut_by_size(run: Sequence[CallRecord], sizes: dict[int, int], limit: float) -> list[Candidate]:
    """Return the regions of algorithm 3's walk; each ends where it holds more than `limit` bytes."""
    found: list[Candidate] = []
    held: list[CallRecord] = []
    num_bytes = 0
    for call in run:
        held.append(call)
        num_bytes += sizes[call.index]
        if num_bytes > limit:
            found.append(group(held))
            held, num_bytes = [], 0
    return [*found, group(held)] if held else found


def without_idle(replay: Replay, effects: Sequence[Effect]) -> list[Effect]:
    """Leave out regions without which the predicted peak is no higher, the last ones first."""
    chosen = list(effects)
    peak = replay.peak_bytes(chosen)
    for effect in sorted(effects, key=lambda e: -e.candidate.runs[0][0].first_op):
        rest = [other for other in chosen if other is not effect]
        if replay.peak_bytes(rest) > peak:
            break
        chosen = rest
    return chosen
