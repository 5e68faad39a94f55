"""Sparse layers: a layer's own class with another source of its weight.

The class of a layer changes in place to a subclass in which `weight` is a property, made from the parameter `values`
and the buffer `values_index` each time it is read. So the layer's own forward runs, whatever it is, and sees a dense
weight. Order and names of parameters in `state_dict` stay those of the dense layer.
"""

from __future__ import annotations

from typing import Any, NamedTuple, SupportsIndex, cast

import torch
from torch import Tensor, nn

from lightning_memsave.core.errors import setting_error
from lightning_memsave.numerics.master_weights import join
from lightning_memsave.numerics.sparse_index import entries_of_rows, gather, pack_positions, scatter, unpack_positions
from lightning_memsave.saved_tensors.sparse_weights import densify, rebuilding_weights
from lightning_memsave.techniques.sparsity.patterns import Group, best, best_of_groups
from lightning_memsave.torch_internals.autograd_graph import autograd_is_running
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


class SparseLayer(nn.Module):
    """What a layer becomes, together with its own class. Edit `values` instead of `weight`, which is made anew."""

    dense_class: type[nn.Module]
    values: nn.Parameter
    values_index: Tensor
    dense_shape: torch.Size
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

    @property
    def _correction(self) -> Tensor | None:
        """What low precision keeps of the values besides 16 bits, under the name that it gives it."""
        return dict(self.named_buffers(recurse=False)).get("_values_correction")

    def _add_gradient(self, gradient: Tensor) -> None:
        self.dense_gradient = gradient if self.dense_gradient is None else self.dense_gradient + gradient

    def move_to(self, positions: Tensor, values: Tensor) -> None:
        """Have `values` live at ascending `positions`; the parameter stays the same object."""
        if values.shape != self.values.shape:
            # Another dtype in between makes torch forget the node that took gradients of the old length: alive in a
            # graph of an earlier step that somebody keeps, it would refuse those of the new length.
            another = torch.float32 if values.dtype == torch.float64 else torch.float64
            self.values.data = values.new_empty(0, dtype=another)
            self.values.data = torch.empty_like(values)
        self.values.detach().copy_(values)  # an edit that such a graph's own backward notices
        self.values_index = pack_positions(positions, self.dense_shape.numel())

    # The two methods that torch calls for each module, and that its own subclasses override (seen in torch 2.13).
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        own: dict[str, Any] = {}
        super()._save_to_state_dict(own, prefix, keep_vars)
        for key, tensor in own.items():
            if key == f"{prefix}values":
                whole = tensor if self._correction is None else join(tensor.detach(), self._correction)
                destination[f"{prefix}weight"] = self.weight if keep_vars else self.layout.dense(whole)
            else:
                destination[key] = tensor

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        weight, values = f"{prefix}weight", f"{prefix}values"
        given = {key: tensor for key, tensor in state_dict.items() if key.startswith(prefix)}
        dense = given.pop(weight, None)
        if dense is not None and dense.shape == self.dense_shape:
            given[values] = self._taken_from(dense)
        elif dense is not None:
            error_msgs.append(f"size mismatch for {weight}: {dense.shape} in the checkpoint, {self.dense_shape} here.")
            given[values] = self.values
        super()._load_from_state_dict(given, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        missing_keys[:] = [weight if key == values else key for key in missing_keys]

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

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Reduce for copies and pickles: classes that are made on the fly are not found by name."""
        _, (cls, *arguments), *rest = cast("tuple[Any, ...]", super().__reduce_ex__(protocol))
        return _new, (cls.dense_class, *arguments), *rest


class SparseEmbedding(SparseLayer):
    """An embedding reads few rows of a large table, so only these become dense; its gradient likewise."""

    num_embeddings: int
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


def _new(dense_class: type[nn.Module], *arguments: Any) -> SparseLayer:
    cls = sparse_class(dense_class)
    return cls.__new__(cls, *arguments)


_CLASSES: dict[type, type[SparseLayer]] = {}


def sparse_class(dense_class: type[nn.Module]) -> type[SparseLayer]:
    """Return the sparse subclass of a layer's class."""
    if dense_class not in _CLASSES:
        body = {"dense_class": dense_class, "__module__": __name__}
        reads_rows = dense_class.forward is nn.Embedding.forward
        bases = (SparseEmbedding if reads_rows else SparseLayer, dense_class)
        _CLASSES[dense_class] = type(f"Sparse{dense_class.__name__}", bases, body)
    return _CLASSES[dense_class]


def become_sparse(module: nn.Module, packed: Tensor, group: Group | None = None) -> SparseLayer:
    """Keep the values at `packed` positions, which may be of groups, and let the rest go."""
    weight = module.get_parameter("weight")
    layout = Layout(packed.to(weight.device), weight.shape)
    values = nn.Parameter(layout.compact(weight.detach()))
    _put_in_place(module, "weight", "values", values)
    module.__class__ = sparse_class(type(module))
    layer = cast("SparseLayer", module)
    layer.register_buffer("values_index", layout.packed, persistent=False)
    layer.dense_shape, layer.group = layout.shape, group
    layer.watches_gradient, layer.dense_gradient = False, None
    return layer


def become_dense(layer: SparseLayer) -> None:
    """Undo `become_sparse`: a plain parameter, with zeros where nothing lived."""
    weight = nn.Parameter(layer.layout.dense(layer.values.detach()), requires_grad=layer.values.requires_grad)
    layer.__class__ = layer.dense_class  # type: ignore[assignment]  # the class it had
    for name in ("values_index", "dense_shape", "group", "watches_gradient", "dense_gradient"):
        delattr(layer, name)
    _put_in_place(layer, "values", "weight", weight)


def _put_in_place(module: nn.Module, old: str, new: str, parameter: nn.Parameter) -> None:
    """Replace one parameter by another; the order of all, which optimizers number them by, stays."""
    own = dict(module.named_parameters(recurse=False))
    for name in own:
        delattr(module, name)
    for name, p in own.items():
        module.register_parameter(*((new, parameter) if name == old else (name, p)))


def sparse_layers(model: nn.Module) -> dict[str, SparseLayer]:
    """Return the sparse layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLayer)}


def export_dense(module: nn.Module) -> nn.Module:
    """Make every sparse layer of `module` plain again, in place, with zeros kept.

    Returns:
        The module.

    Raises:
        ValueError: there is no sparse layer in it.
    """
    layers = sparse_layers(module)
    if not layers:
        raise setting_error("module", "must have sparse layers", type(module).__name__, "It is dense already.")
    for layer in layers.values():
        become_dense(layer)
    return module
