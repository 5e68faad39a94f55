"""Sparse layers: a layer's own class with another source of its weight.

`weight` is a property, made from the parameter `values` and the buffer `values_index` each time it is read. So the
layer's own forward runs, whatever it is, and sees a dense weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_memsave.numerics.master_weights import join
from lightning_memsave.numerics.sparse_index import entries_of_rows, gather, pack_positions, scatter, unpack_positions
from lightning_memsave.saved_tensors.rebuilt_weights import rebuilding_weights
from lightning_memsave.saved_tensors.sparse_weights import densify
from lightning_memsave.techniques.sparsity.patterns import Group, best, best_of_groups
from lightning_memsave.torch_internals.autograd_graph import autograd_is_running
from lightning_memsave.torch_internals.compact_layers import (
    CompactLayer,
    compact_class,
    rename_parameter,
    replace_values,
)
from lightning_memsave.torch_internals.fake_tensors import is_fake


class Layout(NamedTuple):
    """Positions of live values in the dense weight."""

    packed: Tensor
    """Packed positions (`numerics.sparse_index`)."""
    shape: torch.Size

    def dense(self, values: Tensor) -> Tensor:
        """Return `values`, [k], at their places among zeros."""
        return scatter(values, self.packed.to(values.device), self.shape.numel()).view(self.shape)

    def compact(self, dense: Tensor) -> Tensor:
        """Return the live ones of dense values."""
        return gather(dense.reshape(-1), self.packed.to(dense.device))

    def positions(self) -> Tensor:
        """Return the ascending positions in the flat weight, [k]."""
        return unpack_positions(self.packed, self.shape.numel())


class SparseLayer(CompactLayer):
    """What a layer becomes, together with its own class. Edit `values` instead of `weight`, which is made anew."""

    prefix, parameter_name = "Sparse", "values"
    own_attributes = ("values_index", "group", "watches_gradient", "dense_gradient")
    values: nn.Parameter
    values_index: Tensor
    group: Group | None
    """Group size of a pattern that has as many values in each group."""
    watches_gradient: bool
    """Whether the dense gradient is added up in `dense_gradient`."""
    dense_gradient: Tensor | None

    @property
    def layout(self) -> Layout:
        """Positions of the values."""
        return Layout(self.values_index, self.dense_shape)

    @property
    def weight(self) -> Tensor:
        """The dense weight; its gradient goes to `values`."""
        if not (self.watches_gradient and torch.is_grad_enabled()):
            return densify(self.values, self.values_index, self.dense_shape)
        # The first forward pass of a step, or of a step that is run again; no repetition of a region's.
        if self.values.grad is None and not autograd_is_running():
            self.dense_gradient = None
        return densify(self.values, self.values_index, self.dense_shape, self._add_gradient)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's own forward, of which no dense weight is kept."""
        with rebuilding_weights():
            return super().forward(*args, **kwargs)

    def _add_gradient(self, gradient: Tensor) -> None:
        self.dense_gradient = gradient if self.dense_gradient is None else self.dense_gradient + gradient

    def move_to(self, positions: Tensor, values: Tensor) -> None:
        """Have `values` live at ascending `positions`; the parameter stays the same object."""
        replace_values(self.values, values)
        self.values_index = pack_positions(positions, self.dense_shape.numel())

    def whole_values(self) -> Tensor:
        """Return the live values."""
        values = self.values.detach()
        return values if self._correction is None else join(values, self._correction)

    def _dense_of(self, whole: Tensor) -> Tensor:
        return self.layout.dense(whole)

    def _taken_from(self, dense: Tensor) -> Tensor:
        """Return the largest of `dense`, as many as there are values; of each group where there are groups.

        The pattern stays where it covers what is not zero.
        """
        flat = dense.detach().reshape(-1)
        score = flat.abs().to(self.values.device, torch.float32)
        score[self.layout.positions()] += torch.finfo(torch.float32).tiny
        positions = best(score, self.values.numel()) if self.group is None else best_of_groups(score, self.group)
        self.values_index = pack_positions(positions, flat.numel())
        return flat[positions.to(flat.device)]


class SparseEmbedding(SparseLayer):
    """An embedding reads few rows of a large table, so only these become dense; its gradient likewise."""

    padding_idx: int | None
    scale_grad_by_freq: bool

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def forward(self, input: Tensor) -> Tensor:
        """Look up rows as the embedding's own forward does."""
        if self.watches_gradient or is_fake(self.values) or is_fake(input):
            return super().forward(input)  # type: ignore[no-any-return]  # a tensor
        rows, inverse = input.long().unique(return_inverse=True)
        if len(rows):  # the embedding of few rows would not notice
            torch._assert_async((rows[0] >= 0) & (rows[-1] < self.dense_shape[0]), "index out of range in an embedding")
        numbers, places = entries_of_rows(self.values_index, self.dense_shape, rows)
        width = self.dense_shape[1]
        read = self.values.index_select(0, numbers)
        few = read.new_zeros(rows.numel() * width).index_copy(0, places, read).view(-1, width)
        padding = None if self.padding_idx is None else (rows == self.padding_idx).nonzero().view(-1).tolist()
        return nn.functional.embedding(
            inverse, few, padding[0] if padding else None, scale_grad_by_freq=self.scale_grad_by_freq
        )


def sparse_class(dense_class: type[nn.Module]) -> type[CompactLayer]:
    """Return the sparse subclass of a layer's class."""
    reads_rows = dense_class.forward is nn.Embedding.forward
    return compact_class(SparseEmbedding if reads_rows else SparseLayer, dense_class)


def become_sparse(module: nn.Module, packed: Tensor, group: Group | None = None) -> SparseLayer:
    """Keep the values at `packed` positions, which may be of groups, and let the rest go."""
    weight = module.get_parameter("weight")
    layout = Layout(packed.to(weight.device), weight.shape)
    rename_parameter(module, "weight", "values", layout.compact(weight.detach()))
    module.__class__ = sparse_class(type(module))
    layer = cast("SparseLayer", module)
    layer.register_buffer("values_index", layout.packed, persistent=False)
    layer.dense_shape, layer.group = layout.shape, group
    layer.watches_gradient, layer.dense_gradient = False, None
    return layer


def sparse_layers(model: nn.Module) -> dict[str, SparseLayer]:
    """Return the sparse layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLayer)}
