"""The operators that compiled code calls to code what it keeps for backward, `torch.ops.lightning_memsave`.

| operator      | what it keeps of a tensor                                        | and its way back |
|---------------|------------------------------------------------------------------|------------------|
| `encode`      | k bits per element and a range per block (`numerics.kbit`)        | `decode`         |
| `round`       | bfloat16, rounded stochastically                                  | a plain cast     |
| `pack_mask`   | one bit per element of a boolean mask; exact                      | `unpack_mask`    |
| `pack_positive` | one bit per element: whether it is positive                     | `unpack_positive`, 1 or 0 |

They are opaque to the compiler, which neither fuses nor repeats them, and run the kernels that eager code runs. The
seed of the noise is drawn when an operator runs, from the store whose scope is open: it goes on from step to step, is
repeated when a run is resumed, and differs between the tensors of a graph, which are numbered, and between its calls in
one step. A block with a value that is not finite is
decoded as NaN, on every device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_memsave.core.errors import NoEffectWarning
from lightning_memsave.numerics import kernels
from lightning_memsave.numerics.kbit import Blocks
from lightning_memsave.saved_tensors.seeds import NoiseSeeds
from lightning_memsave.torch_internals.autograd_graph import autograd_is_running


class Scope(Protocol):
    """What the operators tell, and ask, while a scope is open."""

    noise: NoiseSeeds

    def note_compiled(self, kind: str, plain_bytes: int, kept: tuple[Tensor, ...]) -> None:
        """Count a tensor that compiled code keeps as `kept`."""


_open: list[Scope] = []
_latest: list[NoiseSeeds] = []
"""The noise of the scope that was open last: in backward, checkpoints run code again after its scope has ended."""


@contextmanager
def told_to(scope: Scope) -> Iterator[None]:
    """Draw the noise of operators that run inside from `scope`, and let it count what they keep."""
    _open.append(scope)
    try:
        yield
    finally:
        _open.pop()
        _latest[:] = [scope.noise]


_library = torch.library.Library("lightning_memsave", "DEF")
# Layouts that the compiler has chosen are taken as they are: no tensor is copied before it is coded. A CUDA graph would
# repeat the seeds that it was recorded with.
_TAGS = tuple(tag for name in ("flexible_layout", "cudagraph_unsafe") if (tag := getattr(torch.Tag, name, None)))


def _define(schema: str, run: Callable[..., Any], shape: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema, tags=_TAGS)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lightning_memsave::{name}", shape, lib=_library)
    return getattr(torch.ops.lightning_memsave, name).default


def _encode(x: Tensor, number: int, bits: int, signed: bool, row: int, stride: Sequence[int]) -> tuple[Tensor, Tensor]:
    flat, seed = _flat(x, stride), _next_seed(number)
    coded = kernels.quantize(flat, bits, seed, signed, row) or _with_nan(flat, bits, seed, signed, row)
    _note(f"int{bits}", x, *coded)
    return coded


def _with_nan(flat: Tensor, bits: int, seed: int, signed: bool, row: int) -> tuple[Tensor, Tensor]:
    """Code values that are not all finite: NaN is the range of each block that has one."""
    blocks = Blocks.of_rows(row)
    positions = blocks.positions(0, blocks.count(flat.numel()), flat.device)
    largest = flat.float().abs()[positions].amax(1)
    is_bad = ~(largest <= torch.finfo(torch.bfloat16).max / 4)  # the range of larger ones is none of bfloat16
    clean = flat.clone()
    clean[positions[is_bad]] = 0
    coded = kernels.quantize(clean, bits, seed, signed, row)
    assert coded is not None, "all of it is finite now"
    coded[1][is_bad] = float("nan")
    return coded


def _shape_of_codes(
    x: Tensor, number: int, bits: int, signed: bool, row: int, stride: Sequence[int]
) -> tuple[Tensor, Tensor]:
    blocks = Blocks.of_rows(row)
    num_blocks = blocks.count(x.numel())
    codes = x.new_empty(num_blocks, blocks.num_bytes(bits), dtype=torch.uint8)
    return codes, x.new_empty(num_blocks, 4 if signed else 2, dtype=torch.bfloat16)


def _decode(
    codes: Tensor,
    ranges: Tensor,
    bits: int,
    signed: bool,
    row: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    out = torch.empty_strided(size, stride, dtype=dtype, device=codes.device)
    kernels.dequantize(codes, ranges, bits, out.as_strided((out.numel(),), (1,)), signed, row)
    return out


def _shape_of_values(
    codes: Tensor,
    ranges: Tensor,
    bits: int,
    signed: bool,
    row: int,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    return codes.new_empty_strided(size, stride, dtype=dtype)


def _round(x: Tensor, number: int, stride: Sequence[int]) -> Tensor:
    flat = _flat(x, stride)
    rounded = kernels.round_to_bfloat16(flat, _next_seed(number))
    kept = (flat.to(torch.bfloat16) if rounded is None else rounded).as_strided(x.shape, stride)
    _note("bf16", x, kept)
    return kept


def _shape_of_rounded(x: Tensor, number: int, stride: Sequence[int]) -> Tensor:
    return x.new_empty_strided(x.shape, stride, dtype=torch.bfloat16)


def _pack_mask(mask: Tensor, stride: Sequence[int]) -> Tensor:
    packed = kernels.pack_mask(_flat(mask, stride))
    _note("mask", mask, packed)
    return packed


def _shape_of_packed(mask: Tensor, stride: Sequence[int]) -> Tensor:
    return mask.new_empty((mask.numel() + 7) // 8, dtype=torch.uint8)


def _unpack_mask(packed: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    return kernels.unpack_mask(packed, torch.Size(size).numel()).as_strided(size, stride)


def _shape_of_mask(packed: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    return packed.new_empty_strided(size, stride, dtype=torch.bool)


def _pack_positive(x: Tensor, stride: Sequence[int]) -> Tensor:
    packed = kernels.pack_positive(_flat(x, stride))
    _note("mask", x, packed)
    return packed


def _unpack_positive(packed: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return _unpack_mask(packed, size, stride).to(dtype)


def _shape_of_signs(packed: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty_strided(size, stride, dtype=dtype)


def _flat(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Return the elements of `x` in the order in which they lie with dense strides `stride`."""
    if x.stride() != tuple(stride):
        x = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device).copy_(x)
    return x.as_strided((x.numel(),), (1,))


