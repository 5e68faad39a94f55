"""Paged state, whose pages are CUDA's managed memory: bitsandbytes never frees one, and a copy of it is none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from lightning_memsave.techniques.optimizer_state.optimizer_mapping import is_8bit, memory_of


def note_pages(optimizer: torch.optim.Optimizer) -> None:
    """Remember which tensors of the state of an 8-bit optimizer are pages."""
    memory_of(optimizer).pages = {
        p: {name: value for name, value in state.items() if getattr(value, "is_paged", False)}
        for p, state in optimizer.state.items()
    }


@contextmanager
def pages_kept(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Let Lightning move optimizer state from device to device while entered.

    Paged state is where it was afterwards.
    """
    paged = [optimizer for optimizer in optimizers if is_8bit(optimizer)]
    for optimizer in paged:
        note_pages(optimizer)
    try:
        yield
    finally:
        for optimizer in paged:
            _put_back(optimizer)


def _put_back(optimizer: torch.optim.Optimizer) -> None:
    for p, pages in memory_of(optimizer).pages.items():
        state = optimizer.state[p]
        for name, page in pages.items():
            if state[name] is not page:
                page.copy_(state[name])
                state[name] = page
