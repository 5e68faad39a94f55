"""Layouts of sparse layers, by which checkpoints have that of the dense model."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_memsave.techniques.sparsity.layers import Layout, sparse_layers


def layouts_of(model: nn.Module) -> dict[Tensor, Layout]:
    """Return where the values of a model's sparse layers are now."""
    return {layer.values: layer.layout for layer in sparse_layers(model).values()}
