"""The encodings in which an entry is kept: bytes, a code, a recomputation, or nothing but its shape.

Each gives the whole storage back as a flat tensor. `fidelity` says how faithfully: higher is better, see `Fidelity`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from lightning_memsave.numerics import bits, kernels
from lightning_memsave.numerics.kbit import Blocks, mix
from lightning_memsave.saved_tensors.code_rows import Rows
from lightning_memsave.torch_internals.autograd_graph import Values
from lightning_memsave.torch_internals.fake_tensors import integer_range


class Fidelity(IntEnum):
    """How much of a tensor is needed, from nothing to every bit; what lies between the two is what codes deliver."""

    SHAPE = 0
    MASK = 1
    PART = 2  # what one kind of consumer reads: an activation's derivative, or a sample
    INT2 = 3
    INT4 = 4
    INT8 = 5
    BF16 = 6
    EXACT = 7


BITS = {Fidelity.INT2: 2, Fidelity.INT4: 4, Fidelity.INT8: 8}


class Encoding(Protocol):
    """One way of keeping a tensor."""

    kind: str
    """What reports call it."""
    fidelity: Fidelity

    def flat(self) -> Tensor:
        """Return the storage's elements, [n]; a fresh tensor unless the encoding is `Identity`."""

    def payload(self) -> Iterator[Tensor]:
        """Yield the tensors that this encoding keeps alive."""


class Part(Protocol):
    """What one kind of consumer reads of a tensor, which is kept instead of its values where nobody else reads them."""

    def encode(self, flat: Tensor, fidelity: Fidelity, seed: int, rows: Rows, signed: bool) -> Encoding | None:
        """Return the encoding of a storage's elements, [n]; `None` where there is none.

        Args:
            flat: the elements.
            fidelity: of what is kept.
            seed: of the noise.
            rows: in which blocks of codes end.
            signed: whether signs are read as well.
        """


class Identity:
    """The bytes themselves."""

    kind, fidelity = "raw", Fidelity.EXACT

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def flat(self) -> Tensor:
        """Return all of the tensor's storage."""
        tensor = self._tensor
        return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)

    def payload(self) -> Iterator[Tensor]:
        """Yield the tensor itself: a view would be an operation of the step for whoever traces it."""
        yield self._tensor


Function = Callable[[Tensor], Tensor]


class Shape:
    """Nothing: whoever reads it looks at sizes only."""

    kind, fidelity = "shape only", Fidelity.SHAPE

    def __init__(self, flat: Tensor) -> None:
        self._like, self._size = flat.new_empty(0), flat.numel()

    def flat(self) -> Tensor:
        """Return arbitrary values."""
        return self._like.new_empty(self._size)

    def without_memory(self, size: torch.Size, stride: tuple[int, ...]) -> Tensor | None:
        """Return a tensor of that shape on one element.

        `None` where the strides tell of another order of dimensions.
        """
        is_plain = stride == torch.empty(size, device="meta").stride()
        return self._like.new_zeros(()).expand(size) if is_plain else None

    def payload(self) -> Iterator[Tensor]:
        """Return nothing."""
        return iter(())


class Mask:
    """One bit per element: a boolean tensor, or a sign, read back as 1 and 0."""

    kind = "1-bit mask"

    def __init__(self, packed: Tensor, like: Tensor, fidelity: Fidelity) -> None:
        self._packed, self._size, self._dtype, self.fidelity = packed, like.numel(), like.dtype, fidelity

    @classmethod
    def of(cls, flat: Tensor) -> Mask:
        """Pack a boolean tensor."""
        return cls(kernels.pack_mask(flat), flat, Fidelity.EXACT)

    @classmethod
    def positive(cls, flat: Tensor) -> Mask:
        """Pack whether each element is positive."""
        return cls(kernels.pack_positive(flat), flat, Fidelity.MASK)

    def flat(self) -> Tensor:
        """Return True and False, or 1 and 0."""
        return kernels.unpack_mask(self._packed, self._size).to(self._dtype)

    def payload(self) -> Iterator[Tensor]:
        """Yield the bits."""
        yield self._packed


