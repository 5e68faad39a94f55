"""Growth, post-mortems and how plans turned out, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch

from lightning_memsave.core.remedies import remedies_for
from lightning_memsave.core.report import MemoryReport, Miss
from lightning_memsave.core.units import format_bytes
from lightning_memsave.measuring.leak_detection import Growth
from lightning_memsave.measuring.ledger import Measurement
from lightning_memsave.measuring.live_tensors import Alive
from lightning_memsave.planner.plan import Plan

_MAX_LINES = 12  # of each list: a page, not a book


def outcome(plan: Plan, report: MemoryReport) -> str:
    """Return how a plan turned out: what was predicted, what was measured, and what limits it."""
    plain_bytes = sum(plan.baseline_by_category.values())  # without what kernels take, as the others
    predicted = (
        f"memsave: budget {format_bytes(plan.budget_bytes)}: plain step {format_bytes(plain_bytes)} predicted, "
        f"planned step {format_bytes(plan.peak_bytes)} predicted"
    )
    if report.peak_bytes is None:
        return f"{predicted}; no step was measured."
    largest = max(report.by_category, key=lambda name: report.by_category[name])
    miss = Miss.between(plan.peak_bytes, plan.by_category, report.peak_bytes, report.by_category)
    detail = f": {miss}" if miss.is_much else ""
    factor = "" if report.factor is None else f", {report.factor:.2f}x below the plain step"
    evaluated_bytes = report.evaluation_peak_bytes or 0
    beyond = (
        f" Validation took {format_bytes(evaluated_bytes)}, more than the budget."
        if evaluated_bytes > plan.budget_bytes
        else ""
    )
    kernels = f" and {format_bytes(plan.workspace_bytes)} in kernels" if plan.workspace_bytes else ""
    return (
        f"{predicted}, {format_bytes(report.peak_bytes)} measured ({miss.fraction:+.1%}{detail}){kernels}{factor}; "
        f"limited by {largest} ({report.by_category[largest] / report.peak_bytes:.0%} of the peak).{beyond}"
    )


def growth_text(growth: Growth) -> str:
    """Return what grows, and the tensors or lines behind it, largest first."""
    figures = " -> ".join(map(format_bytes, growth.figures_bytes))
    if growth.what == "peak":
        lines = [f"  {format_bytes(size)} more made at {line}" for line, size in growth.by_line]
        head = f"memsave: the peak has grown in each of the last {len(growth.figures_bytes)} measured steps: {figures}."
        return "\n".join([head, *lines[:_MAX_LINES]])
    head = f"memsave: tensors stay alive after the step, more with each measured step: {figures}."
    lines = [
        f"  {kind.count} x {_kind(kind.shape, kind.dtype)}, {format_bytes(kind.num_bytes)}, made at {kind.line}"
        for kind in growth.tensors
    ]
    tail = "A list that is appended to? `.detach()` and `.item()` let go of the graph; metrics are freed by `reset()`."
    return "\n".join([head, *lines[:_MAX_LINES], tail])


def miss_text(report: MemoryReport) -> str | None:
    """Return what was predicted and what was measured, and what was missed where that is much.

    `None` without a prediction.
    """
    miss = report.miss
    if miss is None:
        return None
    predicted, measured = format_bytes(report.predicted_peak_bytes), format_bytes(report.peak_bytes)
    text = f"memsave: peak predicted {predicted}, measured {measured} ({miss.fraction:+.1%})"
    return f"{text}: {miss}." if miss.is_much else f"{text}."


def post_mortem_text(
    kinds: Sequence[Alive],
    applied: Collection[str],
    fixed: Collection[str],
    measured: Measurement | None,
    error: str,
) -> str:
    """Return what was alive when memory ran out, largest first, and what would help.

    Args:
        kinds: what is alive.
        applied: what is on, by the names of the compatibility table.
        fixed: what of it was set, and the way of training: what these refuse is no help.
        measured: the failing step up to the error, if it was being measured, or else the highest one before it.
        error: what was raised.
    """
    return "\n".join(_post_mortem(kinds, applied, fixed, measured, error))


def _post_mortem(
    kinds: Sequence[Alive],
    applied: Collection[str],
    fixed: Collection[str],
    measured: Measurement | None,
    error: str,
) -> Iterator[str]:
    totals: Counter[str] = Counter()
    for kind in kinds:
        totals[kind.category] += kind.num_bytes
    split = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in totals.most_common())
    yield f"memsave: out of memory. {error.partition(chr(10))[0]}"
    yield f"Alive now: {format_bytes(totals.total())} in tensors ({split})."
    for kind in kinds[:_MAX_LINES]:
        name, what = kind.category.replace("_", " "), _kind(kind.shape, kind.dtype)
        yield f"  {format_bytes(kind.num_bytes):>10}  {name}, {kind.where}: {kind.count} x {what}"
    if rest := kinds[_MAX_LINES:]:
        yield f"  {format_bytes(sum(kind.num_bytes for kind in rest)):>10}  {len(rest)} smaller kinds"
    if measured is not None and measured.by_line:
        yield f"Highest measured step: {format_bytes(measured.peak_bytes)}. Its peak was made at:"
        for line, size in list(measured.by_line.items())[:_MAX_LINES]:
            yield f"  {format_bytes(size):>10}  {line}"
    yield "What would help, with what it works on:"
    for category, size in totals.most_common():
        for remedy in remedies_for(category, applied, fixed):
            yield f"  {format_bytes(size):>10}  {category.replace('_', ' ')}: {remedy}"


def _kind(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
