"""What each operation needs of the tensors that it keeps: every bit, a lossy copy, a sign, or only a shape.

An operation is told by the name of the function that is being called (`max_pool2d`, `linear`, `mul`), which a function
mode sees, also inside modules. An operation that is not listed needs every bit: a custom autograd Function, a new
operation, whatever is nonlinear in what it keeps.

*Lossy* are operations whose gradient is linear in the tensor that they keep (`LINEAR`: convolution, matmul,
multiplication), so that unbiased noise there is unbiased noise in the gradient, and those whose curvature is small
(`NONLINEAR`: normalisation, attention, GLU). Noise there makes the gradient *approximate*: of a normalisation over N
elements, noise of mean square v moves it by v / N of itself. Activations (GELU and its kin) keep a code of their
derivative, which leaves less bias (`activation_derivatives`), unless somebody else reads their input, or their result
is computed again from its code (`recompute`, `encodings.IntCodes.mapped`). A gradient stays
unbiased where every function that reads a code is linear in it, and none reads a code that another one has read, unless
for the gradients of weights alone: x * (x @ W) has the square of x's noise in it. Convergence theory says the same of
compressed activations: safe in linear operators, not in others (arXiv 2605.01255).

Fused attention needs 8 bits: its backward computes exp(q k - lse) with a log-sum-exp that is exact, so noise of
variance v in a score makes a probability exp(v / 2) times too large on average. With 4 bits and sharp scores (standard
deviation 4) gradients would be 1.5 times too long, with 2 bits they would explode; with 8 bits it is 0.1 %. Where the
caller scales scores by more than 1.5 / sqrt(width) (models that normalise queries and keys), it needs bfloat16.

*Sensitive* are results that appear in their own derivative (softmax, tanh, exp), statistics, and everything that
carries no gradient (targets, masks, attention's log-sum-exp): kept exactly, whoever keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from lightning_memsave.saved_tensors.activation_derivatives import Derivative, derivative_of
from lightning_memsave.saved_tensors.call_site import Call
from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.torch_internals.autograd_graph import Node, inputs_of, is_made_of_weights, is_wrapped


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CONVOLUTIONS = _names("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
_ON_WEIGHTS = _CONVOLUTIONS | _names("linear prelu")
MULTIPLIES = _names("mul mul_ __mul__ __rmul__ __imul__ multiply")
SUBTRACTS_MEAN = _names("batch_norm instance_norm group_norm layer_norm")
NORMALISES = SUBTRACTS_MEAN | _names("rms_norm")

LINEAR = (
    _ON_WEIGHTS
    | MULTIPLIES
    | _names(
        """
        bilinear matmul mm bmm mv addmm baddbmm addbmm einsum tensordot inner outer __matmul__ __rmatmul__
        addcmul square relu relu_ leaky_relu leaky_relu_
        """
    )
)
"""Lossy functions whose gradient is linear in what they keep, or reads its sign only, which codes keep."""

NONLINEAR = NORMALISES | _names(
    "multi_head_attention_forward scaled_dot_product_attention gelu silu mish elu softplus hardswish glu"
)
"""Lossy functions whose gradient is not: noise that is zero on average leaves a small part that is not."""

LOSSY = LINEAR | NONLINEAR
"""Functions whose saved tensors may be noisy, where a gradient flows through these."""

POWERS = _names("pow __pow__")
"""Lossy and linear where they are squares."""

NEEDS_8_BITS = _names("multi_head_attention_forward scaled_dot_product_attention")
"""Lossy functions that put noise into an exponent."""

SHARPEST_SCALE = 1.5
"""Largest scale of scores, in 1 / sqrt(width), with which attention bears 8 bits."""
_VIEWS = frozenset(f"{name}Backward0" for name in _names("View UnsafeView ReshapeAlias Transpose Permute Clone"))

_BY_INDEX = _names(
    """
    max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    fractional_max_pool2d fractional_max_pool3d
    gather take take_along_dim masked_select cummax cummin
    index_add index_add_ index_copy index_copy_ put put_
    """
)
"""Functions whose gradients go where an index says that they keep as well; on MPS some look for it again."""
_AVERAGES = _names("avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d")
SHAPE_ONLY = _BY_INDEX | _AVERAGES
"""Functions that keep a floating-point input and read nothing but its shape.

