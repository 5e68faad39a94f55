"""What a batch starts with: kept, so that it can be run again, or rehearsed, as if nothing had happened."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

from lightning_memsave.vault.state import Buffers, Randomness


class BatchStart:
    """What a batch starts with, as far as a try may change it.

    Args:
        module: the LightningModule.
        changing: names of buffers that a step changes; `None` while that is unknown.
        accumulates: whether gradients of earlier batches are there and stay.
    """

    def __init__(self, module: Any, changing: set[str] | None, accumulates: bool) -> None:
        self._module = module
        devices = {p.device for p in module.parameters()}
        self._torch, self._python = Randomness(devices), random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._modes = [(m, m.training) for m in module.modules()]
        self._fx_name = module._current_fx_name
        self._attributes = {
            key: copy.copy(value)
            for key, value in vars(module).items()
            if not key.startswith("_") and isinstance(value, (int, float, str, list, dict, set, type(None)))
        }
        self._buffers = Buffers(module, changing)
        self._gradients = [
            (p, p.grad.clone() if accumulates and p.grad is not None else None) for p in module.parameters()
        ]

    def changed_buffers(self) -> set[str]:
        """The names of the buffers that have changed since."""
        return self._buffers.changed()

    def restore(self) -> None:
        """Put everything back, in place where others may hold on to it."""
        self._torch.restore()
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for module, mode in self._modes:
            module.training = mode
        self._module._current_fx_name = self._fx_name
        for key, value in self._attributes.items():
            _put_back(self._module, key, value)
        self._buffers.put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient


def _put_back(module: Any, key: str, value: Any) -> None:
    """Give a plain attribute the value that it had, containers in place."""
    current = vars(module).get(key)
    if isinstance(value, list) and isinstance(current, list):
        current[:] = value
    elif isinstance(value, (dict, set)) and type(current) is type(value):
        current.clear()
        current.update(value)
    else:
        vars(module)[key] = value
