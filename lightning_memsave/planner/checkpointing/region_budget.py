"""`budget=`: the cheapest regions with which the predicted peak of the whole step fits.

Heuristic, always: a price per byte turns the choice into one of disjoint candidates with the highest value (bytes saved
times price, less seconds), which is solved exactly by dynamic programming along the forward pass; the price is searched
by bisection, for several limits on what repeating one region may take. Then regions that are not needed are dropped,
and single ones exchanged for cheaper ones. Exact, where scipy is installed: the same choice as a mixed-integer program
(`milp`).

Source: the price is the Lagrange multiplier of Feng and Huang, "Optimal Gradient Checkpoint Search for Arbitrary
Computation Graphs", 2021 (https://arxiv.org/abs/1808.00079) in spirit; the exact program follows Jain et al.,
"Checkmate", 2020 (https://arxiv.org/abs/1910.02653), over regions of module calls instead of single operations.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_memsave.measuring.step_trace import Trace
from lightning_memsave.planner.checkpointing.candidates import groups, singles, units
from lightning_memsave.planner.checkpointing.milp import solve
from lightning_memsave.planner.checkpointing.replay import Effect, Replay
from lightning_memsave.planner.checkpointing.sqrt import plan_sqrt

_NUM_SPIKE_LIMITS, _NUM_PRICES = 16, 28
_MAX_EXCHANGES = 4000  # replays


@dataclass(frozen=True)
class Fit:
    """A choice of regions."""

    effects: tuple[Effect, ...]
    peak_bytes: int
    seconds: float
    is_exact: bool = False
    """Whether it was found by the exact program."""


def fit_budget(trace: Trace, replay: Replay, budget_bytes: int) -> tuple[Fit | None, int]:
    """Return the cheapest regions within `budget_bytes`, or `None`; and the lowest peak that was met on the way."""
    if (plain := replay.peak_bytes()) <= budget_bytes:
        return Fit((), plain, 0.0), plain
    chains = [units(trace, members_are_whole=are_whole) for are_whole in (False, True)]
    candidates = {c.names: c for c in [*singles(trace), *(c for chain in chains for c in groups(trace, chain))]}
    effects = [e for e in map(replay.effect_of, candidates.values()) if e.saved_bytes > 0]
    found = list(_fits(replay, effects, budget_bytes))
    smallest = plan_sqrt(trace, replay)
    found.append(_fit(replay, smallest))
    lowest = min([plain, *(fit.peak_bytes for fit in found)])
    within = [fit for fit in found if fit.peak_bytes <= budget_bytes]
    best = min(within, key=lambda fit: fit.seconds, default=None)
    if best is not None:
        best = _polished(replay, best, effects, budget_bytes)
    exact = solve(replay, effects, budget_bytes, best_seconds=None if best is None else best.seconds)
    if exact is not None:
        fit = _fit(replay, exact, is_exact=True)
        lowest = min(lowest, fit.peak_bytes)
        if fit.peak_bytes <= budget_bytes and (best is None or fit.seconds < best.seconds):
            best = fit
    return best, lowest


def _fit(replay: Replay, effects: Sequence[Effect], is_exact: bool = False) -> Fit:
    return Fit(tuple(effects), replay.peak_bytes(effects), sum(e.seconds for e in effects), is_exact)


def _fits(replay: Replay, effects: Sequence[Effect], budget_bytes: int) -> Iterator[Fit]:
    """Yield the choice at the lowest price that fits, for several limits on the spike of a region."""
    spikes = sorted({effect.highest_spike for effect in effects})
    limits = spikes[:: max(1, len(spikes) // _NUM_SPIKE_LIMITS)] + spikes[-1:]
    for limit in dict.fromkeys(limits):
        small = sorted((e for e in effects if e.highest_spike <= limit), key=_end)
        low, high = -15.0, -4.0  # powers of ten: seconds per byte
        for _ in range(_NUM_PRICES // 2):
            middle = (low + high) / 2
            fit = _fit(replay, _most_valuable(small, 10.0**middle))
            yield fit
            low, high = (low, middle) if fit.peak_bytes <= budget_bytes else (middle, high)


def _end(effect: Effect) -> int:
    return effect.candidate.runs[-1][-1].last_op


def _start(effect: Effect) -> int:
    return effect.candidate.runs[0][0].first_op


def _most_valuable(effects: Sequence[Effect], price: float) -> list[Effect]:
    """Choose the disjoint effects with the highest sum of bytes times `price` less seconds.

    `effects` are sorted by their end. Modules that are called several times count from their first call to their last.
    """
    ends = [_end(effect) for effect in effects]
    best = [0.0]  # of the first i effects
    before = []
    for index, effect in enumerate(effects):
        before.append(bisect.bisect_right(ends, _start(effect), 0, index))
        best.append(max(best[index], best[before[index]] + price * effect.saved_bytes - effect.seconds))
    chosen, index = [], len(effects)
    while index > 0:
        if best[index] > best[index - 1]:
            chosen.append(effects[index - 1])
            index = before[index - 1]
        else:
            index -= 1
    return chosen


def _polished(replay: Replay, fit: Fit, effects: Sequence[Effect], budget_bytes: int) -> Fit:
    """Return the choice without regions that are not needed, and with cheaper ones in place of single ones."""
    chosen, tries = list(fit.effects), 0
    by_seconds = sorted(effects, key=lambda effect: effect.seconds)
    improved = True
    while improved and tries < _MAX_EXCHANGES:
        improved = False
        for effect in sorted(chosen, key=lambda e: -e.seconds):
            rest = [other for other in chosen if other is not effect]
            for replacement in _cheaper(by_seconds, effect, rest):
                tries += 1
                if replay.peak_bytes(rest + replacement) <= budget_bytes:
                    chosen, improved = rest + replacement, True
                    break
                if tries >= _MAX_EXCHANGES:
                    break
            if improved:
                break
    return _fit(replay, chosen)


def _cheaper(by_seconds: Sequence[Effect], than: Effect, rest: Sequence[Effect]) -> Iterator[list[Effect]]:
    """Yield nothing, then every candidate that takes less time and is apart from the rest."""
    yield []
    for effect in by_seconds:
        if effect.seconds >= than.seconds:
            return
        if not any(effect.candidate.overlaps(other.candidate) for other in rest):
            yield [effect]
