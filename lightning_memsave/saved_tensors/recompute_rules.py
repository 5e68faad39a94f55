"""How to repeat the operations that cost little, by the name of their node: normalisations, activations, sums, views.

Every rule runs the same kernel on the same numbers, so values are equal to the bit; where the statistics of a
normalisation must be the saved ones, its affine part is computed in the order in which torch's CPU kernels do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_memsave.numerics import kernels
from lightning_memsave.saved_tensors.dropout import native_dropout
from lightning_memsave.torch_internals.autograd_graph import (
    Kept,
    Node,
    inputs_of,
    output_of,
    packed,
    saved_values,
    sequence_nr_of,
    signed,
)


@dataclass(frozen=True, slots=True)
class Rule:
    """How to repeat an operation: a function of the values behind the inputs that it reads."""

    function: Callable[..., Tensor]
    inputs: Sequence[int] = (0,)
    is_linear: bool = False
    """Whether it is linear in each input, given the others: unbiased noise stays unbiased."""
    is_additive: bool = False
    """Linear in all inputs together, so that they may share their noise."""
    exactly: Callable[..., Tensor] | None = None
    """A faster function that is linear only to the eye: used where all inputs are exact."""
    curvature: Callable[[Tensor], Tensor] | None = None
    """Second derivative of a function of one input, element by element, which is smooth."""
    kept: str | None = None
    """The attribute under which the node keeps an input that no gradient flows through."""
    reads: Sequence[Tensor | None] = ()
    """What the function holds besides; a change in place raises."""


# ------------------------------------------------------------------------------- normalisation
def per_channel(values: Tensor, dims: int) -> Tensor:
    """View [C] as [C, 1, ...], which broadcasts over an input [B, C, ...] of `dims` dimensions."""
    return values.view([-1] + [1] * (dims - 2))


class Norm(NamedTuple):
    """What the node of a normalisation does not keep, or not in every version of torch."""

    bias: Tensor | None
    eps: float | None


def _batch_norm(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
    affine = norm_parameters(node, operands)
    if affine is None or output_nr != 0:
        return None
    weight, bias = affine
    if not saved_values(node, "training"):
        # Copies: a call in training mode edits both in its kernel, which no version counts.
        stats = saved_values(node, "running_mean").clone(), saved_values(node, "running_var").clone()
        eps, reads = saved_values(node, "eps"), affine
        return Rule(lambda x: F.batch_norm(x, *stats, weight, bias, False, 0.0, eps), is_linear=True, reads=reads)
    mean, rstd = saved_values(node, "result1"), saved_values(node, "result2")
    eps = saved_values(node, "epsilon" if "Cudnn" in node.name() else "eps")
    wide = torch.promote_types(mean.dtype, torch.float32)

    def normalise(x: Tensor) -> Tensor:
        # The kernel of eval mode, whose 1 / sqrt(variance + eps) is 1: torch's own order of rounding, in one pass.
        scale = rstd.to(wide) if weight is None else rstd.to(wide) * weight  # [C]
        shift = None if bias is None else bias.to(wide)
        # `F.batch_norm` would refuse an epsilon of 0 up to torch 2.11.
        return torch.batch_norm(x, scale, shift, mean.to(wide), torch.ones_like(scale), False, 0.0, 0.0, False)

    def again(x: Tensor) -> Tensor:  # computes the statistics again; on CUDA the eval kernel rounds otherwise
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)

    return Rule(normalise, is_linear=True, exactly=None if mean.device.type == "cpu" else again, reads=affine)


def fold(mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return scale and shift of a normalisation with its affine part: y = scale * x + shift."""
    scale = rstd if weight is None else rstd * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return scale, shift


def norm_parameters(node: Node, operands: Mapping[int, Any]) -> tuple[Tensor | None, Tensor | None] | None:
    """Return a normalisation's weight and bias; `None` where the bias is unknown (frozen, in a call not seen)."""
    weight = saved_values(node, "weight")
    bias_node = inputs_of(node)[2][0]
    if bias_node is not None:
        bias = getattr(bias_node, "variable", None)
        return None if bias is None else (weight, bias.detach())
    noted = operands.get(sequence_nr_of(node))
    return None if noted is None else (weight, noted.bias)