def _next_seed(number: int) -> int:
    if _open:
        return _open[-1].noise.next_seed(number)
    if _latest and autograd_is_running():
        return _latest[0].next_seed(number)
    warnings.warn(
        "Compiled code that keeps codes for backward runs outside of the scope that it was compiled in (such as "
        "`training_step`): its gradients have the noise of these codes.",
        NoEffectWarning,
        stacklevel=2,
    )
    return _outside.next_seed(number)


_outside = NoiseSeeds(0)


def _note(kind: str, plain: Tensor, *kept: Tensor) -> None:
    if _open:
        _open[-1].note_compiled(kind, plain.numel() * plain.element_size(), kept)


encode = _define(
    "encode(Tensor x, int number, int bits, bool signed, int row, SymInt[] stride) -> (Tensor, Tensor)",
    _encode,
    _shape_of_codes,
)
decode = _define(
    "decode(Tensor codes, Tensor ranges, int bits, bool signed, int row, SymInt[] size, SymInt[] stride, "
    "ScalarType dtype) -> Tensor",
    _decode,
    _shape_of_values,
)
round_to_bfloat16 = _define("round(Tensor x, int number, SymInt[] stride) -> Tensor", _round, _shape_of_rounded)
pack_mask = _define("pack_mask(Tensor mask, SymInt[] stride) -> Tensor", _pack_mask, _shape_of_packed)
unpack_mask = _define(
    "unpack_mask(Tensor packed, SymInt[] size, SymInt[] stride) -> Tensor", _unpack_mask, _shape_of_mask
)
pack_positive = _define("pack_positive(Tensor x, SymInt[] stride) -> Tensor", _pack_positive, _shape_of_packed)
unpack_positive = _define(
    "unpack_positive(Tensor packed, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor",
    _unpack_positive,
    _shape_of_signs,
)
