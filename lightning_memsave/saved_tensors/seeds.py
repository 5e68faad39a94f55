"""Seeds for the dither of lossy codes: a hash, so that any device draws the same and a resumed run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from lightning_memsave.numerics.kbit import mix

Place = tuple[int, Mapping[int, int]]
"""A step, and how many seeds it has drawn from each stream."""


class NoiseSeeds:
    """Seeds of the dither: each a hash of `seed`, step, stream and number."""

    def __init__(self, seed: int) -> None:
        self._seed, self._step = seed, 0
        self._num_drawn: Counter[int] = Counter()

    def begin(self, step: int) -> None:
        """Start the streams of another step."""
        if step != self._step:
            self._step, self._num_drawn = step, Counter()

    @property
    def place(self) -> Place:
        """Position of the streams; a try that is made again starts at the same place."""
        return self._step, self._num_drawn.copy()

    def go_to(self, place: Place) -> None:
        """Go on from a `place`."""
        self._step, self._num_drawn = place[0], Counter(place[1])

    def next_seed(self, stream: int = 0) -> int:
        """Return the next one of this step.

        Args:
            stream: tells tensors apart whose order may change: a compiler puts operations in another order when the
                shape of a batch is new.
        """
        self._num_drawn[stream] += 1
        seed = 0
        for part in (self._seed, self._step, self._num_drawn[stream], *([stream] if stream else ())):
            seed = mix((seed + part) & 0xFFFFFFFF)
        return seed
