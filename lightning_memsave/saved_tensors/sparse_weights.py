"""Sparse weights: a dense tensor while an operation runs, a recomputation while backward waits (`rebuilt_weights`).

The parameter is the vector of a weight's live values. `densify` makes the dense weight; its gradient is gathered, so
that it is as short as the values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.numerics.sparse_index import gather, scatter, unpack_positions
from lightning_memsave.torch_internals.autograd_graph import DENSIFY, is_inside_transform, is_wrapped
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
        ctx.rebuild = functools.partial(_dense, index=index, shape=shape)
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


assert f"{_Densify.__name__}Backward" == DENSIFY
