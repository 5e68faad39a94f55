"""What modules consist of: what a first forward pass builds or decides can be taken away again.

Some modules make layers, buffers or hooks in their first forward pass, or count in objects of their own. Where that
pass is made again (after a rehearsal, or a try that ran out of memory), it finds what the first one found, and draws
the same random numbers. Costs a copy of some dictionaries for each module, so it is done for first batches only.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_memsave.core.selection import is_scripted
from lightning_memsave.saved_tensors.object_state import state_of
from lightning_memsave.saved_tensors.randomness import PARTS_OF_TORCH
from lightning_memsave.techniques.checkpointing import REGION
from lightning_memsave.techniques.tiling import TILES
from lightning_memsave.torch_internals.containers import CONTAINERS, refill

_OF_REGIONS = (REGION, TILES, "forward")  # which may be made and withdrawn meanwhile
OF_LIGHTNING = frozenset(name for name in vars(LightningModule()) if name.startswith("_"))
"""Attributes that torch and Lightning give to a LightningModule."""

_PARTS = [name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))]
"""Names of torch's own containers in a module: parameters, buffers, children, hooks."""


class Structure:
    """Parameters, buffers, children, hooks and objects of modules, as they are now.

    Args:
        modules: whose; lazy modules, which change their class, and those of TorchScript are left alone.
        users: those of them whose plain attributes are put back by reference, and objects among these filled with what
            they held, as far as that can be pickled.
    """

    def __init__(self, modules: Sequence[nn.Module], users: Sequence[nn.Module]) -> None:
        own = [module for module in modules if not is_scripted(module) and not isinstance(module, LazyModuleMixin)]
        parts = ((name, vars(module)[name]) for module in own for name in _PARTS)
        self._parts = [(name, part, part.copy()) for name, part in parts]
        self._attributes = [(module, _attributes_of(module)) for module in users]
        self._states = [
            (module, name, value, state)
            for module, named in self._attributes
            for name, value in named.items()
            if type(value) not in CONTAINERS  # those are copied for each batch
            and (state := state_of(value)) is not None
        ]

    def restore(self) -> None:
        """Put everything back, in place where others may hold on to it."""
        for name, part, before in self._parts:
            if name == "_parameters":  # FSDP2 exchanges them, and knows which ones are there
                before = {k: value if value is None or part.get(k) is None else part[k] for k, value in before.items()}
            if not _is_same(part, before):
                refill(part, before)
        for module, named in self._attributes:
            for name in _attributes_of(module).keys() - named.keys():
                del vars(module)[name]
            vars(module).update(named)
        for module, name, value, state in self._states:
            now = state_of(value)
            if now is None or not state.equals(now):
                vars(module)[name] = _refilled(value, state.copy(state.references))


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    left = PARTS_OF_TORCH | OF_LIGHTNING
    return {name: value for name, value in vars(module).items() if name not in left and name not in _OF_REGIONS}


def _is_same(part: Any, before: Any) -> bool:
    if isinstance(part, set):
        return bool(part == before)
    return part.keys() == before.keys() and all(part[key] is before[key] for key in before)


def _refilled(value: object, twin: Any) -> Any:
    """Return `value` in the state of `twin`; `twin` itself where that cannot be done in place."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.shape == twin.shape:
        value[...] = twin
    elif isinstance(value, (list, dict, set, deque)):
        refill(value, twin)
    elif not hasattr(value, "__dict__"):
        return twin
    if hasattr(value, "__dict__"):
        vars(value).clear()
        vars(value).update(vars(twin))
    return value
