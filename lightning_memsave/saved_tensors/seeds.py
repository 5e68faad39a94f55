"""Seeds for the dither of lossy codes: a hash, so that any device draws the same and a resumed run goes on."""

from __future__ import annotations

from lightning_memsave.numerics.kbit import mix


class NoiseSeeds:
    """Seeds of the dither: each a hash of `seed`, step and number."""

    def __init__(self, seed: int) -> None:
        self._seed, self._step, self._num_drawn = seed, 0, 0

    def begin(self, step: int) -> None:
        """Start the stream of another step."""
        if step != self._step:
            self._step, self._num_drawn = step, 0

    @property
    def place(self) -> tuple[int, int]:
        """Position of the stream; a try that is made again starts at the same place."""
        return self._step, self._num_drawn

    def go_to(self, place: tuple[int, int]) -> None:
        """Go on from a `place`."""
        self._step, self._num_drawn = place

    def next_seed(self) -> int:
        """Return the next one of this step."""
        self._num_drawn += 1
        seed = 0
        for part in (self._seed, self._step, self._num_drawn):
            seed = mix((seed + part) & 0xFFFFFFFF)
        return seed
