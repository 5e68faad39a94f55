"""The CPU kernels in C, built on first use with the machine's compiler; without one, plain torch does the work.

Measured on one thread against `torch.compile` of the reference and plain torch
(`benchmarks/memory_time/bench_codecs.py`): only C is faster than what it saves. The library is cached (`build.py`);
compiling it takes about a second. Every kernel but `find_two` and `set_bits` ends with the range of its units that a
thread is to do.
"""

from __future__ import annotations

import ctypes
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.numerics.kbit import BLOCK_SIZE, Blocks
from lightning_memsave.numerics.kernels import build
from lightning_memsave.torch_internals.fake_tensors import has_two_values, is_fake, num_set

_SOURCE = Path(__file__).with_name("native.c")
_TYPES = (torch.float32, torch.bfloat16)  # others are converted
_MIN_PER_THREAD = 1 << 18  # elements; below that a thread costs more than it brings
_SUMMED = 1 << 12  # elements of a block whose sum is kept apart

_INT, _LONG, _SEED, _FLOAT, _POINTER = ctypes.c_int, ctypes.c_long, ctypes.c_uint32, ctypes.c_float, ctypes.c_void_p
_RANGE = (_LONG, _LONG)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "quantize": (_INT, (_POINTER, _INT, _POINTER, _POINTER, _LONG, *(_INT,) * 4, _SEED, *_RANGE)),
    "dequantize": (None, (*(_POINTER,) * 3, _INT, _LONG, *(_INT,) * 3, *_RANGE)),
    "round_to_bfloat16": (_INT, (_POINTER, _POINTER, _LONG, _SEED, *_RANGE)),
    "round_to_float16": (_INT, (_POINTER, _POINTER, _LONG, _SEED, *_RANGE)),
    "encode_rows": (None, (*(_POINTER,) * 3, _LONG, _INT, _SEED, *_RANGE)),
    "decode_rows": (None, (*(_POINTER,) * 3, _INT, _LONG, *_RANGE)),
    "pack_mask": (None, (_POINTER, _POINTER, _LONG, *_RANGE)),
    "unpack_mask": (None, (_POINTER, _POINTER, _LONG, *_RANGE)),
    "scale_where": (None, (*(_POINTER,) * 3, _FLOAT, *_RANGE)),
    "look_up": (None, (_POINTER, _POINTER, _INT, _FLOAT, _FLOAT, *_RANGE)),
    "set_bits": (_LONG, (_POINTER, _POINTER, _LONG)),
    "block_sums": (None, (_POINTER, _POINTER, _LONG, *_RANGE)),
    "pack_positive": (None, (_POINTER, _POINTER, _LONG, *_RANGE)),
    "find_two": (None, (_POINTER, _POINTER, _LONG)),
    "pack_two": (_INT, (*(_POINTER,) * 3, _LONG, *_RANGE)),
    "unpack_two": (None, (*(_POINTER,) * 3, _LONG, *_RANGE)),
    "map_bytes": (_LONG, ()),
    "make_map": (None, (_POINTER, _INT, _INT, _POINTER)),
    "quantize_to_map": (None, (*(_POINTER,) * 4, _LONG, _SEED, _SEED, *_RANGE)),
    "dequantize_from_map": (None, (*(_POINTER,) * 4, _LONG, *_RANGE)),
    "step_parts": (None, (_POINTER, *_RANGE)),
}
"""Result and arguments of each kernel, as `native.c` declares them."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or `None` where they cannot be built."""
    loaded = build.load(_SOURCE)
    if loaded is not None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    return loaded


