"""`"recursive"`: the first half of a chain is a region, and again of each half: O(log n) memory for O(n log n) time.

Source: Chen et al., 2016 (https://arxiv.org/abs/1604.06174), section 4.4 with k = 1: g(n) = 1 + g(n / 2). Different:
halves are of bytes, not of layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_memsave.measuring.step_trace import CallRecord, Trace
from lightning_memsave.planner.checkpointing.candidates import Candidate, group, kept_bytes, singles, stretches, units


def plan_recursive(trace: Trace) -> list[Candidate]:
    """Return the regions, the outer ones first."""
    chain = units(trace)
    found = stretches(trace, chain)
    in_stretches = {call.name for run in found for call in run}
    shared = [c for c in singles(trace) if c.names[0] in {u.name for u in chain} - in_stretches]
    sizes = {call.index: kept_bytes(trace, call) for run in found for call in run}
    return [c for run in found for c in _halve(run, sizes)] + shared


def _halve(run: Sequence[CallRecord], sizes: dict[int, int]) -> Iterator[Candidate]:
    total, first_half = sum(sizes[call.index] for call in run), 0
    if len(run) < 2 or total == 0:
        return
    middle = 0
    while middle < len(run) - 1 and 2 * first_half < total:
        first_half += sizes[run[middle].index]
        middle += 1
    yield group(run[:middle])
    yield from _halve(run[:middle], sizes)
    yield from _halve(run[middle:], sizes)
