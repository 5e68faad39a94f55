"""The exact program against all sets of regions."""

from __future__ import annotations

import itertools
import math

import pytest

from lightning_memsave.planner.checkpointing import milp
from lightning_memsave.planner.checkpointing.candidates import groups, singles, units
from lightning_memsave.planner.checkpointing.region_budget import fit_budget
from lightning_memsave.planner.checkpointing.replay import Replay
from tests.planner.chains import chain, trace_of


def brute_force(replay, effects, budget):
    """The least seconds over all sets of disjoint candidates."""
    best = math.inf
    for size in range(len(effects) + 1):
        for chosen in itertools.combinations(effects, size):
            if any(a.candidate.overlaps(b.candidate) for a, b in itertools.combinations(chosen, 2)):
                continue
            if replay.peak_bytes(chosen) <= budget:
                best = min(best, sum(effect.seconds for effect in chosen))
    return best


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_the_exact_program_is_the_best_of_all_sets(share, monkeypatch):
    trace = trace_of(chain((8, 40, 16), batch_size=256))
    replay = Replay(trace)
    effects = [replay.effect_of(c) for c in [*singles(trace), *groups(trace, units(trace))]]
    effects = [effect for effect in effects if effect.saved_bytes > 0]
    assert 6 <= len(effects) <= 16
    lowest = fit_budget(trace, replay, 0)[1]
    budget = lowest + int(share * (replay.peak_bytes() - lowest))
    best = brute_force(replay, effects, budget)
    exact, _ = fit_budget(trace, replay, budget)
    assert exact.seconds == pytest.approx(best, rel=2e-4)
    monkeypatch.setattr(milp, "find_spec", lambda name: None)
    heuristic, _ = fit_budget(trace, replay, budget)
    assert not heuristic.is_exact
    assert heuristic.peak_bytes <= budget
    assert heuristic.seconds >= exact.seconds * (1 - 2e-4)


def subject():
    trace = trace_of(chain((8, 40, 16), batch_size=256))
    replay = Replay(trace)
    effects = [replay.effect_of(c) for c in [*singles(trace), *groups(trace, units(trace))]]
    return trace, replay, [effect for effect in effects if effect.saved_bytes > 0]


def test_a_choice_is_within_the_budget_and_of_regions_that_are_apart():
    trace, replay, effects = subject()
    plain, lowest = replay.peak_bytes(), fit_budget(trace, replay, 0)[1]
    for budget in (lowest, (lowest + plain) // 2, plain - 1000):
        chosen = milp.solve(replay, effects, budget, best_seconds=None)
        assert replay.peak_bytes(chosen) <= budget
        assert not any(a.candidate.overlaps(b.candidate) for a, b in itertools.combinations(chosen, 2))
    assert milp.solve(replay, effects, plain, best_seconds=None) == []


def test_there_is_no_choice_below_what_any_set_needs():
    _, replay, effects = subject()
    sets = (s for size in range(len(effects) + 1) for s in itertools.combinations(effects, size))
    apart = [s for s in sets if not any(a.candidate.overlaps(b.candidate) for a, b in itertools.combinations(s, 2))]
    lowest = min(map(replay.peak_bytes, apart))
    assert milp.solve(replay, effects, lowest, best_seconds=None) is not None
    assert milp.solve(replay, effects, lowest - 1, best_seconds=None) is None


def test_slower_choices_than_one_that_is_known_are_not_looked_for():
    _, replay, effects = subject()
    budget = int(0.7 * replay.peak_bytes() + 0.3 * min(replay.peak_bytes([effect]) for effect in effects))
    best = brute_force(replay, effects, budget)
    assert 0 < best < math.inf
    assert milp.solve(replay, effects, budget, best_seconds=0.9 * best) is None
    found = milp.solve(replay, effects, budget, best_seconds=1.1 * best)
    assert sum(effect.seconds for effect in found) == pytest.approx(best, rel=2e-4)


def test_without_candidates_or_scipy_there_is_no_program(monkeypatch):
    _, replay, effects = subject()
    assert milp.solve(replay, [], replay.peak_bytes(), best_seconds=None) is None
    monkeypatch.setattr(milp, "find_spec", lambda name: None)
    assert milp.solve(replay, effects, replay.peak_bytes(), best_seconds=None) is None
