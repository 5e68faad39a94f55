"""Sparsity: weights, gradients and optimizer state exist for a fraction of the weights, and nothing else is stored.

What shrinks: of each layer's weight only the live values stay, as one vector, and packed positions beside it. What an
optimizer sees is that vector, so gradients and state are as short. Bytes per weight of the dense layer, float32:

|               |  dense | density d, 1-bit positions | d < 1/16, 16-bit positions |
|---------------|-------:|---------------------------:|---------------------------:|
| weight        |      4 |                4 d + 0.125 |                        6 d |
| gradient      |      4 |                        4 d |                        4 d |
| momentum      |      4 |                        4 d |                        4 d |
| Adam's state  |      8 |                        8 d |                        8 d |

The dense weight, and its gradient, exist while one layer computes. Arithmetic is dense, so this saves memory, not time.

Loss class: `changed`: most weights are zero. What is computed with those that live is what masked dense training
computes, bit for bit.

Source: Sohoni et al., "Low-Memory Neural Network Training: A Technical Report", 2019
(https://arxiv.org/abs/1904.10631) count compact storage of weights, gradients and state. Methods: SET, Mocanu et al.,
2018 (https://arxiv.org/abs/1707.04780); RigL, Evci et al., 2020 (https://arxiv.org/abs/1911.11134); dynamic sparse
reparameterization, Mostafa and Wang, 2019 (https://arxiv.org/abs/1902.05967); gradual pruning, Zhu and Gupta, 2017
(https://arxiv.org/abs/1710.01878); SNIP, Lee et al., 2019 (https://arxiv.org/abs/1810.02340). Different: an update
follows the optimizer's step instead of replacing it; what was dropped in an update cannot grow in the same one; SNIP's
scores are taken with the weights after the first step; the first threshold of `"dsr"` is the one that moves the wanted
fraction, where its authors start at 0.001.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.numerics.sparse_index import pack_positions, unpack_positions
from lightning_memsave.techniques.sparsity.layers import (
    Layout,
    SparseLayer,
    become_sparse,
    sparse_layers,
)
from lightning_memsave.techniques.sparsity.patterns import averaged, choose_positions, layers_to_change
from lightning_memsave.techniques.sparsity.sparsity_config import Sparsity, UpdateSchedule
from lightning_memsave.techniques.sparsity.updates import MaskUpdates
from lightning_memsave.torch_internals.compact_layers import compact_layers, make_dense
from lightning_memsave.torch_internals.private_names import require

__all__ = [
    "Layout",
    "MaskUpdates",
    "SparseLayer",
    "Sparsity",
    "UpdateSchedule",
    "apply_sparsity",
    "choose_patterns",
    "estimate_sparsity",
    "sparse_layers",
]


def apply_sparsity(model: nn.Module, config: Sparsity, patterns: Mapping[str, Tensor] | None = None) -> Applied:
    """Make layers of `model` sparse, in place. Parameters stay the same objects, of other shapes.

    `state_dict` stays that of the dense model. Patterns that change are moved by `MaskUpdates`, after each step.

    Args:
        model: the model.
        config: the settings.
        patterns: packed positions by layer (`Layout.packed`), instead of choosing them.

    Returns:
        The record; `undo` makes the layers dense again, with zeros.

    Raises:
        ValueError: no layer matches, tied weights, an embedding that edits its weight, or layers are sparse already, or
            of low rank.
    """
    require("autograd", "sparsity")
    if already := list(compact_layers(model)):
        rule = "must be applied once, to dense layers"
        raise setting_error("sparsity", rule, already[0], "Call `.undo()` of the first one.")
    if patterns is None:
        patterns = choose_patterns(model, config)
    modules, left = layers_to_change(model, config)
    if modules.keys() != patterns.keys():
        raise setting_error(
            "sparsity",
            "must select the layers of the checkpoint",
            sorted(modules.keys() ^ patterns.keys()),
            "Resume with the settings that the checkpoint was written with.",
        )
    layers = {name: become_sparse(module, patterns[name], config.group) for name, module in modules.items()}

    return Applied(
        technique="sparsity",
        summary=_summary(layers, left, config),
        loss_class="changed",
        reasons=(f"{config.sparsity} of the weights of {len(layers)} layers are zero ({config.method})",),
        restore=functools.partial(make_dense, layers.values()),
    )


def choose_patterns(model: nn.Module, config: Sparsity) -> dict[str, Tensor]:
    """Return the packed positions of the weights that live at the start, by layer."""
    modules, _ = layers_to_change(model, config)
    weights = {name: module.get_parameter("weight") for name, module in modules.items()}
    if config.starts_dense:
        positions = {name: torch.arange(weight.numel(), device=weight.device) for name, weight in weights.items()}
    else:
        density, group, initial = config.density, config.group, config.initial
        named = averaged(model)
        positions = choose_positions(weights, density, group, initial, config.distribution, config.seed, named)
    return {name: pack_positions(positions[name], weight.numel()) for name, weight in weights.items()}


def _summary(layers: Mapping[str, SparseLayer], left: Mapping[str, str], config: Sparsity) -> str:
    live = sum(layer.values.numel() for layer in layers.values())
    total = sum(layer.dense_shape.numel() for layer in layers.values())
    dense = f"; dense: {', '.join(f'{name} ({reason})' for name, reason in left.items())}" if left else ""
    return f"{live:,} of {total:,} weights live in {len(layers)} layers ({config.method}){dense}"


def estimate_sparsity(model: nn.Module, config: Sparsity) -> int:
    """Return bytes of the weights of the layers that `config` would make sparse, positions included; exact."""
    patterns = choose_patterns(model, config)
    weights = {name: model.get_submodule(name).get_parameter("weight") for name in patterns}
    num_live = {name: unpack_positions(patterns[name], w.numel()).numel() for name, w in weights.items()}
    return sum(num_live[name] * w.element_size() + patterns[name].nbytes for name, w in weights.items())
