"""The CPU kernels in C, built on first use with the machine's compiler; without one, plain torch does the work.

Measured on one thread against `torch.compile` of the reference and plain torch
(`benchmarks/memory_time/bench_codecs.py`): only C is faster than what it saves. The library is cached (`build.py`);
compiling it takes about a second.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from lightning_memsave.numerics.kbit import BLOCK_SIZE, Blocks
from lightning_memsave.numerics.kernels import build
from lightning_memsave.torch_internals.fake_tensors import has_two_values, is_fake, num_set

_SOURCE = Path(__file__).with_name("native.c")
_TYPES = (torch.float32, torch.bfloat16)  # others are converted
_MIN_PER_THREAD = 1 << 18  # elements; below that a thread costs more than it brings


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or `None` where they cannot be built."""
    return build.load(_SOURCE)


def _in_threads(work: Callable[[int, int], int | None], num_units: int, per_unit: int) -> bool:
    """Run `work(first, last)` over parts of the range; False when one of them returned 0."""
    wanted = min(torch.get_num_threads(), num_units * per_unit // _MIN_PER_THREAD)
    if wanted <= 1:
        return work(0, num_units) != 0
    cuts = [num_units * i // wanted for i in range(wanted + 1)]
    return 0 not in list(_pool(wanted).map(work, cuts[:-1], cuts[1:]))  # ctypes releases the GIL


@functools.lru_cache(maxsize=1)
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "memsave")


if hasattr(os, "register_at_fork"):  # a child process has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


def quantize(
    flat: Tensor, bits: int, seed: int | None, signed: bool = False, row: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """Quantize as `kbit.quantize` does."""
    lib = library()
    assert lib is not None
    flat = flat if flat.dtype in _TYPES else flat.float()
    blocks = Blocks.of_rows(row or flat.numel())
    num_blocks = blocks.count(flat.numel())
    codes = torch.empty(num_blocks, blocks.num_bytes(bits), dtype=torch.uint8)
    ranges = torch.empty(num_blocks, 4 if signed else 2, dtype=torch.bfloat16)
    if is_fake(flat):
        return codes, ranges

    def work(first: int, last: int) -> int:
        found: int = lib.quantize(
            *(_pointer(flat, flat.numel()), int(flat.dtype == torch.bfloat16)),
            *(_pointer(codes, codes.numel()), _pointer(ranges, ranges.numel())),
            *(ctypes.c_long(blocks.row), blocks.size, bits, int(signed)),
            *(int(seed is not None), ctypes.c_uint32(seed or 0), ctypes.c_long(first), ctypes.c_long(last)),
        )
        return found

    return (codes, ranges) if _in_threads(work, num_blocks, blocks.size) else None


def dequantize(
    codes: Tensor, ranges: Tensor, bits: int, out: Tensor, signed: bool = False, row: int | None = None
) -> Tensor:
    """Dequantize as `kbit.dequantize` does."""
    lib = library()
    assert lib is not None
    target = out if out.dtype in _TYPES else torch.empty(out.shape, dtype=torch.float32)
    blocks = Blocks.of_rows(row or out.numel())
    num_blocks = blocks.count(out.numel())

    def work(first: int, last: int) -> None:
        lib.dequantize(
            _pointer(codes, num_blocks * blocks.num_bytes(bits)),
            _pointer(ranges, num_blocks * (4 if signed else 2)),
            *(_pointer(target, num_blocks // blocks.per_row * blocks.row), int(target.dtype == torch.bfloat16)),
            *(ctypes.c_long(blocks.row), blocks.size, bits, int(signed)),
            *(ctypes.c_long(first), ctypes.c_long(last)),
        )

    if not is_fake(codes):
        _in_threads(work, num_blocks, blocks.size)
    limit = torch.finfo(out.dtype).max
    return out if target is out else out.copy_(target.clamp_(-limit, limit) if out.dtype == torch.float16 else target)


def round_to_bfloat16(flat: Tensor, seed: int) -> Tensor | None:
    """Round as `rounding.round_to_bfloat16` does."""
    return _rounded("round_to_bfloat16", torch.bfloat16, flat, seed)


def round_to_float16(flat: Tensor, seed: int) -> Tensor | None:
    """Round as `rounding.round_to_float16` does."""
    return _rounded("round_to_float16", torch.float16, flat, seed)


def _rounded(name: str, dtype: torch.dtype, flat: Tensor, seed: int) -> Tensor | None:
    lib = library()
    assert lib is not None
    flat = flat.float()
    out = torch.empty(flat.shape, dtype=dtype)

    def work(first: int, last: int) -> int:
        found: int = getattr(lib, name)(
            *(_pointer(flat, flat.numel()), _pointer(out, flat.numel())),
            *(ctypes.c_long(flat.numel()), ctypes.c_uint32(seed)),
            *(ctypes.c_long(first), ctypes.c_long(last)),
        )
        return found

    return out if is_fake(flat) or _in_threads(work, -(-flat.numel() // BLOCK_SIZE), BLOCK_SIZE) else None


def quantize_to_map(flat: Tensor, code_map: Tensor, bits: int, seed: int, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize as `blockwise.quantize_to_map` does."""
    lib = library()
    assert lib is not None
    flat = flat.float()
    blocks = -(-flat.numel() // BLOCK_SIZE)
    codes = torch.empty(-(-flat.numel() * bits // 8), dtype=torch.uint8)
    absmax = torch.empty(blocks, dtype=torch.float32)

    def work(first: int, last: int) -> None:
        lib.quantize_to_map(
            *(_pointer(flat, flat.numel()), _pointer(code_map, len(code_map)), len(code_map)),
            *(_pointer(codes, codes.numel()), _pointer(absmax, blocks)),
            *(ctypes.c_long(flat.numel()), bits, ctypes.c_uint32(seed), ctypes.c_uint32(shift)),
            *(ctypes.c_long(first), ctypes.c_long(last)),
        )

    if not is_fake(flat):
        _in_threads(work, blocks, BLOCK_SIZE)
    return codes, absmax


def dequantize_from_map(codes: Tensor, code_map: Tensor, absmax: Tensor, bits: int, num_values: int) -> Tensor:
    """Dequantize as `blockwise.dequantize_from_map` does."""
    lib = library()
    assert lib is not None
    out = torch.empty(num_values, dtype=torch.float32)
    blocks = -(-num_values // BLOCK_SIZE)

    def work(first: int, last: int) -> None:
        lib.dequantize_from_map(
            *(_pointer(codes, -(-num_values * bits // 8)), _pointer(code_map, len(code_map)), len(code_map)),
            *(_pointer(absmax, blocks), _pointer(out, num_values)),
            *(ctypes.c_long(num_values), bits, ctypes.c_long(first), ctypes.c_long(last)),
        )

    if not is_fake(codes):
        _in_threads(work, blocks, BLOCK_SIZE)
    return out


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a boolean mask as `bits.pack(mask, 1)` does."""
    return _bytes_from("pack_mask", mask)


def pack_positive(flat: Tensor) -> Tensor:
    """Pack the signs as `bits.pack(~(flat <= 0), 1)` does."""
    return _bytes_from("pack_positive", flat) if flat.dtype == torch.float32 else pack_mask(~(flat <= 0))


def _bytes_from(name: str, flat: Tensor) -> Tensor:
    lib = library()
    assert lib is not None
    packed = torch.empty(-(-flat.numel() // 8), dtype=torch.uint8)
    function = getattr(lib, name)

    def work(first: int, last: int) -> None:
        sizes = map(ctypes.c_long, (flat.numel(), first, last))
        function(_pointer(flat, flat.numel()), _pointer(packed, packed.numel()), *sizes)

    if not is_fake(flat):
        _in_threads(work, packed.numel(), 8)
    return packed


def unpack_mask(packed: Tensor, num_values: int) -> Tensor:
    """Unpack a mask as `bits.unpack(packed, 1, num_values).bool()` does."""
    lib = library()
    assert lib is not None
    mask = torch.empty(num_values, dtype=torch.bool)

    def work(first: int, last: int) -> None:
        sizes = map(ctypes.c_long, (num_values, first, last))
        lib.unpack_mask(_pointer(packed, -(-num_values // 8)), _pointer(mask, num_values), *sizes)

    if not is_fake(packed):
        _in_threads(work, -(-num_values // 8), 8)
    return mask


def scale_where(mask: Tensor, values: Tensor, scale: float) -> Tensor:
    """Scale float32 values as `bits.scale_where` does."""
    lib = library()
    assert lib is not None
    out = torch.empty_like(values)

    def work(first: int, last: int) -> None:
        pointers = (_pointer(each, values.numel()) for each in (mask, values, out))
        lib.scale_where(*pointers, ctypes.c_float(scale), ctypes.c_long(first), ctypes.c_long(last))

    if not is_fake(values):
        _in_threads(work, values.numel(), 1)
    return out


def set_bits(packed: Tensor) -> Tensor:
    """Return the set bits, [k], as `bits.unpack(packed, 1, ...).nonzero()` does."""
    lib = library()
    assert lib is not None
    if is_fake(packed):
        return torch.empty(num_set(packed), dtype=torch.int64)
    size = ctypes.c_long(packed.numel())
    lib.set_bits.restype = ctypes.c_long
    source = _pointer(packed, packed.numel())
    positions = torch.empty(lib.set_bits(source, None, size), dtype=torch.int64)
    lib.set_bits(source, _pointer(positions, positions.numel()), size)
    return positions


def pack_two(flat: Tensor) -> tuple[Tensor, Tensor] | None:
    """Pack 32-bit elements as `bits.pack_two` does."""
    lib = library()
    assert lib is not None
    values, packed = flat.new_empty(2), torch.empty(-(-flat.numel() // 8), dtype=torch.uint8)
    if is_fake(flat):
        return (packed, values) if has_two_values(flat) else None
    source, found_values = _pointer(flat, flat.numel()), _pointer(values, 2)
    lib.find_two(source, found_values, ctypes.c_long(flat.numel()))

    def work(first: int, last: int) -> int:
        sizes = map(ctypes.c_long, (flat.numel(), first, last))
        found: int = lib.pack_two(source, found_values, _pointer(packed, packed.numel()), *sizes)
        return found

    return (packed, values) if _in_threads(work, packed.numel(), 8) else None


def unpack_two(packed: Tensor, values: Tensor, size: int) -> Tensor:
    """Unpack 32-bit elements as `bits.unpack_two` does."""
    lib = library()
    assert lib is not None
    out = values.new_empty(size)

    def work(first: int, last: int) -> None:
        sizes = map(ctypes.c_long, (size, first, last))
        lib.unpack_two(_pointer(packed, -(-size // 8)), _pointer(values, 2), _pointer(out, size), *sizes)

    if not is_fake(packed):
        _in_threads(work, -(-size // 8), 8)
    return out


def _pointer(tensor: Tensor, num_elements: int) -> ctypes.c_void_p:
    """Return the pointer of a tensor, of which a kernel reads or writes so many elements.

    Raises:
        ValueError: it has fewer.
    """
    if tensor.numel() < num_elements:
        raise ValueError(f"a kernel needs {num_elements} elements of a tensor that has {tensor.numel()}")
    assert tensor.is_contiguous()
    assert tensor.data_ptr() or not tensor.numel(), "a tensor without memory has no place in a kernel"
    return ctypes.c_void_p(tensor.data_ptr())
