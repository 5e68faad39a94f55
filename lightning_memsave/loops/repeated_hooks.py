"""`on_before_zero_grad` for a batch that is run again: what it did to the module was put back, so it runs again.

One that reads gradients runs once: those of the step before are no longer there. What a callback keeps in itself is not
put back, so the report says that its hook has run twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch

from lightning_memsave.lightning_compat import callbacks_of, is_overridden, says_grad

_HOOK = "on_before_zero_grad"


def run_again(trainer: L.Trainer, optimizer: torch.optim.Optimizer) -> list[str]:
    """Run the hooks of a batch whose failed try has run them; return the names of those that are of callbacks."""
    module = trainer.lightning_module
    name_before, module._current_fx_name = module._current_fx_name, _HOOK  # as logs want it
    try:
        of_callbacks = []
        for owner in _owners(trainer):
            if owner is module:
                module.on_before_zero_grad(optimizer)
            else:
                owner.on_before_zero_grad(trainer, module, optimizer)
                of_callbacks.append(f"{type(owner).__name__}.{_HOOK}")
        return of_callbacks
    finally:
        module._current_fx_name = name_before


def _owners(trainer: L.Trainer) -> Iterator[Any]:
    """Yield callbacks and the module, in Lightning's order, whose hook does something besides reading gradients."""
    for owner in (*callbacks_of(trainer), trainer.lightning_module):
        if is_overridden(owner, _HOOK) and not says_grad(getattr(owner, _HOOK)):
            yield owner
