"""Low-rank layers: a layer's own class with two factors in the place of its weight.

`factors` [N + M, R] holds both below each other: one parameter, as the weight was one. torch's own layers compute with
the factors. Any other forward reads `weight`, which is their product, made each time it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memsave.numerics.factors import factors_of
from lightning_memsave.numerics.master_weights import join
from lightning_memsave.techniques.low_rank.low_rank_config import sides_of
from lightning_memsave.torch_internals.compact_layers import CompactLayer, compact_class, rename_parameter
from lightning_memsave.torch_internals.layer_selection import is_conv1d_of_transformers

CONVOLUTIONS: Mapping[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: F.conv1d,
    nn.Conv2d: F.conv2d,
    nn.Conv3d: F.conv3d,
}


class LowRankLayer(CompactLayer):
    """What a layer becomes, together with its own class. Edit `factors` instead of `weight`, which is made anew."""

    prefix, parameter_name = "LowRank", "factors"
    factors: nn.Parameter
    bias: nn.Parameter | None

    @property
    def rank(self) -> int:
        """Columns of each factor."""
        return self.factors.shape[1]

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """Views of both factors, [N, R] and [M, R], where the weight is [N, M] or [N, ...] of M numbers."""
        first, second = self.factors.split(sides_of(self.dense_shape))
        return first, second

    @property
    def weight(self) -> Tensor:
        """The dense weight; its gradient goes to `factors`."""
        with torch.autocast(self.factors.device.type, enabled=False):  # a weight has the dtype of its parameter
            product: Tensor = _WeightProduct.apply(*self.pair)  # type: ignore[no-untyped-call]  # untyped in torch
        return product.view(self.dense_shape)

    def whole_values(self) -> Tensor:
        """Return the factors, in float32 where low precision keeps a part of them beside."""
        factors = self.factors.detach()
        return factors if self._correction is None else join(factors, self._correction)

    def _dense_of(self, whole: Tensor) -> Tensor:
        return product_of(whole, self.dense_shape)

    def _taken_from(self, dense: Tensor) -> Tensor:
        """Return the factors as they are where their product is `dense`, else new ones."""
        whole, dense = self.whole_values(), dense.detach().to(self.factors.device)
        if torch.equal(self._dense_of(whole).to(dense.dtype), dense):
            return whole
        return factors_of(dense.flatten(1), self.rank)


class _WeightProduct(torch.autograd.Function):
    """The product of two factors: a weight, which `autograd_graph.is_made_of_weights` knows by this node's name."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        ctx.save_for_backward(first, second)
        return first @ second.T  # [N, R] @ [R, M]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        first, second = ctx.saved_tensors
        return gradient @ second, gradient.T @ first  # [N, M] @ [M, R], [M, N] @ [N, R]


class LowRankLinear(LowRankLayer):
    """Two products with thin matrices."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute as the Linear does, through [..., R]."""
        first, second = self.pair
        return F.linear(F.linear(input, second.T), first, self.bias)


class LowRankConv1D(LowRankLayer):
    """Transformers' Conv1D: a Linear whose weight has its inputs first."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute as the Conv1D does, through [..., R]."""
        first, second = self.pair
        return F.linear(F.linear(x, first.T), second, self.bias)


class LowRankConvolution(LowRankLayer):
    """A convolution to R channels, and one of a single pixel from there."""

    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]

    def forward(self, input: Tensor) -> Tensor:
        """Compute as the convolution does, through [B, R, ...]."""
        first, second = self.pair
        convolve = CONVOLUTIONS[self.dense_class]
        kernel = second.T.view(self.rank, *self.dense_shape[1:])  # [R, C, ...]: a view, as only columns are cut
        inner = convolve(input, kernel, None, self.stride, self.padding, self.dilation)
        pointwise = first.view(*first.shape, *(1 for _ in self.dense_shape[2:]))  # [N, R, 1, ...]
        return convolve(inner, pointwise, self.bias)


def product_of(factors: Tensor, shape: torch.Size) -> Tensor:
    """Return the dense weight of factors, [N + M, R]."""
    first, second = factors.split(sides_of(shape))
    dense: Tensor = first @ second.T  # [N, R] @ [R, M]
    return dense.view(shape)


def _base_of(module: nn.Module) -> type[LowRankLayer]:
    kind = type(module)
    if kind.forward is nn.Linear.forward:
        return LowRankLinear
    if kind in CONVOLUTIONS:
        return LowRankConvolution
    return LowRankConv1D if is_conv1d_of_transformers(module) else LowRankLayer


def become_low_rank(module: nn.Module, rank: int, factors: Tensor | None = None) -> LowRankLayer:
    """Keep two factors of a layer's weight, and let it go.

    Args:
        module: has the weight as a plain parameter.
        rank: of the factors.
        factors: [N + M, R], instead of those of the weight.
    """
    weight = module.get_parameter("weight").detach()
    factors = factors_of(weight.flatten(1), rank) if factors is None else factors
    rename_parameter(module, "weight", "factors", factors.to(weight.device, weight.dtype, copy=True))
    module.__class__ = compact_class(_base_of(module), type(module))
    layer = cast("LowRankLayer", module)
    layer.dense_shape = weight.shape
    return layer


def low_rank_layers(model: nn.Module) -> dict[str, LowRankLayer]:
    """Return the low-rank layers of a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LowRankLayer)}