class RangeMask:
    """One bit per element: whether `low < value < high`; read back as the middle of the two, and as `high`."""

    kind, fidelity = "1-bit mask", Fidelity.MASK

    def __init__(self, flat: Tensor, low: float, high: float) -> None:
        self._packed, self._size = kernels.pack_mask((flat > low) & (flat < high)), flat.numel()
        self._values = flat.new_tensor([high, (low + high) / 2])

    def flat(self) -> Tensor:
        """Return the middle of the range for what was inside it, and `high` for all else."""
        return kernels.unpack_two(self._packed, self._values, self._size)

    def payload(self) -> Iterator[Tensor]:
        """Return bits and values."""
        yield from (self._packed, self._values)


class TwoValues:
    """One bit per element of a tensor that holds two values: dropout's noise, an attention mask of 0 and -inf."""

    kind, fidelity = "1-bit mask", Fidelity.EXACT

    def __init__(self, packed: Tensor, values: Tensor, size: int) -> None:
        self._packed, self._values, self._size = packed, values, size

    @classmethod
    def of(cls, flat: Tensor) -> TwoValues | None:
        """Pack a tensor of two values, told apart by their bits; `None` for one with more."""
        found = kernels.pack_two(flat)
        return None if found is None else cls(*found, flat.numel())

    def flat(self) -> Tensor:
        """Return the two values."""
        return kernels.unpack_two(self._packed, self._values, self._size)

    def payload(self) -> Iterator[Tensor]:
        """Return bits and values."""
        yield from (self._packed, self._values)


class IntDowncast:
    """Integers in the narrowest type that holds their range."""

    kind, fidelity = "narrowed integers", Fidelity.EXACT

    def __init__(self, flat: Tensor, dtype: torch.dtype) -> None:
        self._values, self._dtype = flat.to(dtype), flat.dtype

    @classmethod
    def of(cls, flat: Tensor) -> IntDowncast | None:
        """Narrow integers; `None` when no narrower type holds them."""
        low, high = integer_range(flat)
        for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
            info = torch.iinfo(dtype)
            if info.min <= low and high <= info.max:
                return cls(flat, dtype) if dtype.itemsize < flat.element_size() else None
        return None

    def flat(self) -> Tensor:
        """Return the integers."""
        return self._values.to(self._dtype)

    def payload(self) -> Iterator[Tensor]:
        """Yield the narrow integers."""
        yield self._values


