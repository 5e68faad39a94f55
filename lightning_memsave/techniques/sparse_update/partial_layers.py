"""Layers of which some input channels are trained: their own class, with another parameter and another backward pass.

The forward pass is the layer's own, with its dense weight, which is a buffer: the trained columns are written into it
each time. The backward pass computes the gradient of the input from that buffer, and the gradient of the trained
columns from their input channels, which are all that is kept. A convolution of which nothing is trained keeps nothing,
where torch would keep its input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import grad as conv_grad

from lightning_memsave.numerics.master_weights import join
from lightning_memsave.torch_internals.compact_layers import CompactLayer, compact_class, rename_parameter
from lightning_memsave.torch_internals.layer_selection import is_conv1d_of_transformers


class _Convolution(NamedTuple):
    forward: Callable[..., Tensor]
    of_input: Callable[..., Tensor]
    of_weight: Callable[..., Tensor]


_CONVOLUTIONS: Mapping[type[nn.Module], _Convolution] = {
    nn.Conv1d: _Convolution(F.conv1d, conv_grad.conv1d_input, conv_grad.conv1d_weight),
    nn.Conv2d: _Convolution(F.conv2d, conv_grad.conv2d_input, conv_grad.conv2d_weight),
    nn.Conv3d: _Convolution(F.conv3d, conv_grad.conv3d_input, conv_grad.conv3d_weight),
}


class Operator(NamedTuple):
    """What a layer computes, and its gradients, with the weight as an argument."""

    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """Result for an input, a weight and a bias."""
    of_input: Callable[[torch.Size, Tensor, Tensor], Tensor]
    """Gradient of an input, from its shape, the weight and the output's gradient."""
    of_weight: Callable[[Tensor, torch.Size, Tensor], Tensor]
    """Gradient of a weight, from the input, its shape and the output's gradient."""
    channel_dim: int
    """Dimension of an input's channels."""
    weight_dim: int
    """Dimension of a weight's input channels."""


_LINEAR = Operator(
    F.linear,
    lambda shape, weight, gradient: gradient @ weight,  # [..., N] @ [N, C]
    lambda x, shape, gradient: gradient.reshape(-1, shape[0]).T @ x.reshape(-1, shape[1]),  # [N, B] @ [B, C]
    channel_dim=-1,
    weight_dim=1,
)
_LINEAR_OF_TRANSFORMERS = Operator(
    # As its own forward does.
    lambda x, weight, bias: torch.addmm(bias, x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1),  # type: ignore[arg-type]  # it has one
    lambda shape, weight, gradient: gradient @ weight.T,  # [..., N] @ [N, C]
    lambda x, shape, gradient: x.reshape(-1, shape[0]).T @ gradient.reshape(-1, shape[1]),  # [C, B] @ [B, N]
    channel_dim=-1,
    weight_dim=0,
)


def _operator_of_convolution(module: Any) -> Operator:
    convolution = _CONVOLUTIONS[next(kind for kind in _CONVOLUTIONS if isinstance(module, kind))]
    options = module.stride, _padding_of(module), module.dilation, module.groups
    return Operator(
        lambda x, weight, bias: convolution.forward(x, weight, bias, *options),
        lambda shape, weight, gradient: convolution.of_input(shape, weight, gradient, *options),
        lambda x, shape, gradient: convolution.of_weight(x, shape, gradient, *options),
        channel_dim=-len(module.kernel_size) - 1,
        weight_dim=1,
    )


