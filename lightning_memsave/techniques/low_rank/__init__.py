"""Low rank: a layer's weight is two thin factors, and gradients and optimizer state are as thin.

What shrinks: a weight [N, M] becomes two factors [N, R] and [M, R], from its R largest singular values. They are all
that is stored, so what an optimizer sees is theirs. Bytes per weight of the dense layer, float32, with the fraction
f = R (N + M) / (N M), which is 1/16 for R = 16 and N = M = 512:

|               |  dense | low rank |
|---------------|-------:|---------:|
| weight        |      4 |      4 f |
| gradient      |      4 |      4 f |
| momentum      |      4 |      4 f |
| Adam's state  |      8 |      8 f |

Arithmetic falls to the fraction f as well: a Linear is two thin products, a k x k convolution is one to R channels and
a 1 x 1 convolution. Between them stand R numbers per position, which are kept for backward besides the input.

Loss class: `changed`: the model has fewer degrees of freedom, starts elsewhere, and weight decay acts on the factors.

Source: Hawkins and Zhang, "Bayesian Tensorized Neural Networks with Automatic Rank Selection", 2019
(https://arxiv.org/abs/1905.10478), and Hawkins, Liu and Zhang, 2020 (https://arxiv.org/abs/2010.08689), train low-rank
tensors from scratch, with ranks that a prior lowers. Khodak et al., "Initialization and Regularization of Factorized
Neural Layers", 2021 (https://arxiv.org/abs/2105.01029): factors from the singular values of a usual start. Different:
matrices alone, of one rank that stays; what is left of the weight is scaled to its Frobenius norm.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import Tensor, nn

from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.techniques.low_rank.factored_layers import (
    CONVOLUTIONS,
    LowRankLayer,
    become_low_rank,
    low_rank_layers,
    product_of,
)
from lightning_memsave.techniques.low_rank.low_rank_config import LowRank, sides_of
from lightning_memsave.torch_internals.compact_layers import compact_layers, make_dense
from lightning_memsave.torch_internals.fake_tensors import truth
from lightning_memsave.torch_internals.layer_selection import Wanted, select_layers

__all__ = ["LowRank", "LowRankLayer", "apply_low_rank", "estimate_low_rank", "low_rank_layers"]

_WANTED = Wanted("low_rank", "of low rank", (nn.Linear, *CONVOLUTIONS), "Linear or Conv")


def apply_low_rank(model: nn.Module, config: LowRank, factors: Mapping[str, Tensor] | None = None) -> Applied:
    """Replace weights of `model` by two factors, in place. Parameters stay the same objects, of other shapes.

    `state_dict` stays that of the dense model.

    Args:
        model: the model.
        config: the settings.
        factors: of layers, by name, to be used where their product is the layer's weight: a weight has many pairs of
            factors, of which a run that is resumed has one.

    Returns:
        The record; `undo` makes the layers dense again.

    Raises:
        ValueError: no layer matches, tied weights, or layers are of low rank already, or sparse.
    """
    if already := list(compact_layers(model)):
        rule = "must be applied once, to dense layers"
        raise setting_error("low_rank", rule, already[0], "Call `.undo()` of the first one.")
    modules, left = _select(model, config)
    layers = {}
    for name, module in modules.items():
        rank, weight = config.rank_of(module.get_parameter("weight").shape), module.get_parameter("weight")
        known = None if factors is None else _that_fit(factors.get(name), weight, rank)
        layers[name] = become_low_rank(module, rank, known)

    total = sum(layer.dense_shape.numel() for layer in layers.values())
    num_left = sum(layer.factors.numel() for layer in layers.values())
    dense = f"; dense: {', '.join(f'{name} ({reason})' for name, reason in left.items())}" if left else ""
    ranks = sorted({layer.rank for layer in layers.values()})
    of_rank = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    return Applied(
        technique="low_rank",
        summary=f"{num_left:,} numbers instead of {total:,} weights in {len(layers)} layers ({of_rank}){dense}",
        loss_class="changed",
        reasons=(f"the weights of {len(layers)} layers are products of two factors ({of_rank})",),
        restore=functools.partial(make_dense, layers.values()),
    )


def estimate_low_rank(model: nn.Module, config: LowRank) -> int:
    """Return bytes of the factors of the layers that `config` would replace; exact."""
    weights = [module.get_parameter("weight") for module in _select(model, config)[0].values()]
    return sum(config.rank_of(w.shape) * sum(sides_of(w.shape)) * w.element_size() for w in weights)


def _select(model: nn.Module, config: LowRank) -> tuple[dict[str, nn.Module], dict[str, str]]:
    def why_dense(module: nn.Module, weight: nn.Parameter) -> str | None:
        if weight.is_meta:
            return "its weight has no memory yet"
        if getattr(module, "groups", 1) != 1:
            return f"{module.groups} groups"
        if getattr(module, "padding_mode", "zeros") != "zeros":
            return f"padding_mode={module.padding_mode!r}"
        rank = config.rank_of(weight.shape)
        if rank == 0 or rank * sum(sides_of(weight.shape)) >= weight.numel():
            return f"rank {max(1, rank)} takes no fewer bytes" if rank else "its rank would be 0"
        return None

    return select_layers(model, config, _WANTED, why_dense)


def _that_fit(factors: Tensor | None, weight: Tensor, rank: int) -> Tensor | None:
    """Return factors whose product a weight is, up to rounding on another device or in another dtype."""
    if factors is None or factors.shape != (sum(sides_of(weight.shape)), rank):
        return None
    product = product_of(factors.to(weight.device, weight.dtype), weight.shape)
    is_same = (product - weight).abs().max() <= 1e-2 * weight.abs().max()
    return factors if truth(is_same, True) else None
