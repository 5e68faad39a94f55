"""Random numbers that are drawn beside a run are not missing in it."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator

import torch

from lightning_memsave.vault.state import Randomness


@contextlib.contextmanager
def random_state_kept(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Whatever is drawn inside, the generators of Python, numpy, torch's CPU and `devices` go on from here."""
    state, numpy = random.getstate(), sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    with Randomness.untouched(devices):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)