def run(name: str, *arguments: Any, num_units: int, per_unit: int) -> bool:
    """Run a kernel over units of so many elements, in several threads where that pays; False when it returned 0."""
    function = getattr(library(), name)
    wanted = num_units * per_unit // _MIN_PER_THREAD
    if wanted > 1:
        wanted = min(torch.get_num_threads(), wanted)
    if wanted <= 1:
        return bool(function(*arguments, 0, num_units) != 0)
    cuts = [num_units * i // wanted for i in range(wanted + 1)]

    def work(first: int, last: int) -> int | None:
        return function(*arguments, first, last)  # type: ignore[no-any-return]  # ctypes releases the GIL

    return 0 not in list(_pool(wanted).map(work, cuts[:-1], cuts[1:]))


@functools.lru_cache(maxsize=1)
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "memsave")


if hasattr(os, "register_at_fork"):  # a child process has none of the threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


def quantize(
    flat: Tensor, bits: int, seed: int | None, signed: bool = False, row: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """Quantize as `kbit.quantize` does."""
    flat = flat if flat.dtype in _TYPES else flat.float()
    size = flat.numel()
    blocks = Blocks.of_rows(row or size)
    num_blocks, num_bytes, num_ends = blocks.count(size), blocks.num_bytes(bits), 4 if signed else 2
    codes = torch.empty(num_blocks, num_bytes, dtype=torch.uint8, device=flat.device)
    ranges = torch.empty(num_blocks, num_ends, dtype=torch.bfloat16, device=flat.device)
    is_coded = is_fake(flat) or run(
        "quantize",
        *(_pointer(flat, size), flat.dtype is torch.bfloat16),
        *(_pointer(codes, num_blocks * num_bytes), _pointer(ranges, num_blocks * num_ends)),
        *(blocks.row, blocks.size, bits, signed, seed is not None, seed or 0),
        num_units=num_blocks,
        per_unit=blocks.size,
    )
    return (codes, ranges) if is_coded else None


def dequantize(
    codes: Tensor, ranges: Tensor, bits: int, out: Tensor, signed: bool = False, row: int | None = None
) -> Tensor:
    """Dequantize as `kbit.dequantize` does."""
    target = out if out.dtype in _TYPES else torch.empty_like(out, dtype=torch.float32)
    size = out.numel()
    blocks = Blocks.of_rows(row or size)
    num_blocks = blocks.count(size)
    if not is_fake(codes):
        run(
            "dequantize",
            _pointer(codes, num_blocks * blocks.num_bytes(bits)),
            _pointer(ranges, num_blocks * (4 if signed else 2)),
            *(_pointer(target, num_blocks // blocks.per_row * blocks.row), target.dtype is torch.bfloat16),
            *(blocks.row, blocks.size, bits, signed),
            num_units=num_blocks,
            per_unit=blocks.size,
        )
    if target is out:
        return out
    limit = torch.finfo(out.dtype).max
    return out.copy_(target.clamp_(-limit, limit) if out.dtype == torch.float16 else target)


def sums(flat: Tensor) -> tuple[float, float]:
    """Return the sum of float32 elements, [n], and that of their magnitudes."""
    num_blocks = -(-flat.numel() // _SUMMED)
    found = torch.empty(num_blocks, 2, dtype=torch.float64, device=flat.device)
    pointers = _pointer(flat, flat.numel()), _pointer(found, 2 * num_blocks)
    run("block_sums", *pointers, flat.numel(), num_units=num_blocks, per_unit=_SUMMED)
    total, magnitude = found.sum(0).tolist()
    return total, magnitude


def round_to_bfloat16(flat: Tensor, seed: int) -> Tensor | None:
    """Round as `rounding.round_to_bfloat16` does."""
    return _rounded("round_to_bfloat16", torch.bfloat16, flat, seed)


def round_to_float16(flat: Tensor, seed: int) -> Tensor | None:
    """Round as `rounding.round_to_float16` does."""
    return _rounded("round_to_float16", torch.float16, flat, seed)


def _rounded(name: str, dtype: torch.dtype, flat: Tensor, seed: int) -> Tensor | None:
    flat, size = flat.float(), flat.numel()
    out = torch.empty(flat.shape, dtype=dtype, device=flat.device)
    is_rounded = is_fake(flat) or run(
        *(name, _pointer(flat, size), _pointer(out, size), size, seed),
        num_units=-(-size // BLOCK_SIZE),
        per_unit=BLOCK_SIZE,
    )
    return out if is_rounded else None


def encode_rows(whole: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Encode as `row_codes.encode_rows` does."""
    size, num_rows = whole.numel(), len(whole)
    codes = torch.empty(whole.shape, dtype=torch.int8, device=whole.device)
    scales = torch.zeros(num_rows, dtype=torch.bfloat16, device=whole.device)
    if size and not is_fake(whole):
        whole = whole.contiguous()
        run(
            "encode_rows",
            *(_pointer(whole, size), _pointer(codes, size), _pointer(scales, num_rows)),
            *(size // num_rows, seed is not None, seed or 0),
            num_units=num_rows,
            per_unit=size // num_rows,
        )
    return codes, scales


def decode_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode as `row_codes.decode_rows` does."""
    out, size = torch.empty_like(codes, dtype=dtype), codes.numel()
    if size and not is_fake(codes):
        run(
            "decode_rows",
            *(_pointer(codes, size), _pointer(scales, len(codes)), _pointer(out, size)),
            *(dtype is torch.bfloat16, size // len(codes)),
            num_units=len(codes),
            per_unit=size // len(codes),
        )
    return out


@functools.lru_cache(maxsize=64)
def _made_map(code_map: Tensor, bits: int) -> ctypes.Array[ctypes.c_char]:
    lib = library()
    assert lib is not None
    made = ctypes.create_string_buffer(lib.map_bytes())
    values = code_map.float().contiguous()
    lib.make_map(_pointer(values, values.numel()), values.numel(), bits, made)
    return made


def native_map(code_map: Tensor, bits: int) -> int:
    """Return the address of a map as the kernels read it; `code_map`, [at most 2**bits], must not change later."""
    return ctypes.addressof(_made_map(code_map, bits))


def quantize_to_map(flat: Tensor, code_map: Tensor, bits: int, seed: int, shift: int = 0) -> tuple[Tensor, Tensor]:
    """Quantize as `blockwise.quantize_to_map` does."""
    flat, size = flat.float(), flat.numel()
    num_blocks, num_bytes = -(-size // BLOCK_SIZE), -(-size * bits // 8)
    codes = torch.empty(num_bytes, dtype=torch.uint8, device=flat.device)
    absmax = torch.empty(num_blocks, dtype=torch.float32, device=flat.device)
    if not is_fake(flat):
        run(
            "quantize_to_map",
            *(_pointer(flat, size), native_map(code_map, bits), _pointer(codes, num_bytes)),
            *(_pointer(absmax, num_blocks), size, seed, shift),
            num_units=num_blocks,
            per_unit=BLOCK_SIZE,
        )
    return codes, absmax


def dequantize_from_map(codes: Tensor, code_map: Tensor, absmax: Tensor, bits: int, num_values: int) -> Tensor:
    """Dequantize as `blockwise.dequantize_from_map` does."""
    out = torch.empty(num_values, dtype=torch.float32, device=codes.device)
    num_blocks = -(-num_values // BLOCK_SIZE)
    if not is_fake(codes):
        run(
            "dequantize_from_map",
            *(_pointer(codes, -(-num_values * bits // 8)), native_map(code_map, bits)),
            *(_pointer(absmax, num_blocks), _pointer(out, num_values), num_values),
            num_units=num_blocks,
            per_unit=BLOCK_SIZE,
        )
    return out


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a boolean mask as `bits.pack(mask, 1)` does."""
    return _bytes_from("pack_mask", mask)


def pack_positive(flat: Tensor) -> Tensor:
    """Pack the signs as `bits.pack(~(flat <= 0), 1)` does."""
    return _bytes_from("pack_positive", flat) if flat.dtype == torch.float32 else pack_mask(~(flat <= 0))


def _bytes_from(name: str, flat: Tensor) -> Tensor:
    size = flat.numel()
    num_bytes = -(-size // 8)
    packed = torch.empty(num_bytes, dtype=torch.uint8, device=flat.device)
    if not is_fake(flat):
        run(name, _pointer(flat, size), _pointer(packed, num_bytes), size, num_units=num_bytes, per_unit=8)
    return packed


def unpack_mask(packed: Tensor, num_values: int) -> Tensor:
    """Unpack a mask as `bits.unpack(packed, 1, num_values).bool()` does."""
    mask = torch.empty(num_values, dtype=torch.bool, device=packed.device)
    num_bytes = -(-num_values // 8)
    if not is_fake(packed):
        pointers = _pointer(packed, num_bytes), _pointer(mask, num_values)
        run("unpack_mask", *pointers, num_values, num_units=num_bytes, per_unit=8)
    return mask


def scale_where(mask: Tensor, values: Tensor, scale: float) -> Tensor:
    """Scale float32 values as `bits.scale_where` does."""
    out, size = torch.empty_like(values), values.numel()
    if not is_fake(values):
        pointers = (_pointer(each, size) for each in (mask, values, out))
        run("scale_where", *pointers, scale, num_units=size, per_unit=1)
    return out


def look_up(values: Tensor, table: Tensor, scale: float, shift: float) -> Tensor:
    """Look up as `bits.look_up` does."""
    size, num_entries = values.numel(), table.numel()
    if not is_fake(values):
        pointers = _pointer(values, size), _pointer(table, num_entries)
        run("look_up", *pointers, num_entries, scale, shift, num_units=size, per_unit=1)
    return values


def set_bits(packed: Tensor) -> Tensor:
    """Return the set bits, [k], as `bits.unpack(packed, 1, ...).nonzero()` does."""
    if is_fake(packed):
        return packed.new_empty(num_set(packed), dtype=torch.int64)
    lib, size = library(), packed.numel()
    assert lib is not None
    source = _pointer(packed, size)
    positions = packed.new_empty(lib.set_bits(source, None, size), dtype=torch.int64)
    lib.set_bits(source, _pointer(positions, positions.numel()), size)
    return positions


def pack_two(flat: Tensor) -> tuple[Tensor, Tensor] | None:
    """Pack 32-bit elements as `bits.pack_two` does."""
    lib, size = library(), flat.numel()
    assert lib is not None
    num_bytes = -(-size // 8)
    values, packed = flat.new_empty(2), flat.new_empty(num_bytes, dtype=torch.uint8)
    if is_fake(flat):
        return (packed, values) if has_two_values(flat) else None
    source, found = _pointer(flat, size), _pointer(values, 2)
    lib.find_two(source, found, size)
    is_packed = run("pack_two", source, found, _pointer(packed, num_bytes), size, num_units=num_bytes, per_unit=8)
    return (packed, values) if is_packed else None


def unpack_two(packed: Tensor, values: Tensor, size: int) -> Tensor:
    """Unpack 32-bit elements as `bits.unpack_two` does."""
    out, num_bytes = values.new_empty(size), -(-size // 8)
    if not is_fake(packed):
        pointers = _pointer(packed, num_bytes), _pointer(values, 2), _pointer(out, size)
        run("unpack_two", *pointers, size, num_units=num_bytes, per_unit=8)
    return out


def _pointer(tensor: Tensor, num_elements: int) -> int:
    """Return the address of a tensor, of which a kernel reads or writes so many elements.

    Raises:
        ValueError: it has fewer.
    """
    if tensor.numel() < num_elements:
        raise ValueError(f"a kernel needs {num_elements} elements of a tensor that has {tensor.numel()}")
    assert tensor.is_contiguous()
    address = tensor.data_ptr()
    assert address or not num_elements, "a tensor without memory has no place in a kernel"
    return address
