"""Sparse weights: a dense tensor while an operation runs, a recomputation while backward waits.

The parameter is the vector of a weight's live values. `densify` makes the dense weight; its gradient is gathered, so
that it is as short as the values. What an operation keeps of the dense weight (a view, or autocast's copy) is replaced
by how to make it again from values and index, which live anyway. That holds in a store's scope, and inside
`rebuilding_weights`, which hands all other tensors to the hooks around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.numerics.sparse_index import gather, scatter, unpack_positions
from lightning_memsave.saved_tensors.recompute_rules import RULES, Rule
from lightning_memsave.saved_tensors.saved_storage import Passed
from lightning_memsave.torch_internals.autograd_graph import (
    DENSIFY,
    Kept,
    Node,
    check_version,
    innermost_hooks,
    inputs_of,
    is_inside_transform,
    is_wrapped,
)
from lightning_memsave.torch_internals.fake_tensors import note_num_set

Watch = Callable[[Tensor], None]


def densify(values: Tensor, index: Tensor, shape: torch.Size, watch: Watch | None = None) -> Tensor:
    """Return the dense weight of live `values`.

    Args:
        values: [k].
        index: where they are (`numerics.sparse_index`).
        shape: of the dense weight.
        watch: called with the dense gradient, which nobody keeps; not inside of `vmap`, where autograd keeps the dense
            weight.

    Raises:
        RuntimeError: it runs inside of a transform of torch.func that differentiates.
    """
    if is_inside_transform():
        if is_wrapped(values.new_empty(0)):
            raise RuntimeError(
                "Sparse weights cannot be differentiated by torch.func (grad, jvp, ...), only by autograd, also inside "
                "of `vmap`. Leave out the modules that are called there: `Sparsity(modules=...)`."
            )
        positions = unpack_positions(index, shape.numel())
        return values.new_zeros(shape.numel()).index_copy(0, positions, values).view(shape)
    return _Densify.apply(values, index, shape, watch)  # type: ignore[no-any-return,no-untyped-call]  # untyped in torch


class _Densify(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, shape: torch.Size, watch: Watch | None) -> Tensor:
        ctx.index, ctx.dense_shape, ctx.watch, ctx.num_live = index, shape, watch, values.numel()
        return _dense(values, index, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.watch is not None:
            ctx.watch(gradient.detach())
        return _Gather.apply(gradient, ctx.index, ctx.num_live), None, None, None  # type: ignore[no-untyped-call]  # as above


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dense: Tensor, index: Tensor, num_live: int) -> Tensor:
        ctx.index, ctx.dense_shape = index, dense.shape
        note_num_set(index, num_live)
        return gather(dense.reshape(-1), index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return densify(gradient, ctx.index, ctx.dense_shape), None, None


def _dense(values: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    note_num_set(index, values.numel())
    return scatter(values.detach(), index, shape.numel()).view(shape)


class Rebuilt(Kept):
    """What is kept of a dense weight: nothing of its own.

    Args:
        tensor: a view or a cast of the weight.
        node: that of `densify`.
        rules: the way from the weight to `tensor`.
    """

    __slots__ = ("_dtype", "_index", "_rules", "_shape", "_size", "_stride", "_values", "_version")

    def __init__(self, tensor: Tensor, node: Any, rules: list[Rule]) -> None:
        self._values: Tensor = inputs_of(node)[0][0].variable  # type: ignore[union-attr]  # of a leaf
        self._version, self._index, self._shape = self._values._version, node.index, node.dense_shape
        self._size, self._stride, self._rules = tensor.shape, tensor.stride(), rules

    def get(self) -> Tensor:
        """Return the tensor, made again.

        Raises:
            RuntimeError: the values were changed in place since, as autograd itself would.
        """
        check_version(self._values, self._version, self._values.shape)
        with torch.no_grad():
            tensor = _dense(self._values, self._index, self._shape)
            for rule in self._rules:
                tensor = rule.function(tensor)
            if tensor.stride() == self._stride:
                return tensor
            return tensor.new_empty_strided(self._size, self._stride).copy_(tensor)


_TRANSPARENT: Mapping[str, Callable[..., Rule | None]] = {
    **{name: RULES[f"{name}Backward0"] for name in ("View", "UnsafeView", "Transpose", "Permute", "ToCopy", "Clone")},
    "T": lambda node, output_nr, operands: Rule(torch.t),
}


def rebuilt(tensor: Tensor) -> Rebuilt | None:
    """Return `tensor` as something that is made again; `None` when it is no view or cast of a sparse weight."""
    path: list[Node] = []
    node = tensor.grad_fn
    while node is not None and node.name().removesuffix("Backward0") in _TRANSPARENT:
        path.append(node)
        node = inputs_of(node)[0][0]
    if node is None or node.name() != DENSIFY or not hasattr(inputs_of(node)[0][0], "variable"):
        return None  # also of values that were computed (`torch.func.functional_call`)
    rules = [_TRANSPARENT[step.name().removesuffix("Backward0")](step, 0, {}) for step in reversed(path)]
    return Rebuilt(tensor, node, [rule for rule in rules if rule is not None])


def left_alone(tensor: Tensor) -> Kept:
    """Return what a store keeps of a weight: a sparse one's recomputation, else the tensor itself."""
    return (None if tensor.is_leaf else rebuilt(tensor)) or Passed(tensor)


class _Foreign:
    """A tensor that hooks around ours keep."""

    __slots__ = ("_kept", "_unpack")

    def __init__(self, kept: Any, unpack: Callable[[Any], Tensor]) -> None:
        self._kept, self._unpack = kept, unpack

    def get(self) -> Tensor:
        return self._unpack(self._kept)


@contextmanager
def rebuilding_weights() -> Iterator[None]:
    """Keep no dense weight for backward while entered; what else is kept goes where it would have gone.

    Transforms of torch.func bear no hooks, and keep it.
    """
    if not torch.is_grad_enabled() or is_inside_transform():
        yield
        return
    around, unpack_around = innermost_hooks()

    def pack(tensor: Tensor) -> Kept | _Foreign:
        if around is None:
            return left_alone(tensor)
        kept = rebuilt(tensor) or around(tensor)
        return kept if isinstance(kept, Kept) else _Foreign(kept, unpack_around)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.get()):
        yield
