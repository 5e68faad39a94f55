"""The fused chain: normalisation, ReLU and what follows live on one sign-preserving code of the normalised tensor.

Plain autograd keeps x (for the normalisation) and y = relu(z) (for the ReLU and the convolution), 8 bytes per element,
where z = scale * x + shift. Here z alone is kept, at 4 bit with its sign exact (`numerics.kbit`, 0.531 B/element);
backward reads y = relu(z) and x = (z - shift) / scale. The ReLU's mask is exact, noise in z is unbiased, both maps are
affine where they are read: the gradient is unbiased. Coding x itself would be biased, since relu(normalise(decoded x))
has another mask.

Dividing by the weight multiplies the noise in x. In BatchNorm a row of the code is of one channel, so the range of z is
as small as its weight; the bias must be at most 64 times the weight for each level of the code (`norm_recompute`). The
same holds for GroupNorm over planes of 16 elements or more. Elsewhere the elements of one row have weights and biases
of their own: the largest of both together must be at most 4 times the smallest weight. Else the layer falls back to
separate codes; so does a normalisation in eval mode, whose statistics are not saved.

Source: ours; in-place activated BatchNorm (Rota Bulò, Porzi, Kontschieder, 2018, https://arxiv.org/abs/1712.02616)
inverts a leaky ReLU and the BatchNorm exactly in the same way, but has to replace the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memsave.saved_tensors.code_rows import SMALLEST_PIECE, Rows, covers_its_storage, rows_over
from lightning_memsave.saved_tensors.encodings import Fidelity, IntCodes, Recompute
from lightning_memsave.saved_tensors.norm_recompute import ratio_limit
from lightning_memsave.saved_tensors.recompute_rules import fold, fold_groups, norm_parameters, per_channel
from lightning_memsave.torch_internals.autograd_graph import Node, UnreadableError, inputs_of, saved_values
from lightning_memsave.torch_internals.fake_tensors import truth

_MOST = 4  # that noise may be multiplied by where elements of a row have weights of their own


def relu_input(y: Tensor) -> Node | None:
    """Return the normalisation behind y = relu(normalise(x)); `None` when `y` is something else."""
    node = y.grad_fn
    if node is None or node.name() != "ReluBackward0":
        return None
    norm, output_nr = inputs_of(node)[0]
    return norm if norm is not None and output_nr == 0 and norm.name() in _AFFINE else None


_NUM_PARTS = 8
"""Parts of a 16-bit tensor that is edited in place: torch copies each to float32 where the other operand is that."""


def _parts(operand: Tensor | float, z: Tensor, num_parts: int) -> Iterable[Tensor | float]:
    """Return what goes with each part of `z`; without end where it is the same for all."""
    if isinstance(operand, float) or operand.dim() < z.dim() or len(operand) != len(z):
        return repeat(operand)
    return operand.chunk(num_parts)


class Affine(NamedTuple):
    """A normalisation with its statistics fixed: for each (scale, shift), y = scale * y + shift, from x to z."""

    steps: tuple[tuple[Tensor | float, Tensor | float], ...]
    weight: Tensor | None
    bias: Tensor | None
    is_of_channels: bool
    """Whether all elements of a row share weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute z from x."""
        for scale, shift in self.steps:
            x = x * scale + shift
        return x

    def inverse(self, z: Tensor) -> Tensor:
        """Compute x from z, in place."""
        num_parts = _NUM_PARTS if z.element_size() < 4 else 1
        for scale, shift in reversed(self.steps):
            operands = _parts(shift, z, num_parts), _parts(scale, z, num_parts)
            for part, shift_of_part, scale_of_part in zip(z.chunk(num_parts), *operands, strict=False):
                part.sub_(shift_of_part).div_(scale_of_part)
        return z

    def is_sound(self, fidelity: Fidelity) -> bool:
        """Return whether noise in z of a code of that fidelity is small enough in (x - mean) / deviation."""
        if self.weight is None and self.bias is None:
            return True
        like = self.bias if self.weight is None else self.weight
        assert like is not None, "one of the two is there"
        weight = torch.ones_like(like) if self.weight is None else self.weight.abs()
        bias = torch.zeros_like(like) if self.bias is None else self.bias.abs()
        if self.is_of_channels:
            is_sound = (weight > 0) & (bias <= ratio_limit(fidelity, signed=True) * weight)
        else:
            is_sound = (weight > 0) & (weight.amax() + bias.amax() <= _MOST * weight)
        return truth(is_sound.all(), True)


def chain(
    y: Tensor,
    x: Tensor,
    norm: Node,
    z: Tensor | None,
    fidelity: Fidelity,
    seed: int,
    operands: Mapping[int, Any],
    rows: Rows | None,
) -> tuple[Recompute, Recompute] | None:
    """Return encodings of y = relu(z) and of x, on one code of z.

    Args:
        y: the ReLU's output.
        x: the normalisation's input, of the same shape.
        norm: the normalisation's node.
        z: its output where it is still there; computed again otherwise.
        fidelity: bits of the code.
        seed: of its dither.
        operands: what recomputations need and no node keeps, by the number of the node.
        rows: of x; z is coded in the same, or in planes where each has a weight of its own.

    Returns:
        The two encodings, or `None` where the chain would not be sound.
    """
    try:
        affine = _AFFINE[norm.name()](norm, operands, x)
    except UnreadableError:
        return None
    if affine is None or not (covers_its_storage(y) and covers_its_storage(x)) or x.stride() != y.stride():
        return None
    dims = list(zip(x.shape, x.stride(), strict=True))
    planes = rows_over(x, dims[:2], dims[2:]) if "GroupNorm" in norm.name() else None
    if planes is not None and planes.length >= SMALLEST_PIECE:
        rows, affine = planes, affine._replace(is_of_channels=True)
    if not affine.is_sound(fidelity):
        return None
    if z is None or z.stride() != y.stride():
        z = affine.forward(x)
    coded = IntCodes.of(z.detach().as_strided((z.numel(),), (1,), z.storage_offset()), fidelity, seed, True, rows)
    if coded is None:
        return None
    shape, stride = y.shape, y.stride()

    def decoded() -> Tensor:
        return coded.flat().as_strided(shape, stride)

    return (
        Recompute(lambda: decoded().relu_(), y, fidelity, (coded,), 0),
        Recompute(lambda: affine.inverse(decoded()), x, fidelity, (coded,), 0),
    )


def _batch_norm(node: Node, operands: Mapping[int, Any], x: Tensor) -> Affine | None:
    affine = norm_parameters(node, operands)
    if affine is None or not saved_values(node, "training"):
        return None
    scale, shift = fold(saved_values(node, "result1"), saved_values(node, "result2"), *affine)
    return Affine(((per_channel(scale, x.dim()), per_channel(shift, x.dim())),), *affine, is_of_channels=True)


def _group_norm(node: Node, operands: Mapping[int, Any], x: Tensor) -> Affine | None:
    affine = norm_parameters(node, operands)
    if affine is None:
        return None
    folded = fold_groups(saved_values(node, "result1"), saved_values(node, "result2"), *affine, x.shape[1])
    scale, shift = (values.view(*values.shape, *[1] * (x.dim() - 2)) for values in folded)  # [B, C, 1, ...]
    return Affine(((scale, shift),), *affine, is_of_channels=False)


def _layer_norm(node: Node, operands: Mapping[int, Any], x: Tensor) -> Affine:
    mean, rstd = saved_values(node, "result1"), saved_values(node, "result2")  # [..., 1]
    weight, bias = saved_values(node, "weight"), saved_values(node, "bias")  # [D]
    # Copies: the step may change the parameters before a late backward, which the node then tells of.
    parameters = (1.0 if weight is None else weight.detach().clone(), 0.0 if bias is None else bias.detach().clone())
    return Affine(((rstd, -mean * rstd), parameters), weight, bias, is_of_channels=False)


_AFFINE: Mapping[str, Callable[[Node, Mapping[int, Any], Tensor], Affine | None]] = {
    "NativeBatchNormBackward0": _batch_norm,
    "CudnnBatchNormBackward0": _batch_norm,
    "NativeGroupNormBackward0": _group_norm,
    "NativeLayerNormBackward0": _layer_norm,
}
