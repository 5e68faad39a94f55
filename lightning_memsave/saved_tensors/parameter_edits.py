"""Parameters that a forward pass edits in place: noticed, named, and put back where a trial has done it.

A parameter's version counts edits, but for those through `.data`, which has a version of its own. Those are told by
the values: by their fingerprint (`fingerprints.py`), which takes no memory, where somebody asks to read them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memsave.saved_tensors.fingerprints import Fingerprint, fingerprint, is_near
from lightning_memsave.torch_internals.autograd_graph import storage_key, version_of
from lightning_memsave.torch_internals.dispatch_mode import DispatchMode
from lightning_memsave.torch_internals.sharded_parameters import with_shards, written_part


class ParameterEdits:
    """Tells which tensors were edited in place since it was made.

    Args:
        named: the tensors, by name.
        reads: names of those whose values are compared as well; `None` for all.
    """

    def __init__(self, named: Iterable[tuple[str, Tensor]], reads: Container[str] | None = ()) -> None:
        self._before = [
            (name, t, version_of(t), _value_of(t) if reads is None or name in reads else None) for name, t in named
        ]

    def edited(self) -> dict[str, Tensor]:
        """Return those that were edited, by name."""
        return {n: t for n, t, version, value in self._before if version_of(t) != version or _differs(t, value)}

    def without_version(self) -> set[str]:
        """Return the names of those that have other values at the same version: edited through `.data`."""
        return {n for n, t, version, value in self._before if version_of(t) == version and _differs(t, value)}


def _value_of(tensor: Tensor) -> Fingerprint | None:
    # FSDP2 frees the memory of what it has gathered.
    if not _has_storage(tensor) or tensor.is_meta or not tensor.untyped_storage().nbytes():
        return None
    return fingerprint(tensor.detach())  # a parameter is a subclass


def _differs(tensor: Tensor, before: Fingerprint | None) -> bool:
    now = None if before is None else _value_of(tensor)
    return now is not None and str(now) != str(before)  # as texts: NaN equals NaN


class RepeatedEdits:
    """Parameters that a call has edited in place, and that another one, of the same, has edited again.

    Args:
        edited: what the first one has edited, by name.
    """

    def __init__(self, edited: dict[str, Tensor] | None = None) -> None:
        self._left: dict[str, tuple[Tensor, Fingerprint | None]] = {}
        self.add(edited or {})

    def add(self, edited: dict[str, Tensor]) -> None:
        """Note what a region's call has edited."""
        self._left.update((name, (tensor, _value_of(tensor))) for name, tensor in edited.items())

    def take(self) -> list[str]:
        """Return, once, those that do not have the values again that were noted: an average, no clamp."""
        left, self._left = self._left, {}
        return [name for name, (tensor, value) in left.items() if not _has_again(tensor, value)]


def _has_again(tensor: Tensor, left: Fingerprint | None) -> bool:
    now = _value_of(tensor)
    return left is not None and now is not None and is_near(left, now, tensor.dtype, tensor.numel())


class ParametersKept(DispatchMode):
    """Mode that gives parameters edited inside it (a teacher that follows in `training_step`) their values back.

    A copy is made of each just before its first edit: most steps edit none.

    Args:
        module: whose.
    """

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        named = with_shards(module, module.named_parameters())
        held = ((p, p.data) for p in dict.fromkeys(written_part(p) for _, p in named) if _has_storage(p))
        self._held = list(held)
        self._parameters = {storage_key(p): p for p, _ in self._held}
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if getattr(getattr(func, "_schema", None), "is_mutable", False):
            for tensor in filter(_has_storage, map(_written, tree_leaves((args, kwargs)))):
                parameter = self._parameters.pop(storage_key(tensor), None)
                if parameter is not None:
                    self._before.append((parameter.data, parameter.data.clone()))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        for values, before in self._before:
            values.copy_(before)
        for parameter, values in self._held:
            if storage_key(parameter) != storage_key(values):  # `parameter.data = ...`
                parameter.data = values


def _written(leaf: Any) -> Any:
    return written_part(leaf) if isinstance(leaf, Tensor) else leaf


def _has_storage(tensor: Any) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
