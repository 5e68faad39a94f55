"""Fingerprints of tensors: two numbers that tell whether a repetition has computed the same values."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memsave.numerics import kernels
from lightning_memsave.torch_internals.autograd_graph import unwatched
from lightning_memsave.torch_internals.fake_tensors import is_fake, is_plain

_PIECE = 2**14  # elements that are turned into float64 at once
_ROW = 2**12  # elements that are added in float32, whose longer sums err by more than rounding does
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.complex128: 1e-10, torch.complex64: 1e-4}
_MOST_SEEDS = 2
_COARSE = 2e-2  # 16 bits; masks, of which rounding flips a few entries


def _is_of_bytes(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype is not torch.bool


def _is_seed(tensor: Tensor) -> bool:
    """Return whether a tensor may be the seed or offset of a CUDA kernel, which nobody writes where nothing is drawn.

    Fused attention keeps them with `dropout_p=0` as well.
    """
    is_long = tensor.dtype in (torch.int64, torch.uint64)
    return is_long and tensor.numel() <= _MOST_SEEDS and torch.cuda.is_initialized()


Fingerprint = tuple[float, float]


def fingerprint(tensor: Tensor) -> Fingerprint | None:
    """Return the sum of the elements and of their magnitudes.

    `None` for fake tensors, subclasses, and what kernels keep without having written it: dtypes of 8 bits but bool
    (work space), on CUDA one or two integers of 64 bits (seeds).

    >>> fingerprint(torch.tensor([[1.0, -2.0]]))
    (-1.0, 3.0)
    """
    if is_fake(tensor) or not is_plain(tensor) or tensor.layout is not torch.strided:
        return None
    if _is_of_bytes(tensor.dtype) or _is_seed(tensor):
        return None
    with torch.no_grad(), unwatched(), _disable_current_modes():  # the memory of a few numbers is not the step's
        values = tensor.detach()
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values.resolve_neg()
        order = sorted(range(values.dim()), key=values.stride, reverse=True)  # as it lies in memory: no copy
        flat = values.permute(order).reshape(-1)
        if not len(flat):
            return 0.0, 0.0
        if flat.device.type != "cpu":  # kernels that take no memory, and give the same for the same
            kind = torch.float64
            magnitude = torch.linalg.vector_norm(flat, 1, dtype=kind) if flat.is_floating_point() else flat.numel()
            return float(flat.sum(dtype=kind)), float(magnitude)
        if (found := kernels.sums(flat)) is not None:
            return found
        if flat.dtype in (torch.float32, torch.float64):
            return _in_rows(flat)
        wide = (piece.to(torch.float64) for piece in flat.split(_PIECE))
        sums = [(float(piece.sum()), float(piece.abs().sum())) for piece in wide]
        return sum(total for total, _ in sums), sum(magnitude for _, magnitude in sums)


def _in_rows(flat: Tensor) -> Fingerprint:
    """Add rows up by kernels that take no memory but for their results, and these in float64."""
    num_whole = len(flat) // _ROW * _ROW
    sums = magnitudes = 0.0
    for rows in (flat[:num_whole].view(-1, _ROW), flat[num_whole:].view(1, -1)):
        sums += float(rows.sum(1).double().sum())
        magnitudes += float(torch.linalg.vector_norm(rows, 1, dim=1).double().sum())
    return sums, magnitudes


def is_near(first: Fingerprint, second: Fingerprint, dtype: torch.dtype, num_elements: int) -> bool:
    """Return whether two fingerprints differ by no more than kernels that add in any order make them differ.

    Args:
        first: of a tensor.
        second: of what should be the same.
        dtype: of the two.
        num_elements: of each.

    >>> x = torch.randn(100)
    >>> is_near(fingerprint(x), fingerprint(x * 1.001), x.dtype, 100)
    False
    """
    tolerance = _ROUNDING.get(dtype, _COARSE) / math.sqrt(max(1, num_elements))
    if not all(map(math.isfinite, (*first, *second))):
        return str(first) == str(second)
    apart = max(abs(first[0] - second[0]), abs(first[1] - second[1]))
    return not apart > tolerance * max(first[1], second[1])  # nor for what is not a number
