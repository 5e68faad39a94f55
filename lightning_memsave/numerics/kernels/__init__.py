"""The fastest implementation of this package's other modules for a device; all are equal bit for bit.

CPU: C, where a compiler is. CUDA: Triton for `kbit`, where it is installed (it comes with torch's CUDA builds). Else
plain torch.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec

import torch
from torch import Tensor

from lightning_memsave.numerics import bits, blockwise, kbit, rounding
from lightning_memsave.numerics.kernels import native
from lightning_memsave.torch_internals.fake_tensors import is_fake, num_set


def quantize(
    flat: Tensor, bits: int, seed: int | None, signed: bool = False, row: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """Quantize as `kbit.quantize` does.

    On CUDA a block that is not finite is coded all the same, and decoded as NaN.
    """
    return _kbit(flat).quantize(flat, bits, seed, signed, row)  # type: ignore[no-any-return]  # one of three modules


def dequantize(
    codes: Tensor, ranges: Tensor, bits: int, out: Tensor, signed: bool = False, row: int | None = None
) -> Tensor:
    """Dequantize as `kbit.dequantize` does."""
    return _kbit(codes).dequantize(codes, ranges, bits, out, signed, row)  # type: ignore[no-any-return]


def round_to_bfloat16(flat: Tensor, seed: int) -> Tensor | None:
    """Round as `rounding.round_to_bfloat16` does."""
    if _has_native(flat.device):
        return native.round_to_bfloat16(flat, seed)
    return rounding.round_to_bfloat16(flat, seed)


def quantize_to_map(flat: Tensor, code_map: Tensor, bits: int, seed: int, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize as `blockwise.quantize_to_map` does."""
    function = native.quantize_to_map if _has_native(flat.device) else blockwise.quantize_to_map
    return function(flat, code_map, bits, seed, shift)


def dequantize_from_map(codes: Tensor, code_map: Tensor, absmax: Tensor, bits: int, num_values: int) -> Tensor:
    """Dequantize as `blockwise.dequantize_from_map` does."""
    function = native.dequantize_from_map if _has_native(codes.device) else blockwise.dequantize_from_map
    return function(codes, code_map, absmax, bits, num_values)


def round_to_float16(flat: Tensor, seed: int) -> Tensor | None:
    """Round as `rounding.round_to_float16` does."""
    if _has_native(flat.device):
        return native.round_to_float16(flat, seed)
    return rounding.round_to_float16(flat, seed)


def pack_mask(mask: Tensor) -> Tensor:
    """Return one bit per element of a boolean mask, [n]."""
    return native.pack_mask(mask) if _has_native(mask.device) else bits.pack(mask, 1)


def pack_positive(flat: Tensor) -> Tensor:
    """Return the mask of what is not <= 0 (NaN counts as positive), one bit per element."""
    return native.pack_positive(flat) if _has_native(flat.device) else bits.pack(~(flat <= 0), 1)


def unpack_mask(packed: Tensor, num_values: int) -> Tensor:
    """Return the boolean mask, [num_values]."""
    if _has_native(packed.device):
        return native.unpack_mask(packed, num_values)
    return bits.unpack(packed, 1, num_values).view(torch.bool)


def scale_where(mask: Tensor, values: Tensor, scale: float) -> Tensor:
    """Return `values` times `scale` where the boolean mask holds, times 0 elsewhere; both contiguous."""
    is_native = _has_native(values.device) and values.dtype == torch.float32
    return native.scale_where(mask, values, scale) if is_native else bits.scale_where(mask, values, scale)


def look_up(values: Tensor, table: Tensor, scale: float, shift: float) -> Tensor:
    """Replace float32 `values` by the table's entries at `values * scale + shift`, cut off to one that exists."""
    function = native.look_up if _has_native(values.device) else bits.look_up
    return function(values, table, scale, shift)


def set_bits(packed: Tensor) -> Tensor:
    """Return the ascending positions (int64, [k]) of the bits that are set."""
    if _has_native(packed.device):
        return native.set_bits(packed)
    unpacked = bits.unpack(packed, 1, 8 * packed.numel())
    if is_fake(packed):
        return unpacked.new_empty(num_set(packed), dtype=torch.int64)
    return unpacked.nonzero().view(-1)


def pack_two(flat: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return one bit per element, and the two values, of a tensor [n] that holds at most two bit patterns.

    Else `None`.
    """
    is_native = _has_native(flat.device) and flat.element_size() == 4
    return native.pack_two(flat) if is_native else bits.pack_two(flat)


def unpack_two(packed: Tensor, values: Tensor, size: int) -> Tensor:
    """Return the values that `pack_two` was given, [size]."""
    is_native = _has_native(packed.device) and values.element_size() == 4
    return native.unpack_two(packed, values, size) if is_native else bits.unpack_two(packed, values, size)


def implementation(device: torch.device) -> str:
    """Return which one is used: `"triton"`, `"c"` or `"torch"`."""
    if device.type == "cuda" and _has_triton():
        return "triton"
    return "c" if _has_native(device) else "torch"


def _kbit(coded: Tensor):  # type: ignore[no-untyped-def]  # one of three modules of the same functions
    if coded.is_cpu and native.library() is not None:
        return native
    match implementation(coded.device):
        case "triton":
            from lightning_memsave.numerics.kernels import triton_kbit

            return triton_kbit
        case _:
            return kbit


def _has_native(device: torch.device) -> bool:
    return device.type == "cpu" and native.library() is not None


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
