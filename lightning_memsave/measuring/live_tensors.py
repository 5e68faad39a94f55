"""What is alive now: every tensor that Python or an autograd graph holds, by category, place and shape.

Made for the moment after memory has run out, when no ledger was running. It walks the garbage collector's objects and
the graphs behind them, allocates next to nothing, unpacks nothing and runs nobody's hooks. It takes a second or so, and
nothing before that. What only C++ or other libraries hold is not seen.

An activation is placed by its graph: in the module whose parameter the operation that keeps it reads, or after the
module of that kind that is nearest before it. Numbered siblings count as one: `blocks.*.up`.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from lightning_memsave.measuring.storages import storages, tensors_in
from lightning_memsave.torch_internals.autograd_graph import Node, kept_by
from lightning_memsave.torch_internals.held_optimizers import with_held


@dataclass(frozen=True, kw_only=True)
class Alive:
    """Tensors of one kind."""

    category: str
    """Category: one of `CATEGORIES`, or `"other"` (neither the model's nor in a graph)."""
    where: str
    """The module of a parameter; the operation that keeps an activation, and its module."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    count: int
    num_bytes: int


def alive(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], batch: object, device: torch.device
) -> list[Alive]:
    """Return the tensors on `device` by kind, each storage counted once, the largest kind first."""
    found: dict[tuple[str, str, tuple[int, ...], torch.dtype], list[int]] = {}
    seen: set[int] = set()
    for category, where, tensor in _everything(model, optimizers, batch):
        if type(tensor).__name__ == "FakeTensor" or is_lazy(tensor) or tensor.device.type != device.type:
            continue
        for storage in storages(tensor):
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                found.setdefault((category, where, tuple(tensor.shape), tensor.dtype), []).append(storage.nbytes())
    kinds = [
        Alive(category=category, where=where, shape=shape, dtype=dtype, count=len(sizes), num_bytes=sum(sizes))
        for (category, where, shape, dtype), sizes in found.items()
    ]
    return sorted(kinds, key=lambda kind: -kind.num_bytes)


def _everything(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], batch: object
) -> Iterator[tuple[str, str, Tensor]]:
    """Return category, place and tensor; what is known by identity comes first, so that it keeps its category."""
    yield from _of_model(model)
    for optimizer in with_held(optimizers):
        for leaf in tree_leaves(list(optimizer.state.values())):
            if isinstance(leaf, Tensor):
                yield "optimizer_state", type(optimizer).__name__, leaf
    for tensor in tensors_in(batch):
        yield "data", "batch", tensor
    held = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    places = _Places(model)
    for node in _nodes(node for tensor in held if (node := _node(tensor)) is not None):
        for tensor in kept_by(node):
            yield "activations", f"kept by {node.name()}{places.of(node)}", tensor
    for tensor in held:
        yield ("other" if _node(tensor) is None else "activations"), "held by Python", tensor


def _node(tensor: Tensor) -> Node | None:
    """Return a tensor's node; `None` as well for a view of which torch gives none, as what it is of was edited."""
    with contextlib.suppress(RuntimeError):
        return tensor.grad_fn
    return None


def _of_model(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for where, module in _modules(model):
        for parameter in module.parameters(recurse=False):
            yield "weights", where, parameter
            if parameter.grad is not None:
                yield "gradients", where, parameter.grad
        for buffer in module.buffers(recurse=False):
            yield "weights", where, buffer


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules by name; numbered siblings have one name."""
    for name, module in model.named_modules():
        yield re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or type(model).__name__, module


class _Places:
    """Places in the model of the nodes of a graph."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {
            id(parameter): where for where, module in _modules(model) for parameter in module.parameters(recurse=False)
        }
        self._after: dict[Node, str] = {}
        """The module of the nearest node that has one, at or before a node; empty where there is none."""

    def of(self, node: Node) -> str:
        """Return ` in MODULE`, ` after MODULE`, or nothing."""
        if own := self._own(node):
            return f" in {own}"
        passed, at = [], node
        while (name := self._after.get(at)) is None and not (name := self._own(at)):
            passed.append(at)
            before = next((n for n, _ in at.next_functions if n is not None), None)
            if before is None:
                name = ""
                break
            at = before
        self._after.update(dict.fromkeys(passed, name))
        return f" after {name}" if name else ""

    def _own(self, node: Node) -> str:
        for before, _ in node.next_functions:
            while before is not None and before.name() in _OF_A_WEIGHT:
                before = before.next_functions[0][0]
            leaf = getattr(before, "variable", None)
            if leaf is not None and (name := self._names.get(id(leaf))) is not None:
                return name
        return ""


_OF_A_WEIGHT = frozenset(("TBackward0", "ToCopyBackward0", "ViewBackward0", "TransposeBackward0", "UnsqueezeBackward0"))


def _nodes(starts: Iterable[Node]) -> Iterator[Node]:
    """Yield every node of the graphs that end in `starts`, once."""
    waiting, seen = list(starts), set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [next_node for next_node, _ in node.next_functions if next_node is not None]
