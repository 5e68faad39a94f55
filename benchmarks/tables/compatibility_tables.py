"""The tables of what goes with what, from the rules that a run is held against."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.harness.rows import markdown, rows
from lightning_memsave.core.compatibility import COMPATIBILITY, SETTINGS, WAYS_OF_TRAINING, CompatibilityRule
from lightning_memsave.techniques.registry import TECHNIQUES
from lightning_memsave.torch_internals.private_names import PARTS

_RUN = ("package", "version", "python", "selection")
_STEMS = [technique.stem for technique in TECHNIQUES]


def techniques() -> str:
    """Each technique against the others and against ways of training: works, refused, or nothing said."""
    found = {frozenset((row.first, row.second)): row for row in COMPATIBILITY}
    lines = [
        (_title(other), *(_cell(found.get(frozenset((stem, other)))) if stem != other else "" for stem in _STEMS))
        for other in (*_STEMS, *WAYS_OF_TRAINING)
    ]
    return markdown(("", *map(_title, _STEMS)), _without_empty(lines))


def versions() -> str:
    """What the tests came to on other versions, room by room: passed, and failed where some did."""
    found = rows("versions")
    rooms = list(dict.fromkeys(row["room"] for row in found))
    lines = []
    for key in dict.fromkeys(tuple(row[name] for name in _RUN) for row in found):
        own = {row["room"]: row for row in found if tuple(row[name] for name in _RUN) == key}
        lines.append((" ".join(key[:2]), *key[2:], *(_counts(own.get(room)) for room in rooms)))
    return markdown(("", "Python", "tests", *rooms), lines, num_text=3)


def private_names() -> str:
    """The private names of torch and Lightning that are used, and what is lost without them."""
    lines = [(", ".join(f"`{name}`" for name in part.names), part.lost) for part in PARTS.values()]
    return markdown(("without one of", "there is not"), lines, num_text=2)


def _counts(row: dict[str, str] | None) -> str:
    if row is None:
        return ""
    return row["passed"] + (f", **{row['failed']} failed**" if row["failed"] != "0" else "")


def _cell(row: CompatibilityRule | None) -> str:
    return "" if row is None else "yes" if row.remedy is None else "**refused**"


def _title(name: str) -> str:
    return name.replace("_", " ") if name in _STEMS else name


def _without_empty(lines: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [line for line in lines if any(line[1:])]


def refusals() -> str:
    """Every pair that is refused, why, and what to do instead."""
    lines = [
        (_title(row.first), _title(row.second), row.refused_because, row.remedy)
        for row in sorted(COMPATIBILITY, key=lambda row: (row.first in SETTINGS, row.first))
        if row.remedy is not None and row.refused_because is not None
    ]
    return markdown(("", "with", "refused because", "instead"), lines, num_text=4)
