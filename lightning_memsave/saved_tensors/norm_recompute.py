"""What normalisations read: which rows their noise must be bounded in, and when a code has too few bits for them.

The backward pass of a normalisation computes with y = (x - mean) / deviation, of each row of x. Noise in x is divided
by the row's deviation there, however small that is: a class token of zeros beside patches, in one block with them, got
a gradient whose noise was 270 times the gradient (4 bits, width 192).

*The bound.* With blocks that end where rows end, the mean square of the noise in y is at most
n / (2 top^2), top = 2^bits - 1 codes over n <= 256 elements: 0.0020 at 8 bits and 0.57 at 4 for any values, 0.0001 and
0.02 for normally distributed ones. The gradient is quadratic in y (it has a factor y * mean(dy * y)), so noise of mean
square v biases it by v / N for rows of N elements.

*The guard.* A range's lower end is kept in 8 bits, so a row whose mean is r times its deviation gets up to
r / (256 top) more noise in y. That stays below 1/4 for r <= 64 top, and for bfloat16, which rounds x itself, for
r <= 64. Where the statistics of the normalisation say that r is larger, the tensor keeps more bits: 8 instead of 4 or
2, and all of them where 8 are not enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memsave.numerics.kbit import coded_bytes
from lightning_memsave.saved_tensors.call_site import Call
from lightning_memsave.saved_tensors.code_rows import SMALLEST_PIECE, Rows, rows_over
from lightning_memsave.saved_tensors.encodings import BITS, Fidelity
from lightning_memsave.saved_tensors.policy import MULTIPLIES, NORMALISES, SUBTRACTS_MEAN
from lightning_memsave.saved_tensors.saved_storage import SavedStorage
from lightning_memsave.torch_internals.autograd_graph import (
    Kept,
    Node,
    UnreadableError,
    inputs_of,
    packed,
    saved_values,
)
from lightning_memsave.torch_internals.fake_tensors import is_fake

_PER_LEVEL = 64
"""How many times a row's deviation its mean may be, for each code between the ends of a block's range."""


# ------------------------------------------------------------------------------- rows
def note_rows(entry: SavedStorage, tensor: Tensor, call: Call) -> bool:
    """Note in which rows `call` bears noise in `tensor`, which it keeps of `entry`; return whether it needs any.

    Where a normalisation reads rows at whose ends no block can end, the entry needs every bit.
    """
    rows = None
    if call.name in NORMALISES:
        if tensor.numel() != call.argument(0, "input").numel():  # a weight, or a step on the way
            return False
        rows = normalised_rows(tensor, call)
        if call.name in SUBTRACTS_MEAN:
            entry.normalised_by.append(call.number)
    elif call.name not in MULTIPLIES or (rows := multiplied_rows(tensor, call)) is None:
        return False
    common = rows if rows is None or entry.rows is None else common_rows(entry.rows, rows)
    if common is None and call.name in NORMALISES:
        entry.need, entry.is_guarded = Fidelity.EXACT, True
    entry.rows = common or entry.rows
    return common is not None


def normalised_rows(tensor: Tensor, call: Call) -> Rows | None:
    """Return the rows of what a normalisation reads; `None` where no block can end where they end.

    Args:
        tensor: its input.
        call: of a function of `policy.NORMALISES`.
    """
    dims = list(zip(tensor.shape, tensor.stride(), strict=True))
    if call.name in ("layer_norm", "rms_norm"):
        num_dims = len(call.argument(1, "normalized_shape"))
        return rows_over(tensor, dims[:-num_dims], dims[-num_dims:])
    (size, stride), spatial = dims[1], dims[2:]
    if call.name == "group_norm":
        per_group = size // call.argument(1, "num_groups")
        return rows_over(tensor, [dims[0], (size // per_group, stride * per_group)], [(per_group, stride), *spatial])
    return rows_over(tensor, [dims[1]], [dims[0], *spatial])


def multiplied_rows(tensor: Tensor, call: Call) -> Rows | None:
    """Return the rows of what is multiplied by one number per row, as most models write RMSNorm.

    `None` for all else.
    """
    ones = [_num_trailing_ones(factor) for factor in call.args[:2] if isinstance(factor, Tensor)]
    num_dims = max(ones, default=0)
    if num_dims == min(ones, default=0) or tensor.dim() <= num_dims:
        return None
    dims = list(zip(tensor.shape, tensor.stride(), strict=True))
    rows = rows_over(tensor, dims[:-num_dims], dims[-num_dims:])
    return rows if rows is not None and rows.order is None and rows.length >= SMALLEST_PIECE else None


def _num_trailing_ones(tensor: Tensor) -> int:
    return next((n for n, size in enumerate(reversed(tensor.shape)) if size != 1), tensor.dim())


def common_rows(first: Rows, second: Rows) -> Rows | None:
    """Return rows whose ends are those of both; `None` where there are none."""
    if first == second:
        return first
    if first.order is not None or second.order is not None:
        return None
    short, long = sorted((first.length, second.length))
    return Rows(short) if long % short == 0 else None


# ------------------------------------------------------------------------------- the guard
class Statistics(NamedTuple):
    """Mean and 1 / deviation of each row, as a normalisation keeps them."""

    mean: Callable[[], Tensor]
    rstd: Callable[[], Tensor]

    def largest_ratio(self) -> float:
        """Return the largest ratio of a row's mean to its deviation; 0 where it has no value."""
        ratios = self.mean().float() * self.rstd().float()
        return 0.0 if is_fake(ratios) else float(torch.linalg.vector_norm(ratios, float("inf")))


