"""What a scope kept, in how many bytes, and what its codes do to the gradient's mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_memsave.core.report import LossClass
from lightning_memsave.saved_tensors.derivative_levels import Levels
from lightning_memsave.saved_tensors.encodings import Fidelity, IntCodes
from lightning_memsave.saved_tensors.samples import Sample
from lightning_memsave.saved_tensors.saved_storage import SavedStorage, codes_behind, kept_bytes


@dataclass
class Tally:
    """What one scope kept."""

    entries: Counter[str] = field(default_factory=Counter)
    """How many, by encoding."""
    plain_bytes: int = 0
    """What they would hold without the store."""
    held_bytes: int = 0
    """What they hold, each storage once."""
    num_held_elsewhere: int = 0
    """Entries that somebody else holds anyway (the batch, returned outputs); not counted above."""
    num_guarded: int = 0
    """Entries that keep more bits than asked for, as a normalisation would multiply their noise (`norm_recompute`)."""

    def add(self, kind: str, plain_bytes: int, held_bytes: int) -> None:
        """Count one more."""
        self.entries[kind] += 1
        self.plain_bytes += plain_bytes
        self.held_bytes += held_bytes

    def __add__(self, other: Tally) -> Tally:
        """Return the sums of both."""
        return Tally(
            self.entries + other.entries,
            self.plain_bytes + other.plain_bytes,
            self.held_bytes + other.held_bytes,
            self.num_held_elsewhere + other.num_held_elsewhere,
            self.num_guarded + other.num_guarded,
        )

    @classmethod
    def of(cls, entries: Iterable[SavedStorage]) -> Tally:
        """Count entries."""
        tally, ours = cls(), []
        for entry in entries:
            if entry.is_held_elsewhere:
                tally.num_held_elsewhere += 1
                continue
            ours.append(entry)
            tally.entries[entry.encoding.kind] += 1
            tally.plain_bytes += entry.plain_bytes
            tally.num_guarded += entry.is_guarded
        tally.held_bytes = kept_bytes(ours)
        return tally


@dataclass
class Consequences:
    """What the codes of all scopes did to the mean of the gradient."""

    is_there: bool = False
    """Whether anything was kept in a lossy code."""
    nonlinear: set[str] = field(default_factory=set)
    """Functions that read one, and whose gradient is not linear in it."""
    is_compiled: bool = False
    """Whether compiled code kept one, of which is not known who reads it."""
    is_squared: bool = False
    """Whether one was read more than once, and not for the gradients of weights alone."""
    is_changed: bool = False
    """Whether the small elements of some tensor were dropped."""

    def note(self, entries: Iterable[SavedStorage]) -> None:
        """Add what the entries of one scope do."""
        uses: Counter[SavedStorage | IntCodes] = Counter()
        coupled: set[SavedStorage | IntCodes] = set()
        for entry in entries:
            if not entry.is_lossy:
                continue
            self.is_there = True
            part = entry.part if entry.encoding.fidelity == Fidelity.PART else None
            self.is_changed |= isinstance(part, Sample) and part.sampling.drops_small
            if not isinstance(part, Levels):  # right on average, and the gradient is linear in them
                self.nonlinear |= entry.nonlinear
            codes = codes_behind(entry)
            uses.update({code: entry.num_uses for code in codes})
            if entry.is_coupled:
                coupled |= codes
        self.is_squared |= any(uses[code] > 1 for code in coupled)

    def note_compiled(self, tally: Tally) -> None:
        """Add what compiled code has kept, of which nobody says who reads it."""
        if any(kind != "mask" for kind in tally.entries):
            self.is_there = self.is_compiled = True

    @property
    def loss_class(self) -> LossClass:
        """`"unbiased"` where every gradient is linear in every code, `"exact"` where there is none."""
        if not self.is_there:
            return "exact"
        if self.is_changed:
            return "changed"
        return "approximate" if self.nonlinear or self.is_squared or self.is_compiled else "unbiased"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why, for people."""
        reasons = []
        if self.is_changed:
            reasons.append("small elements of what layers read are dropped, which makes gradients of weights smaller")
        if self.nonlinear:
            reasons.append(f"{', '.join(sorted(self.nonlinear))}: their gradients are not linear in what codes keep")
        if self.is_compiled:
            reasons.append("in compiled code it is not looked at what gradients do with a code")
        if self.is_squared:
            reasons.append("a code is read twice on the way to one gradient, which has the square of its noise")
        return tuple(reasons)