As do `pad`, where it repeats values, convolutions whose weight is frozen, and such a BatchNorm in eval mode. Found by
giving autograd NaN in place of each tensor that an operation of torch's database keeps.
"""
_PADS = _names("reflect replicate")

SIGN_ONLY = _names("relu relu_ leaky_relu leaky_relu_")
"""Functions whose backward compares what they keep with zero."""

KEEPS_SIGN = _names("leaky_relu leaky_relu_ prelu")
"""Functions that may keep negative values, and ask which are positive: a lossy copy must have the same ones."""

INTERVAL_ONLY = {"hardtanh": (-1.0, 1.0), "hardtanh_": (-1.0, 1.0), "relu6": (0.0, 6.0)}
"""Functions whose backward asks whether their input lies inside an interval, and its default ends."""

SENSITIVE = frozenset(
    f"{name}Backward0"
    for name in _names(
        """
        Softmax LogSoftmax SafeSoftmax Tanh Sigmoid LogSigmoid Exp Exp2 Expm1 Sqrt Rsqrt Reciprocal Erf Logsumexp
        Log Log2 Log1P Pow Sin Cos CumSum Cumprod Norm LinalgVectorNorm Var VarMean Std StdMean
        """
    )
)
"""Nodes whose results stay exact."""


class Need(NamedTuple):
    """What an operation needs of a tensor."""

    fidelity: Fidelity
    interval: tuple[float, float] | None = None
    """Interval of a mask; `None` stands for the sign."""
    keeps_sign: bool = False
    """Whether a lossy copy must have the same signs."""
    is_linear: bool = False
    """Whether the gradient is linear in it, so that unbiased noise stays unbiased."""
    is_last: bool = False
    """Whether it enters the gradient of a weight alone, behind which nothing else is multiplied."""
    derivative: Derivative | None = None
    """Derivative of which a code is enough, and of nothing else."""


def need(tensor: Tensor, call: Call, lossy: Fidelity, overrides: Mapping[str, Fidelity]) -> Need:
    """Return what `call` needs of `tensor`, which it is about to keep.

    Args:
        tensor: floating point.
        call: who keeps it.
        lossy: what is enough where noise is allowed.
        overrides: fidelities by function name, which go before the tables.
    """
    if (override := overrides.get(call.name)) is not None:
        return _lossy_need(override, call)._replace(derivative=None)  # the values themselves were asked for
    if not tensor.requires_grad:
        return Need(Fidelity.EXACT)
    if _reads_a_shape(tensor, call):
        return Need(Fidelity.SHAPE)
    node = tensor.grad_fn
    if call.name in SIGN_ONLY and _reads_the_sign(node, call):
        is_edited_part = _edits_for_relu(call) and node is not None and node.name() != "ReluBackward0"
        return Need(Fidelity.MASK, keeps_sign=call.name in KEEPS_SIGN or is_edited_part)  # other parts may be negative
    if (ends := INTERVAL_ONLY.get(call.name)) is not None:
        interval = call.argument(1, "min_val", ends[0]), call.argument(2, "max_val", ends[1])
        return (
            Need(Fidelity.MASK, interval) if all(_is_exact(end, tensor) for end in interval) else Need(Fidelity.EXACT)
        )
    if _is_sensitive(tensor, node) or not _may_be_lossy(call):
        return Need(Fidelity.EXACT)
    return _lossy_need(max(lossy, _least_for_exponents(call)) if call.name in NEEDS_8_BITS else lossy, call)


def _reads_a_shape(tensor: Tensor, call: Call) -> bool:
    """Return whether `call` reads nothing but the shape of `tensor`, which is differentiated."""
    name = call.name.removesuffix("_with_indices")
    if name in _AVERAGES:
        return True
    if tensor.device.type not in ("cpu", "cuda", "meta"):
        return False
    if name in _CONVOLUTIONS:
        weight = call.argument(1, "weight")
        return isinstance(weight, Tensor) and not weight.requires_grad and not is_wrapped(weight)
    if name == "batch_norm" and not call.argument(5, "training", False):
        weight = call.argument(3, "weight")
        return weight is None or not (weight.requires_grad or is_wrapped(weight))
    return name in _BY_INDEX or (name == "pad" and call.argument(2, "mode", "constant") in _PADS)


def _least_for_exponents(call: Call) -> Fidelity:
    """Return 16 bits where scores are scaled by more than 1 / sqrt(width), as after query-key normalisation."""
    query, scale = call.argument(0, "query"), call.argument(6, "scale")
    if call.name != "scaled_dot_product_attention" or scale is None:
        return Fidelity.INT8
    is_sharp = scale * query.shape[-1] ** 0.5 > SHARPEST_SCALE and not _is_scaled(query)
    return Fidelity.BF16 if is_sharp else Fidelity.INT8


def _is_scaled(query: Tensor) -> bool:
    """Return whether the caller has multiplied it by a number itself."""
    node = query.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = inputs_of(node)[0][0]
    return node is not None and node.name() == "MulBackward0" and None in [n for n, _ in inputs_of(node)]


def _lossy_need(fidelity: Fidelity, call: Call) -> Need:
    is_last = call.name in _ON_WEIGHTS and is_made_of_weights(call.argument(1, "weight"))
    is_linear = call.name in LINEAR | POWERS
    return Need(fidelity, None, call.name in KEEPS_SIGN, is_linear, is_last, derivative_of(call))


def _is_exact(end: float, tensor: Tensor) -> bool:
    """Return whether the end of an interval is a finite number of the tensor's dtype."""
    return math.isfinite(end) and float(tensor.new_tensor(end)) == end


def _reads_the_sign(node: Node | None, call: Call) -> bool:
    if call.name.startswith("leaky"):  # keeps its input; the result where that was overwritten
        return bool(call.argument(1, "negative_slope", 0.01) > 0)
    # Keeps its result, under a node of another name where it has edited a view.
    return _edits_for_relu(call) or (node is not None and node.name() == "ReluBackward0")


def _edits_for_relu(call: Call) -> bool:
    """Return whether ReLU works in place: `F.relu` says so by an argument."""
    return call.name == "relu_" or (call.name == "relu" and bool(call.argument(1, "inplace", False)))


def _is_sensitive(tensor: Tensor, node: Node | None) -> bool:
    # Further outputs of a normalisation are its statistics; those of a split or an LSTM are not.
    return node is not None and (node.name() in SENSITIVE or (tensor.output_nr > 0 and "Norm" in node.name()))


def _may_be_lossy(call: Call) -> bool:
    if call.name in POWERS:
        exponent = call.argument(1, "exponent")
        return isinstance(exponent, (int, float)) and exponent == 2
    return call.name in LOSSY
