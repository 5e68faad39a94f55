"""What modules consist of: what a first forward pass builds or decides can be taken away again.

Some modules make layers, buffers or hooks in their first forward pass, or count in objects of their own. Where that
pass is made again (after a rehearsal, or a try that ran out of memory), it finds what the first one found, and draws
the same random numbers. Costs a copy of some dictionaries for each module, so it is done for first batches only.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_memsave.core.selection import is_scripted
from lightning_memsave.loops.batch_objects import Objects, key_of
from lightning_memsave.saved_tensors.randomness import PARTS_OF_TORCH
from lightning_memsave.techniques.checkpointing import REGION
from lightning_memsave.techniques.tiling import TILES
from lightning_memsave.torch_internals.containers import refill

_OF_REGIONS = (REGION, TILES, "forward")  # which may be made and withdrawn meanwhile
OF_LIGHTNING = frozenset(name for name in vars(LightningModule()) if name.startswith("_"))
"""Attributes that torch and Lightning give to a LightningModule."""

_PARTS = [name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))]
"""Names of torch's own containers in a module: parameters, buffers, children, hooks."""


class Structure:
    """Parameters, buffers, children, hooks and objects of modules, as they are now.

    Args:
        modules: whose; lazy modules, which change their class, and those of TorchScript are left alone.
        users: those of them whose plain attributes are put back by reference, and objects among these in place.
    """

    def __init__(self, modules: Sequence[nn.Module], users: Sequence[nn.Module]) -> None:
        own = [module for module in modules if not is_scripted(module) and not isinstance(module, LazyModuleMixin)]
        parts = ((name, vars(module)[name]) for module in own for name in _PARTS)
        self._parts = [(name, part, part.copy()) for name, part in parts]
        self._attributes = [(module, _attributes_of(module)) for module in users]
        self.objects = Objects((module, n, value) for module, named in self._attributes for n, value in named.items())
        """Objects of users' modules; plain containers of anything else are copied for each batch."""

    def restore(self) -> None:
        """Put everything back, in place where others may hold on to it."""
        for name, part, before in self._parts:
            if name == "_parameters":  # FSDP2 exchanges them, and knows which ones are there
                before = {k: value if value is None or part.get(k) is None else part[k] for k, value in before.items()}
            if not is_same(part, before):
                refill(part, before)
        for module, named in self._attributes:
            for name in _attributes_of(module).keys() - named.keys():
                del vars(module)[name]
            vars(module).update(named)
        self.objects.restore()


def objects_of(modules: Iterable[nn.Module], keys: Container[str]) -> Objects:
    """Return what attributes hold now, as `Objects.changed` names them."""
    attributes = ((module, name, value) for module in modules for name, value in vars(module).items())
    return Objects(((m, n, value) for m, n, value in attributes if key_of(m, n) in keys), are_known=True)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    left = PARTS_OF_TORCH | OF_LIGHTNING
    return {name: value for name, value in vars(module).items() if name not in left and name not in _OF_REGIONS}


def is_same(part: Any, before: Any) -> bool:
    """Return whether one of torch's containers in a module holds the same objects as its copy, in the same order."""
    if isinstance(part, set):
        return bool(part == before)
    return list(part) == list(before) and all(part[key] is before[key] for key in before)