def statistics_of(node: Node | None) -> Statistics | None:
    """Return the statistics of the normalisation with this node; `None` where they cannot be read."""
    while node is not None and node.name() in _VIEWS:
        node = inputs_of(node)[0][0]
    if node is None or node.name() not in _NORMS:
        return None
    try:
        if "BatchNorm" in node.name() and not saved_values(node, "training"):
            mean, variance = saved_values(node, "running_mean"), saved_values(node, "running_var")
            eps = saved_values(node, "epsilon" if "Cudnn" in node.name() else "eps")
            return Statistics(lambda: mean, lambda: (variance + eps).rsqrt())
        return Statistics(_reader(node, "result1"), _reader(node, "result2"))
    except UnreadableError:
        return None


def _reader(node: Node, name: str) -> Callable[[], Tensor]:
    kept = packed(node, name)
    if kept is None:
        raise UnreadableError(node.name(), name)
    return kept.get if isinstance(kept, Kept) else lambda: kept


_NORMS = frozenset(
    f"{name}Backward0" for name in ("NativeBatchNorm", "CudnnBatchNorm", "NativeGroupNorm", "NativeLayerNorm")
)
_VIEWS = frozenset(f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Alias"))


def raise_for_normalisations(entry: SavedStorage, rows: Rows, statistics: Mapping[int, Statistics | None]) -> Fidelity:
    """Raise what `entry` needs until its noise is below the bound in each normalisation that reads it, and return it.

    Args:
        entry: about to be coded.
        rows: of its code.
        statistics: of normalisations, by the number of the call; `None` where they are not known.
    """
    need = entry.need
    if not entry.normalised_by and entry.rows is None:
        return need
    readers = [statistics.get(number) for number in entry.normalised_by]
    ratios = [reader.largest_ratio() for reader in readers if reader is not None]
    while need < Fidelity.EXACT and not all(ratio <= ratio_limit(need, entry.keeps_sign) for ratio in ratios):
        need = Fidelity.INT8 if need < Fidelity.INT8 else Fidelity.EXACT
    is_code = need in BITS and entry.rows is not None
    if None in readers or (is_code and coded_bytes(rows.length, BITS[need], entry.keeps_sign) >= 2 * rows.length):
        need = Fidelity.EXACT  # nothing is known, or a row has two or three elements
    entry.is_guarded |= need > entry.need
    entry.need = need
    return need


def ratio_limit(fidelity: Fidelity, signed: bool) -> float:
    """Return the largest ratio of a row's mean to its deviation that a code of this fidelity allows.

    With signs, half of the levels are on either side.
    """
    bits = BITS.get(fidelity)
    return _PER_LEVEL * (1 if bits is None else 2 ** (bits - signed) - 1)
