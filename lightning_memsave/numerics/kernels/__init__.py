"""The fastest implementation of this package's other modules for a device; all are equal bit for bit.

CPU: C, where a compiler is. CUDA: Triton, where it is installed (it comes with torch's CUDA builds). Else plain torch.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.numerics import bits, blockwise, kbit, rounding, row_codes
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
    """Round as `rounding.round_to_bfloat16` does; on CUDA, what is not finite stays so, and nothing waits."""
    return _elementwise(flat, rounding).round_to_bfloat16(flat, seed)  # type: ignore[no-any-return]


def quantize_to_map(flat: Tensor, code_map: Tensor, bits: int, seed: int, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize as `blockwise.quantize_to_map` does."""
    return _elementwise(flat, blockwise).quantize_to_map(flat, code_map, bits, seed, shift)  # type: ignore[no-any-return]


def dequantize_from_map(codes: Tensor, code_map: Tensor, absmax: Tensor, bits: int, num_values: int) -> Tensor:
    """Dequantize as `blockwise.dequantize_from_map` does."""
    module = _elementwise(codes, blockwise)
    return module.dequantize_from_map(codes, code_map, absmax, bits, num_values)  # type: ignore[no-any-return]


def encode_rows(whole: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Encode float32 weights as `row_codes.encode_rows` does."""
    return native.encode_rows(whole, seed) if _has_native(whole.device) else row_codes.encode_rows(whole, seed)


def decode_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode as `row_codes.decode_rows` does."""
    is_native = _has_native(codes.device) and codes.is_contiguous()
    return native.decode_rows(codes, scales, dtype) if is_native else row_codes.decode_rows(codes, scales, dtype)


def round_to_float16(flat: Tensor, seed: int) -> Tensor | None:
    """Round as `rounding.round_to_float16` does; on CUDA as `round_to_bfloat16`."""
    return _elementwise(flat, rounding).round_to_float16(flat, seed)  # type: ignore[no-any-return]


def sums(flat: Tensor) -> tuple[float, float] | None:
    """Return the sum of float32 elements, [n], and that of their magnitudes.

    `None` where there is no kernel, or they do not lie together.

    Added in an order of its own: equal to any other sum up to rounding.
    """
    is_native = _has_native(flat.device) and flat.dtype == torch.float32 and flat.is_contiguous()
    return native.sums(flat) if is_native and not is_fake(flat) else None


def pack_mask(mask: Tensor) -> Tensor:
    """Return one bit per element of a boolean mask, [n]."""
    return _elementwise(mask, bits).pack_mask(mask)  # type: ignore[no-any-return]


def pack_positive(flat: Tensor) -> Tensor:
    """Return the mask of what is not <= 0 (NaN counts as positive), one bit per element."""
    return _elementwise(flat, bits).pack_positive(flat)  # type: ignore[no-any-return]


def unpack_mask(packed: Tensor, num_values: int) -> Tensor:
    """Return the boolean mask, [num_values]."""
    return _elementwise(packed, bits).unpack_mask(packed, num_values)  # type: ignore[no-any-return]


def scale_where(mask: Tensor, values: Tensor, scale: float) -> Tensor:
    """Return `values` times `scale` where the boolean mask holds, times 0 elsewhere; both contiguous."""
    is_native = _has_native(values.device) and values.dtype == torch.float32
    return native.scale_where(mask, values, scale) if is_native else bits.scale_where(mask, values, scale)


def look_up(values: Tensor, table: Tensor, scale: float, shift: float) -> Tensor:
    """Replace float32 `values` by the table's entries at `values * scale + shift`, cut off to one that exists."""
    return _elementwise(values, bits).look_up(values, table, scale, shift)  # type: ignore[no-any-return]


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
    if is_fake(coded) or implementation(coded.device) != "triton":
        return kbit
    from lightning_memsave.numerics.kernels import triton_kbit

    return triton_kbit


def _elementwise(values: Tensor, reference: ModuleType) -> Any:
    """Return the module whose functions of the reference's names are the fastest for `values`."""
    if values.is_cpu and native.library() is not None:
        return native
    if is_fake(values) or implementation(values.device) != "triton":
        return reference
    from lightning_memsave.numerics.kernels import triton_elementwise

    return triton_elementwise


def _has_native(device: torch.device) -> bool:
    return device.type == "cpu" and native.library() is not None


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
