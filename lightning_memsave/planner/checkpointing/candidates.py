"""What can become a region: calls of modules in the order of one traced step, and groups that follow each other."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_memsave.measuring.step_trace import CallRecord, Trace

_LONGEST_DENSE = 24  # up to here, every group of consecutive calls is a candidate


@dataclass(frozen=True, eq=False)
class Candidate:
    """Modules whose calls may be one region, with where they lie in the step."""

    names: tuple[str, ...]
    runs: tuple[tuple[CallRecord, ...], ...]
    """Their calls, each time that they run."""

    def overlaps(self, other: Candidate) -> bool:
        """Return whether the two have a moment of the forward pass in common."""
        return any(
            a[0].first_op < b[-1].last_op and b[0].first_op < a[-1].last_op for a in self.runs for b in other.runs
        )


def may_be_region(call: CallRecord) -> bool:
    """Return whether a call can be made twice, and whether backward comes by."""
    is_pure = not call.edits_input and call.side_effect is None
    return call.name != "" and is_pure and call.requires_grad and call.backward_event is not None


def units(trace: Trace, *, members_are_whole: bool = False) -> list[CallRecord]:
    """Return the chain that is cut into regions: calls that follow each other and do not contain each other.

    Containers and modules that pass a tensor from child to child are replaced by their children, and so is a call that
    cannot be made twice, so that only the guilty one is left out.

    Args:
        trace: of the step.
        members_are_whole: do not split members of containers.
    """
    whole = {call.index for call in members(trace)} if members_are_whole else set[int]()
    return [unit for call in trace.calls if call.parent is None for unit in _split(trace, call, whole)]


def _split(trace: Trace, call: CallRecord, whole: set[int]) -> Iterator[CallRecord]:
    children = [trace.calls[index] for index in call.children]
    is_split = call.index not in whole and _is_chain(trace, call, children) if children else False
    if is_split or (children and not may_be_region(call)):
        for child in children:
            yield from _split(trace, child, whole)
    else:
        yield call


def members(trace: Trace) -> list[CallRecord]:
    """Calls of the outermost modules that are numbered, as in `Sequential` and `ModuleList`, and no containers."""
    found: list[CallRecord] = []
    inside = set[int]()
    for call in trace.calls:  # parents come before children
        children = [trace.calls[index] for index in call.children]
        if call.parent in inside or (_is_numbered(call) and children and not all(map(_is_numbered, children))):
            if call.parent not in inside:
                found.append(call)
            inside.add(call.index)
    return found


def numbered_by_depth(trace: Trace) -> list[set[str]]:
    """Return the names of numbered modules with children: the outermost, those inside of one of them, and so on."""
    depths, found = dict[int, int](), list[set[str]]()
    for call in trace.calls:  # parents come before children
        depth = 0 if call.parent is None else depths[call.parent]
        if call.children and _is_numbered(call):
            found += [set[str]() for _ in range(len(found), depth + 1)]
            found[depth].add(call.name)
            depth += 1
        depths[call.index] = depth
    return found


def _is_numbered(call: CallRecord) -> bool:
    return call.name.rpartition(".")[2].isdigit()


def _is_chain(trace: Trace, call: CallRecord, children: Sequence[CallRecord]) -> bool:
    """Whether most of what `call` keeps is kept by children that feed each other, with nothing that passes them by."""
    runs: list[list[CallRecord]] = [[children[0]]]
    for before, after in itertools.pairwise(children):
        if set(before.outputs) & set(after.inputs):
            runs[-1].append(after)
        else:
            runs.append([after])
    chained = sum(
        kept_bytes(trace, child) for run in runs if len(run) > 1 and not _is_bypassed(trace, run) for child in run
    )
    return 2 * chained > kept_bytes(trace, call)


def _is_bypassed(trace: Trace, run: Sequence[CallRecord]) -> bool:
    """Return whether what the first call of `run` is given is read behind the last one: a residual connection."""
    given = [n for n in run[0].inputs[:1] if trace.storages[n].born >= 0 and n not in run[-1].outputs]
    return any(trace.storages[n].last_forward_use > run[-1].last_event for n in given)


def kept_bytes(trace: Trace, call: CallRecord) -> int:
    """Return bytes that were made during a call and are alive when backward begins."""
    return trace.kept_before(call.last_op) - trace.kept_before(call.first_op)


def called_once(trace: Trace) -> set[str]:
    """Return the names of modules that one step calls once: only these can be in a group with others."""
    counts = Counter(call.name for call in trace.calls)
    return {name for name, count in counts.items() if count == 1}


def singles(trace: Trace) -> list[Candidate]:
    """Return each module by itself, with all of its calls."""
    by_name: dict[str, list[CallRecord]] = {}
    for call in trace.calls:
        by_name.setdefault(call.name, []).append(call)
    return [
        Candidate((name,), tuple((call,) for call in calls))
        for name, calls in by_name.items()
        if name and all(map(may_be_region, calls))
    ]


def stretches(trace: Trace, chain: Sequence[CallRecord]) -> list[list[CallRecord]]:
    """Return the longest stretches of a chain that may be in one group."""
    once = called_once(trace)
    found: list[list[CallRecord]] = [[]]
    for call in chain:
        if may_be_region(call) and call.name in once:
            found[-1].append(call)
        else:
            found.append([])
    return [run for run in found if run]


def groups(trace: Trace, chain: Sequence[CallRecord]) -> list[Candidate]:
    """Return groups of two calls and more; of long chains not all of them, but some of every length and place."""
    found = []
    for run in stretches(trace, chain):
        is_short = len(run) <= _LONGEST_DENSE
        lengths = range(2, len(run) + 1) if is_short else sorted({round(1.25**i) for i in range(4, 40)})
        for length in lengths:
            step = 1 if is_short else max(1, length // 4)
            for start in range(0, len(run) - length + 1, step):
                found.append(group(run[start : start + length]))
    return found


def group(calls: Sequence[CallRecord]) -> Candidate:
    """Calls that follow each other, as one candidate."""
    return Candidate(tuple(call.name for call in calls), (tuple(calls),))
