"""Growth: what a run holds, or needs, more of from measured step to measured step.

A leak is told by its tensors: those that a measured step made, that are neither weights nor gradients nor optimizer
state, and that still live when a later one ends. What is replaced each step never counts, however its size changes. The
peak is watched besides, over more steps, because batches of random length let it grow by chance.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from lightning_memsave.measuring.ledger import Measurement
from lightning_memsave.measuring.source_lines import Survivor

NUM_HELD_FIGURES = 4
NUM_PEAK_FIGURES = 8  # random peaks rise this often in a row once in 40320 tries
_LEAST_FRACTION = 1e-4  # of the peak, in each measured step: less would not double it within ten thousand


@dataclass(frozen=True, kw_only=True)
class HeldTensors:
    """Tensors of one kind that measured steps left alive."""

    count: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    line: str


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A figure that has grown from each measured step to the next."""

    what: Literal["held", "peak"]
    figures_bytes: tuple[int, ...]
    """The figure of each of the last measured steps."""
    tensors: tuple[HeldTensors, ...] = ()
    """What is held, largest first; empty for a peak."""
    by_line: tuple[tuple[str, int], ...] = ()
    """How much more of the peak each line of code makes, largest first; empty for what is held."""


class GrowthWatch:
    """Watch that is told of each measured step, and says once for each figure that it grows."""

    def __init__(self) -> None:
        self._kept: list[Survivor] = []
        self._held: list[int] = []
        self._measured: list[Measurement] = []
        self._said: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process can know: not the tensors of this one."""
        return {**self.__dict__, "_kept": []}

    def observe(self, measured: Measurement) -> Growth | None:
        """Take in a measured step; returns what has been found with it."""
        if "held" not in self._said:
            self._kept = [survivor for survivor in self._kept if survivor.storage.is_alive]
            self._held.append(sum(survivor.num_bytes for survivor in self._kept))
            self._kept += measured.survivors
        self._measured = [*self._measured, replace(measured, survivors=())][-NUM_PEAK_FIGURES:]
        least = _LEAST_FRACTION * measured.peak_bytes
        held = self._held[-NUM_HELD_FIGURES:]
        if "held" not in self._said and len(held) == NUM_HELD_FIGURES and _grows(held, least):
            self._said.add("held")
            return Growth(what="held", figures_bytes=tuple(held), tensors=self._tensors())
        peaks = [each.peak_bytes for each in self._measured]
        if not self._said and len(peaks) == NUM_PEAK_FIGURES and _grows(peaks, least):
            self._said.add("peak")
            return Growth(what="peak", figures_bytes=tuple(peaks), by_line=self._lines())
        return None

    def _tensors(self) -> tuple[HeldTensors, ...]:
        kinds: dict[tuple[tuple[int, ...], torch.dtype, str], list[int]] = {}
        for survivor in self._kept:
            key = tuple(survivor.shape), survivor.dtype, survivor.line
            kinds.setdefault(key, []).append(survivor.num_bytes)
        found = [
            HeldTensors(count=len(sizes), num_bytes=sum(sizes), shape=shape, dtype=dtype, line=line)
            for (shape, dtype, line), sizes in kinds.items()
            if len(sizes) > 1  # one of a kind is what the last step leaves
        ]
        return tuple(sorted(found, key=lambda each: -each.num_bytes))

    def _lines(self) -> tuple[tuple[str, int], ...]:
        more = Counter(self._measured[-1].by_line)
        more.subtract(self._measured[0].by_line)
        return tuple((line, num_bytes) for line, num_bytes in more.most_common() if num_bytes > 0)


def _grows(figures: list[int], least: float) -> bool:
    return all(later - earlier > least for earlier, later in itertools.pairwise(figures))