class WindowIndex:
    """A max-pool's argmax as the position inside the window: 2 bits for 2x2 windows instead of int64.

    Args:
        index: int64, [..., *out_size]: flat positions in the input plane.
        plane: sizes of the input plane.
        kernel, stride, padding, dilation: of the pool, one number per dimension of the plane.
    """

    kind, fidelity = "pool index", Fidelity.EXACT

    def __init__(self, index: Tensor, plane: Sequence[int], window: Sequence[Sequence[int]]) -> None:
        self._plane, self._window, self._out_size = plane, window, index.shape[-len(plane) :]
        self._planes, self._bits = index.numel() // self._out_size.numel(), bits.bits_for(_product(window[0]))
        flat = index.reshape(self._planes, *self._out_size)
        self._packed = bits.pack(torch.cat([self._local(part) for part in flat.split(self._per_chunk())]), self._bits)

    @classmethod
    def fits(cls, window: Sequence[Sequence[int]]) -> bool:
        """Return whether a byte can tell the window's positions apart."""
        return bits.bits_for(_product(window[0])) > 0

    def _per_chunk(self) -> int:
        return max(1, 2**18 // self._out_size.numel())

    def _starts(self, device: torch.device) -> list[Tensor]:
        """Return where the windows begin in the plane, for each dimension (negative in the padding)."""
        _, stride, padding, _ = self._window
        dims = range(len(self._plane))
        return [
            (torch.arange(self._out_size[d], device=device) * stride[d] - padding[d]).view(
                [-1 if other == d else 1 for other in dims]
            )
            for d in dims
        ]

    def _local(self, index: Tensor) -> Tensor:
        kernel, _, _, dilation = self._window
        local, starts = torch.zeros_like(index), self._starts(index.device)
        place = 1
        for d in reversed(range(len(self._plane))):
            position = index % self._plane[d]
            index = index // self._plane[d]
            local += (position - starts[d]) // dilation[d] * place
            place *= kernel[d]
        return local.to(torch.uint8).view(-1)

    def flat(self) -> Tensor:
        """Return the int64 indices."""
        kernel, _, _, dilation = self._window
        starts = self._starts(self._packed.device)
        local = bits.unpack(self._packed, self._bits, self._planes * self._out_size.numel())
        out = torch.empty(self._planes, *self._out_size, dtype=torch.int64, device=local.device)
        count = self._per_chunk()
        for part, target in zip(local.view(out.shape).split(count), out.split(count), strict=True):
            rest, place = part.long(), 1
            target.zero_()
            for d in reversed(range(len(self._plane))):
                target += (starts[d] + rest % kernel[d] * dilation[d]) * place
                rest = rest // kernel[d]
                place *= self._plane[d]
        return out.view(-1)

    def payload(self) -> Iterator[Tensor]:
        """Yield the packed positions."""
        yield self._packed


def _product(sizes: Sequence[int]) -> int:
    return int(torch.Size(sizes).numel())


class Bf16:
    """bfloat16: half of float32's bytes, 8 bits of precision, stochastically rounded."""

    kind, fidelity = "bf16", Fidelity.BF16

    def __init__(self, values: Tensor, dtype: torch.dtype) -> None:
        self._values, self._dtype = values, dtype

    @classmethod
    def of(cls, flat: Tensor, seed: int) -> Bf16 | None:
        """Round to bfloat16; `None` when a value is not finite, or takes no more than that anyway."""
        values = kernels.round_to_bfloat16(flat, seed) if flat.element_size() > 2 else None
        return None if values is None else cls(values, flat.dtype)

    def flat(self) -> Tensor:
        """Return the rounded values."""
        return self._values.to(self._dtype)

    def payload(self) -> Iterator[Tensor]:
        """Yield the narrow values."""
        yield self._values


class IntCodes:
    """k bits per element with stochastic rounding (`numerics.kbit`)."""

    def __init__(
        self, coded: tuple[Tensor, Tensor], like: Tensor, fidelity: Fidelity, signed: bool, rows: Rows
    ) -> None:
        self._coded, self.size, self._dtype, self.fidelity, self._signed = (
            coded,
            like.numel(),
            like.dtype,
            fidelity,
            signed,
        )
        self._rows = rows
        self.kind = f"int{BITS[fidelity]}"

    @classmethod
    def of(
        cls, flat: Tensor, fidelity: Fidelity, seed: int, signed: bool = False, rows: Rows | None = None
    ) -> IntCodes | None:
        """Code a flat tensor; `None` when a value is not finite."""
        rows = rows or Rows(flat.numel())
        if rows.order is None:
            found = kernels.quantize(flat, BITS[fidelity], seed, signed, rows.length)
            return None if found is None else cls(found, flat, fidelity, signed, rows)
        coded = []
        for number, part in enumerate(rows.parts(flat)):
            seed_of_part = seed if number == 0 else mix((seed + number) & 0xFFFFFFFF)
            found = kernels.quantize(part.contiguous().view(-1), BITS[fidelity], seed_of_part, signed, rows.length)
            if found is None:
                return None
            coded.append(found)
        codes, ranges = zip(*coded, strict=True)
        joined = coded[0] if len(coded) == 1 else (torch.cat(codes), torch.cat(ranges))
        return cls(joined, flat, fidelity, signed, rows)

    def flat(self, out: Tensor | None = None) -> Tensor:
        """Return the decoded values, in `out` where that is given."""
        codes, ranges = self._coded
        out = torch.empty(self.size, dtype=self._dtype, device=codes.device) if out is None else out
        if self._rows.order is None:
            return kernels.dequantize(codes, ranges, BITS[self.fidelity], out, self._signed, self._rows.length)
        first, per_row = 0, Blocks.of_rows(self._rows.length).per_row
        for part in self._rows.parts(out):
            last = first + part.numel() // self._rows.length * per_row
            target = torch.empty_like(part, memory_format=torch.contiguous_format)
            blocks = codes[first:last], ranges[first:last]
            kernels.dequantize(*blocks, BITS[self.fidelity], target.view(-1), self._signed, self._rows.length)
            part.copy_(target)
            first = last
        return out

    def mapped(self, function: Function, curvature: Function) -> Tensor:
        """Return a function of the values, right on average up to the second order in their noise.

        The mean of f(x + e) is f(x) + f''(x) v / 2. Stochastic rounding to steps of s has v = s**2 / 6, the mean over
        all places between two steps, so that f''(x) s**2 / 12 is subtracted.

        Args:
            function: of values, element by element.
            curvature: its second derivative.
        """
        out, length, first = self.flat(), self._rows.length, 0
        per_row = Blocks.of_rows(length).per_row
        per_chunk = max(1, (2**16 if out.device.type == "cpu" else 2**22) // length)
        for part in self._rows.parts(out):
            rows = part.reshape(-1, length)  # a copy, where rows do not lie in memory as they are read
            for chunk in rows.split(per_chunk):
                last = first + len(chunk) * per_row
                x = chunk.float()
                chunk.copy_(function(x) - curvature(x) * self._half_variance(x, first, last))
                first = last
            if rows.data_ptr() != part.data_ptr():
                part.copy_(rows.view(part.shape))
        return out

    def _half_variance(self, values: Tensor, first: int, last: int) -> Tensor:
        """Return half of the variance of decoded values, [rows, length]; of the blocks from `first` to `last`."""
        blocks = Blocks.of_rows(self._rows.length)
        steps = self._coded[1][first:last, 1::2].float().square_().div_(12)  # [blocks, 1]; with signs [blocks, 2]
        each = steps.view(len(values), blocks.per_row, -1).repeat_interleave(blocks.size, 1)[:, : blocks.row]
        return torch.where(values > 0, each[..., -1], each[..., 0]) if self._signed else each[..., 0]

    def payload(self) -> Iterator[Tensor]:
        """Yield codes and ranges."""
        yield from self._coded


class Recompute:
    """How to compute a tensor again from entries that are kept anyway."""

    def __init__(
        self, compute: Values, like: Tensor, fidelity: Fidelity, needs: tuple[object, ...], depth: int
    ) -> None:
        self.kind, self.fidelity, self.depth = "recomputed", fidelity, depth
        self._compute, self.needs = compute, needs
        self._size, self._stride, self._dtype = like.shape, like.stride(), like.dtype
        self._numel = like.untyped_storage().nbytes() // like.element_size()

    def flat(self) -> Tensor:
        """Return the value, laid out in memory as it was."""
        with torch.no_grad():
            value = self._compute()
        assert value.shape == self._size, "a recomputation gives the tensor that it stands for"
        is_in_place = value.stride() == self._stride and value.dtype == self._dtype
        if is_in_place and value.untyped_storage().nbytes() == self._numel * value.element_size():
            return value.as_strided((self._numel,), (1,), 0)
        out = torch.empty(self._numel, dtype=self._dtype, device=value.device)
        out.as_strided(self._size, self._stride).copy_(value)
        return out

    def payload(self) -> Iterator[Tensor]:
        """Yield the codes that a chain shares; entries count for themselves."""
        for need in self.needs:
            if isinstance(need, IntCodes):
                yield from need.payload()
