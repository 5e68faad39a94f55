"""The exact choice of regions as a mixed-integer program, solved by HiGHS through scipy where it is installed.

One binary variable per candidate; at every moment of the step that may be a peak, the bytes that live less what the
chosen regions free stay within the budget; so does what a chosen region takes while it is repeated; two candidates that
overlap exclude each other; the sum of seconds is least. Exact with respect to the replay's model of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from lightning_memsave.core.units import MIB
from lightning_memsave.planner.checkpointing.replay import Effect, Replay

_MAX_ENTRIES = 4_000_000  # of the matrix: beyond, building it takes longer than it is worth
_SECONDS = 20.0


def solve(
    replay: Replay, effects: Sequence[Effect], budget_bytes: int, best_seconds: float | None
) -> list[Effect] | None:
    """Return the cheapest choice.

    `None` without scipy, where the program is too large or takes too long, or when no choice is within the budget.

    Args:
        replay: of the step.
        effects: the candidates.
        budget_bytes: for the peak.
        best_seconds: of a choice that is known; slower ones are not looked for.
    """
    if find_spec("scipy") is None or not effects:
        return None
    moments = _possible_peaks(replay, effects, budget_bytes)
    if len(effects) * (len(moments) + len(effects)) > _MAX_ENTRIES:
        return None
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    rows, limits = _rows(replay, effects, moments, budget_bytes)
    costs = torch.tensor([effect.seconds for effect in effects], dtype=torch.float64, device="cpu")
    if best_seconds is not None:
        rows.append(costs)
        limits.append(best_seconds)
    exclusive = _exclusive(effects)
    matrix = torch.cat([torch.stack(rows), exclusive]) if len(exclusive) else torch.stack(rows)
    found: Any = milp(
        (costs / costs.max().clamp_min(1e-12)).numpy(),
        constraints=LinearConstraint(csr_array(matrix.numpy()), ub=[*limits, *[1.0] * len(exclusive)]),
        integrality=1,
        bounds=Bounds(0, 1),
        options={"time_limit": _SECONDS, "mip_rel_gap": 1e-4},
    )
    return None if found.x is None else [e for e, taken in zip(effects, found.x, strict=True) if taken > 0.5]


def _possible_peaks(replay: Replay, effects: Sequence[Effect], budget_bytes: int) -> list[int]:
    """Return moments over the budget in the plain step that may be the highest between two changes of any region."""
    curve = replay.curve()
    edges = sorted({0, len(curve), *(event for effect in effects for event, _ in effect.changes)})
    found = []
    for start, end in itertools.pairwise(edges):
        highest = start + int(curve[start:end].argmax())
        if curve[highest] > budget_bytes:
            found.append(highest)
    return found


def _rows(
    replay: Replay, effects: Sequence[Effect], moments: Sequence[int], budget_bytes: int
) -> tuple[list[torch.Tensor], list[float]]:
    """Return left sides, each [candidates], and right sides; in MiB: the solver's tolerances are far below a tensor."""
    events = sorted({*moments, *(event for effect in effects for event, _ in effect.spikes)})
    place = {event: row for row, event in enumerate(events)}
    changes = torch.stack([replay.adjustment(effect)[events] for effect in effects], 1).double() / MIB
    curve = replay.curve()
    rows = [changes[place[moment]] for moment in moments]
    limits = [float(budget_bytes - int(curve[moment])) / MIB for moment in moments]
    bound = 2 * float(curve.max()) / MIB
    for index, effect in enumerate(effects):
        for event, spike in effect.spikes:  # holds when the region is chosen, else says nothing
            row = changes[place[event]].clone()
            row[index] += bound
            rows.append(row)
            limits.append(float(budget_bytes - replay.live_before(event) - spike) / MIB + bound)
    return rows, limits


def _exclusive(effects: Sequence[Effect]) -> torch.Tensor:
    """Return one row for each moment of the forward pass at which several candidates lie.

    At most one of them is chosen.
    """
    starts = sorted({run[0].first_op for effect in effects for run in effect.candidate.runs})
    rows: dict[tuple[int, ...], None] = {}
    for start in starts:
        there = tuple(
            index
            for index, effect in enumerate(effects)
            if any(run[0].first_op <= start < run[-1].last_op for run in effect.candidate.runs)
        )
        if len(there) > 1:
            rows[there] = None
    matrix = torch.zeros(len(rows), len(effects), dtype=torch.float64, device="cpu")
    for row, there in enumerate(rows):
        matrix[row, list(there)] = 1.0
    return matrix