def _padding_of(module: Any) -> tuple[int, ...] | None:
    """Return the padding in numbers; `None` where both sides differ."""
    if module.padding == "valid":
        return tuple(0 for _ in module.kernel_size)
    if module.padding != "same":
        return tuple(module.padding)
    both = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    return None if any(each % 2 for each in both) else tuple(each // 2 for each in both)


def operator_of(module: nn.Module) -> Operator | None:
    """Return what a layer computes; `None` for a module that computes something else, or that is not known."""
    if isinstance(module, CompactLayer):
        return None
    kind = type(module)
    if isinstance(module, nn.Linear) and kind.forward is nn.Linear.forward:
        return _LINEAR
    if is_conv1d_of_transformers(module):
        return _LINEAR_OF_TRANSFORMERS
    plain: Any = next((each for each in _CONVOLUTIONS if isinstance(module, each)), None)
    own: Any = kind
    if plain is None or own.forward is not plain.forward or own._conv_forward is not plain._conv_forward:
        return None  # weight standardisation, for one, is in `_conv_forward`
    if getattr(module, "padding_mode", "zeros") != "zeros":
        return None
    return None if _padding_of(module) is None else _operator_of_convolution(module)


def channels_of(module: nn.Module) -> int | None:
    """Return the input channels of a layer that can be trained in part; `None` for any other module."""
    operator = operator_of(module)
    if operator is None or getattr(module, "groups", 1) != 1 or "weight" not in module._parameters:
        return None
    return module.get_parameter("weight").shape[operator.weight_dim]


def num_owners_of(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return how many modules have each parameter."""
    found: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            found[p] = found.get(p, 0) + 1
    return found


def why_whole(module: nn.Module, num_owners: Mapping[nn.Parameter, int]) -> str | None:
    """Return why a module cannot be trained in part, empty for one that is no layer at all; `None` if it can."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None or weight.dim() < 2 or isinstance(module, nn.Embedding):
        return ""
    if operator_of(module) is None:
        return "its forward is not known"
    if channels_of(module) is None:
        return f"{module.groups} groups"
    if not weight.requires_grad:
        return "frozen before"
    if weight.is_meta:
        return "its weight has no memory yet"
    return "tied weights" if num_owners[weight] > 1 else None


class _Partial(torch.autograd.Function):
    """A layer that keeps the channels of its input whose weights are trained, and nothing else.

    `values` is kept as well, though nothing is read of it: autograd then notices a step between forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, values: Tensor | None, bias: Tensor | None, dense: Tensor, layer: Operator, channels: Any
    ) -> Tensor:
        ctx.layer, ctx.dense, ctx.shape, ctx.has_values = layer, dense, x.shape, values is not None
        if values is not None:
            ctx.save_for_backward(x.index_select(layer.channel_dim, channels), values)
        return layer.forward(x, dense, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        layer, of_input, of_values, of_bias = ctx.layer, None, None, None
        if ctx.has_values:
            x, values = ctx.saved_tensors
            if ctx.needs_input_grad[1]:
                of_values = layer.of_weight(x, values.shape, gradient)
            del x
        if ctx.needs_input_grad[0]:
            of_input = layer.of_input(ctx.shape, ctx.dense.to(gradient.dtype), gradient)
        if ctx.needs_input_grad[2]:
            channel = gradient.dim() - 1 if layer.channel_dim == -1 else gradient.dim() + layer.channel_dim
            of_bias = gradient.sum([dim for dim in range(gradient.dim()) if dim != channel])
        return of_input, of_values, of_bias, None, None, None


def _in_the_dtype_of_autocast(x: Tensor) -> Tensor:
    """Cast as autocast would, so that what is kept is in that dtype."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


class PartialLayer(CompactLayer):
    """What a layer becomes, together with its own class. Edit `values` and `frozen_weight` instead of `weight`."""

    prefix, parameter_name = "Partial", "values"
    own_attributes = ("frozen_weight", "channels")
    steady_buffers = frozenset(("frozen_weight", "channels"))
    values: nn.Parameter
    frozen_weight: Tensor
    """The dense weight, into which `values` are written before each use."""
    channels: Tensor
    """Ascending numbers of the input channels that are trained."""
    bias: nn.Parameter | None

    @property
    def operator(self) -> Operator:
        """What the layer computes."""
        return _operator_with(self)

    @property
    def weight(self) -> Tensor:
        """The dense weight, a copy; its gradient goes to `values`."""
        whole = self.frozen_weight.to(self.values.dtype)
        return whole.index_copy(self.operator.weight_dim, self.channels, self.values)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def forward(self, input: Tensor) -> Tensor:
        """Compute as the layer does."""
        operator, dense = self.operator, self.frozen_weight
        # `data`: no edit that anybody counts, as the values are the same until a step.
        dense.data.index_copy_(operator.weight_dim, self.channels, self.values.detach().to(dense.dtype))
        x = _in_the_dtype_of_autocast(input)
        out: Tensor = _Partial.apply(x, self.values, self.bias, dense, operator, self.channels)  # type: ignore[no-untyped-call]  # untyped in torch
        return out

    @property
    def layout(self) -> Channels:
        """Places of the values in the dense weight."""
        return Channels(self.channels, self.dense_shape, self.operator.weight_dim)

    def whole_values(self) -> Tensor:
        """Return the values of the channels that are trained."""
        values = self.values.detach()
        return values if self._correction is None else join(values, self._correction)

    def _dense_of(self, whole: Tensor) -> Tensor:
        dense = self.frozen_weight.to(whole.dtype, copy=True)
        return dense.index_copy_(self.operator.weight_dim, self.channels, whole)

    def _taken_from(self, dense: Tensor) -> Tensor:
        self.frozen_weight.copy_(dense)
        return self.layout.compact(dense)


class Channels(NamedTuple):
    """Places of the weights of some input channels in a dense weight."""

    channels: Tensor
    shape: torch.Size
    dim: int

    def dense(self, values: Tensor) -> Tensor:
        """Return `values` at their places among zeros."""
        return values.new_zeros(self.shape).index_copy_(self.dim, self.channels.to(values.device), values)

    def compact(self, dense: Tensor) -> Tensor:
        """Return those of a dense tensor."""
        return dense.detach().index_select(self.dim, self.channels.to(dense.device))


class FrozenConvolution(CompactLayer):
    """A convolution whose weight is frozen, and stays its parameter: it keeps nothing of its input.

    It computes as its own class does once somebody trains the weight.
    """

    prefix, parameter_name = "Frozen", "weight"

    @property
    def weight(self) -> Tensor:
        """The parameter."""
        return self._parameters["weight"]  # type: ignore[return-value]  # it has one

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def forward(self, input: Tensor) -> Tensor:
        """Compute as the convolution does."""
        if self.weight.requires_grad:
            return cast("Tensor", super().forward(input))
        x, bias = _in_the_dtype_of_autocast(input), self._parameters["bias"]
        out: Tensor = _Partial.apply(x, None, bias, self.weight, _operator_with(self), None)  # type: ignore[no-untyped-call]  # untyped in torch
        return out

    def become_dense(self) -> None:
        """Undo `become_frozen`."""
        self.__class__ = self.dense_class  # type: ignore[assignment]  # the class it had
        del self.dense_shape

    def whole_values(self) -> Tensor:
        """Return the weight."""
        return self.weight.detach()

    def _dense_of(self, whole: Tensor) -> Tensor:
        return whole

    def _taken_from(self, dense: Tensor) -> Tensor:
        return dense


def _operator_with(layer: CompactLayer) -> Operator:
    if issubclass(layer.dense_class, nn.Linear):
        return _LINEAR
    return _operator_of_convolution(layer) if isinstance(layer, tuple(_CONVOLUTIONS)) else _LINEAR_OF_TRANSFORMERS


def become_partial(module: nn.Module, numbers: Sequence[int]) -> PartialLayer:
    """Train the weights of some input channels of a layer, which has a plain weight, and freeze the others.

    Args:
        module: one with `channels_of`.
        numbers: of these channels, ascending.
    """
    operator, weight = operator_of(module), module.get_parameter("weight").detach()
    assert operator is not None, "it has been asked for"
    channels = torch.tensor(numbers, device=weight.device)
    rename_parameter(module, "weight", "values", weight.index_select(operator.weight_dim, channels))
    module.__class__ = compact_class(PartialLayer, type(module))
    layer = cast("PartialLayer", module)
    layer.register_buffer("frozen_weight", weight, persistent=False)
    layer.register_buffer("channels", channels, persistent=False)
    layer.dense_shape = weight.shape
    return layer


def become_frozen(module: nn.Module) -> FrozenConvolution:
    """Let a convolution, whose weight is frozen, keep nothing of its input."""
    module.__class__ = compact_class(FrozenConvolution, type(module))
    layer = cast("FrozenConvolution", module)
    layer.dense_shape = layer.weight.shape
    return layer


def is_convolution(module: nn.Module) -> bool:
    """Return whether `become_frozen` knows a module."""
    return isinstance(module, tuple(_CONVOLUTIONS)) and operator_of(module) is not None


def partial_layers(model: nn.Module) -> dict[str, PartialLayer]:
    """Return the layers of a model that are trained in part, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PartialLayer)}