def _layer_norm(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
    noted = operands.get(sequence_nr_of(node))
    if noted is None or output_nr != 0:
        return None
    shape, weight, bias = (saved_values(node, name) for name in ("normalized_shape", "weight", "bias"))
    mean, rstd = saved_values(node, "result1"), saved_values(node, "result2")
    dtype = output_of(node, 0).dtype

    def normalise(x: Tensor) -> Tensor:
        y = (x.to(mean.dtype) - mean) * rstd  # [..., D], statistics [..., 1]
        if weight is not None:
            y = torch.addcmul(bias.to(y.dtype), y, weight.to(y.dtype)) if bias is not None else y.mul_(weight)
        elif bias is not None:
            y += bias
        out: Tensor = y.to(dtype)
        return out

    def again(x: Tensor) -> Tensor:  # computes the statistics again
        return F.layer_norm(x, shape, weight, bias, noted.eps)

    return Rule(normalise, is_linear=True, exactly=again, reads=(weight, bias))


def _rms_norm(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
    """Return the rule of RMSNorm as one operation, as on CUDA; elsewhere it is several, which have rules."""
    noted = operands.get(sequence_nr_of(node))
    if noted is None or output_nr != 0:
        return None
    shape, weight, rstd = (saved_values(node, name) for name in ("normalized_shape", "weight", "result1"))
    dtype = output_of(node, 0).dtype

    def normalise(x: Tensor) -> Tensor:
        y = x.to(rstd.dtype) * rstd  # [..., D], statistics [..., 1]
        out: Tensor = (y if weight is None else y.mul_(weight)).to(dtype)
        return out

    def again(x: Tensor) -> Tensor:  # computes the statistics again
        return F.rms_norm(x, shape, weight, noted.eps)

    return Rule(normalise, is_linear=True, exactly=again, reads=(weight,))


def _group_norm(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
    affine = norm_parameters(node, operands)
    if affine is None or output_nr != 0:
        return None
    weight, bias = affine
    mean, rstd = saved_values(node, "result1"), saved_values(node, "result2")  # [B, G]
    noted, groups = operands.get(sequence_nr_of(node)), saved_values(node, "group")
    eps = saved_values(node, "eps") if noted is None else noted.eps  # torch 2.14 and later keep none

    def normalise(x: Tensor) -> Tensor:
        scale, shift = (
            s.view(*s.shape, *[1] * (x.dim() - 2)) for s in fold_groups(mean, rstd, weight, bias, x.shape[1])
        )
        return torch.addcmul(shift, x, scale).to(x.dtype)  # [B, C, 1, ...]

    def again(x: Tensor) -> Tensor:  # computes the statistics again
        return F.group_norm(x, groups, weight, bias, eps)

    return Rule(normalise, is_linear=True, exactly=again, reads=affine)


def fold_groups(
    mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, channels: int
) -> tuple[Tensor, Tensor]:
    """Fold statistics [B, G] and parameters [C] as `fold` does; both results are [B, C]."""
    repeat = channels // mean.shape[1]
    return fold(mean.repeat_interleave(repeat, 1), rstd.repeat_interleave(repeat, 1), weight, bias)


# ------------------------------------------------------------------------------- activations, arithmetic, views
def _unary(
    function: Callable[..., Tensor],
    *attributes: str,
    is_linear: bool = False,
    curvature: Callable[[Tensor], Tensor] | None = None,
) -> Callable[..., Rule]:
    def rule(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule:
        values = {name: saved_values(node, name) for name in attributes}
        return Rule(lambda x: function(x, **values), is_linear=is_linear, curvature=curvature)

    return rule


def _gelu_curvature(x: Tensor) -> Tensor:
    """Return GELU's second derivative, which that of its approximation by tanh follows to 1 %."""
    return torch.exp(-0.5 * x * x).mul_((2 - x * x) / math.sqrt(2 * math.pi))


def _silu_curvature(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (2 + x * (1 - 2 * s))


def _add(sign: int) -> Callable[..., Rule | None]:
    def rule(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
        alpha = sign * saved_values(node, "alpha")
        if all(n is not None for n, _ in inputs_of(node)):
            return Rule(lambda a, b: torch.add(a, b, alpha=alpha), (0, 1), is_linear=True, is_additive=True)
        constant = operands.get(sequence_nr_of(node))
        if constant is None or inputs_of(node)[0][0] is None:
            return None
        return Rule(lambda a: torch.add(a, constant, alpha=alpha), is_linear=True)

    return rule


def _mul(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
    has_first, has_second = (n is not None for n, _ in inputs_of(node))
    if has_first and has_second:
        return Rule(torch.mul, (0, 1), is_linear=True)
    # The other operand carries no gradient (a scalar, dropout's noise, a frozen scale) and is kept for the first's.
    return Rule(torch.mul, (0, 1), is_linear=True, kept="other" if has_first else "self")


def _native_dropout(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
    p, mask = saved_values(node, "p"), packed(node, "result1")
    if p >= 1 or not isinstance(mask, Kept):
        return None
    return Rule(lambda x: native_dropout(x, mask.get(), p), is_linear=True)


def _dropped(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule | None:
    mask, scale = packed(node, "tensors"), node.scale  # type: ignore[attr-defined]  # a custom Function's
    if not isinstance(mask, Kept):
        return None
    return Rule(lambda x: kernels.scale_where(mask.get(), x.contiguous(), scale), is_linear=True)


def _cast(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule:
    like = output_of(node, 0)
    return Rule(lambda x: x.to(device=like.device, dtype=like.dtype, copy=True), is_linear=True)


def _view(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule:
    shape = tuple(output_of(node, 0).shape)
    return Rule(lambda x: x.reshape(shape), is_linear=True)


def _expand(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule:
    shape = tuple(output_of(node, 0).shape)
    return Rule(lambda x: x.expand(shape), is_linear=True)


def _transpose(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule:
    first, second = signed(saved_values(node, "dim0")), signed(saved_values(node, "dim1"))
    return Rule(lambda x: x.transpose(first, second), is_linear=True)


def _permute(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule:
    dims = tuple(signed(d) for d in saved_values(node, "dims"))
    return Rule(lambda x: x.permute(dims), is_linear=True)


def _clone(node: Node, output_nr: int, operands: Mapping[int, Any]) -> Rule:
    return Rule(torch.clone, is_linear=True)  # no alias: what is computed again may be cached


RULES: Mapping[str, Callable[[Node, int, Mapping[int, Any]], Rule | None]] = {
    "NativeBatchNormBackward0": _batch_norm,
    "CudnnBatchNormBackward0": _batch_norm,
    "NativeLayerNormBackward0": _layer_norm,
    "NativeGroupNormBackward0": _group_norm,
    "FusedRmsNormBackward0": _rms_norm,
    "ReluBackward0": _unary(torch.relu),
    "GeluBackward0": _unary(F.gelu, "approximate", curvature=_gelu_curvature),
    "SiluBackward0": _unary(F.silu, curvature=_silu_curvature),
    "MishBackward0": _unary(F.mish),
    "EluBackward0": _unary(torch.ops.aten.elu, "alpha", "scale", "input_scale"),
    "HardswishBackward0": _unary(F.hardswish),
    "HardsigmoidBackward0": _unary(F.hardsigmoid),
    "LeakyReluBackward0": _unary(F.leaky_relu, "negative_slope"),
    "HardtanhBackward0": _unary(F.hardtanh, "min_val", "max_val"),
    "SoftplusBackward0": _unary(F.softplus, "beta", "threshold"),
    "AddBackward0": _add(1),
    "SubBackward0": _add(-1),
    "MulBackward0": _mul,
    "NegBackward0": _unary(torch.neg, is_linear=True),
    "NativeDropoutBackward0": _native_dropout,
    "_DroppedBackward": _dropped,
    "ToCopyBackward0": _cast,
    "ViewBackward0": _view,
    "UnsafeViewBackward0": _view,
    "ReshapeAliasBackward0": _view,
    "ExpandBackward0": _expand,
    "TransposeBackward0": _transpose,
    "PermuteBackward0": _permute,
    "CloneBackward0": _clone,
}
"""Rules by the name of the node. They read small things (statistics, constants) at once, values when wanted."""
