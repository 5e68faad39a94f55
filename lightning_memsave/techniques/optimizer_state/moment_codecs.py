"""What a moment is between two steps: codes of 4, 5 or 8 bits, row and column means, or a tensor in another memory.

| format | first moments (signed), times the largest magnitude of the block | second moments (not negative) |
|---|---|---|
| `"4bit"` | +-(i / 7)**2, i = 0 to 7 | (i / 16)**2, i = 1 to 16 |
| `"8bit"` | +-(i / 127)**2.5, i = 0 to 127 | (i / 256)**5, i = 1 to 256 |
| `"fp8"` | e4m3: 4 bits of exponent, 3 of the significand, over 448 | (i / 256)**8, i = 1 to 256 |
| `"factored"` | as `"8bit"` | the means of its rows and columns; parameters with one dimension: as `"8bit"` |
| `"4bit-factored"` | as `"4bit"` | the same means; parameters with one dimension: as `"4bit"` |
| `"5bit-factored"` | +-(i / 15)**2, i = 0 to 15 | the same means; else (i / 32)**2, i = 1 to 32 |
| `"offload"` | as it is, in host memory | as it is, in host memory |

Codes have one float32 scale per block of 256. Second moments have no zero, because something is divided by them:
elements below the lowest value of a block count as that, which makes Adam's steps smaller. They have no sign either, so
no float of 8 bits suits them: powers are as close as its values far down, and closer near the top of a block.

Rounding is stochastic. An average that decays by a tenth or a thousandth per step never leaves a code whose neighbours
are further away when it is rounded to the nearest: a weight without gradient would drift for ever. The noise of an
element goes from step to step by the golden ratio, so that it is spread evenly, and errors cancel instead of adding up:
the error after 200 steps of fixed gradients falls by a fifth to a third. Each rounding is right on average over the
elements, but no longer independent of the last: a moment that follows slowly is off by a part of a code's distance.

Sources: Dettmers et al., 2021 (https://arxiv.org/abs/2110.02861) for blocks; Li, Chen, Zhu, "Memory Efficient
Optimizers with 4-bit States", 2023 (https://arxiv.org/abs/2309.01507) for leaving out zero, and for 4 bits beside means
("4-bit Factor"); Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (https://arxiv.org/abs/2209.05433);
Shazeer, Stern, "Adafactor", 2018 (https://arxiv.org/abs/1804.04235) for the means, of which the second moment is their
outer product over the mean of all. Ours: rounding, maps and block size, and Adafactor's second moment inside of any
Adam, with its own learning rate.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_memsave.numerics.bits import pack
from lightning_memsave.numerics.blockwise import BLOCK_SIZE, num_blocks, quantize_blockwise
from lightning_memsave.numerics.kbit import mix
from lightning_memsave.numerics.kernels import dequantize_from_map, quantize_to_map
from lightning_memsave.techniques.optimizer_state.host_offload import Elsewhere
from lightning_memsave.torch_internals.optimizer_class import put

SIGNED = ("exp_avg", "momentum_buffer", "prev")
POSITIVE = ("exp_avg_sq", "square_avg", "sum", "max_exp_avg_sq", "exp_inf", "acc_delta", "step_size")
"""Names of moments in torch's optimizers: those that have a sign, and those that have none."""
_NUMBERS = ("exp_avg", "momentum_buffer", "exp_avg_sq", "square_avg", "sum")


class QuantizedMoment(NamedTuple):
    """A moment as codes."""

    codes: Tensor
    absmax: Tensor

    def part(self, span: slice, num_elements: int) -> QuantizedMoment:
        """Return a view of the codes of the elements `span` of all, which are whole blocks."""
        bits = self.codes.numel() * 8 // num_elements
        return QuantizedMoment(
            self.codes[span.start * bits // 8 : -(-span.stop * bits // 8)],
            self.absmax[span.start // BLOCK_SIZE : num_blocks(span.stop)],
        )

    def made_for(self, num_elements: int) -> QuantizedMoment:
        """Return codes like these, which are of whole blocks, for more elements and not filled yet."""
        bits = self.codes.numel() * 8 // (self.absmax.numel() * BLOCK_SIZE)
        return QuantizedMoment(
            self.codes.new_empty(-(-num_elements * bits // 8)), self.absmax.new_empty(num_blocks(num_elements))
        )

    def joined(self, part: QuantizedMoment, span: slice, num_elements: int) -> QuantizedMoment:
        """Return these with the codes of `part` where `span` is."""
        for value, place in zip(part, self.part(span, num_elements), strict=True):
            put(value, place)
        return self


class Factored(NamedTuple):
    """A second moment as the means of its rows and columns."""

    rows: Tensor  # [N]
    columns: Tensor  # [M]

    def part(self, span: slice, num_elements: int) -> Factored:
        """Return the means of some whole rows of their outer product, which are a copy."""
        rows = self.rows[self._rows_of(span)]
        return Factored(rows.clone(), self.columns * (rows.mean() / _positive(self.rows.mean())))

    def made_for(self, num_elements: int) -> Factored:
        """Return means like these, for more rows and not filled yet."""
        return Factored(self.rows.new_empty(num_elements // len(self.columns)), torch.empty_like(self.columns))

    def joined(self, part: Factored, span: slice, num_elements: int) -> Factored:
        """Return these with the rows of `part`, and the columns so far; the first part begins anew."""
        columns = part.columns * (len(part.rows) / len(self.rows))
        whole = self if span.start else Factored(torch.empty_like(self.rows), torch.zeros_like(columns))
        whole.rows[self._rows_of(span)] = part.rows
        whole.columns.add_(columns)
        return whole

    def _rows_of(self, span: slice) -> slice:
        return slice(span.start // len(self.columns), span.stop // len(self.columns))


Stored = Tensor | QuantizedMoment | Factored | Elsewhere


class RoundingNoise(NamedTuple):
    """Seed and shift of stochastic rounding: see `quantize_stochastically`."""

    seed: int
    shift: int

    def of(self, moment: str) -> RoundingNoise:
        """Return the noise of one moment of the parameter whose noise this is."""
        number = _NUMBERS.index(moment) if moment in _NUMBERS else zlib.crc32(moment.encode())
        return RoundingNoise(mix(self.seed ^ number), self.shift)


class Codec(Protocol):
    """How one moment is kept between steps."""

    def encode(self, value: Tensor, noise: RoundingNoise | None) -> Stored:
        """Keep `value`; rounded stochastically with `noise`, or to the nearest, which finds codes again exactly."""

    def decode(self, stored: Any, shape: torch.Size) -> Tensor:
        """Return the moment, a tensor of its own."""

    def num_bytes(self, shape: torch.Size) -> int:
        """Return bytes on the parameter's device."""

    def unit(self, shape: torch.Size) -> int:
        """Return how many elements, one after the other, are kept together."""


@dataclass(frozen=True, eq=False)
class BlockMap:
    """Codes of a map."""

    code_map: Tensor
    bits: int

    def encode(self, value: Tensor, noise: RoundingNoise | None) -> QuantizedMoment:
        """Return codes and scales."""
        flat, code_map = value.detach().reshape(-1), self.on_device(value.device)
        if noise is not None:
            return QuantizedMoment(*quantize_to_map(flat, code_map, self.bits, *noise))
        codes, absmax = quantize_blockwise(flat, code_map)
        return QuantizedMoment(pack(codes, self.bits), absmax)

    def decode(self, stored: QuantizedMoment, shape: torch.Size) -> Tensor:
        """Return `map[code]` times the scale of its block."""
        code_map = self.on_device(stored.codes.device)
        return dequantize_from_map(stored.codes, code_map, stored.absmax, self.bits, math.prod(shape)).view(shape)

    def num_bytes(self, shape: torch.Size) -> int:
        """Return bytes of codes and scales."""
        num_elements = math.prod(shape)
        return -(-num_elements * self.bits // 8) + 4 * num_blocks(num_elements)

    def unit(self, shape: torch.Size) -> int:
        """Return the number of elements in a block."""
        return BLOCK_SIZE

    def on_device(self, device: torch.device) -> Tensor:
        """Return the map there."""
        return _on_device(self.code_map, device)


@functools.lru_cache(maxsize=64)
def _on_device(code_map: Tensor, device: torch.device) -> Tensor:
    return code_map.to(device)


def _positive(mean: Tensor) -> Tensor:
    return mean.clamp_min(torch.finfo(torch.float32).tiny)


def _without_outlier(matrix: Tensor, means: Factored) -> Factored:
    """Return the means, in which an element that is four times all others together counts as their mean.

    None is infinite.

    One gradient of 10^20 squares to infinity. In Adam that stops one weight; as a part of the mean of all, by which
    means are divided, it would make every other second moment 0. Nothing waits for the device.
    """
    rows, columns = means
    if min(matrix.shape) >= _NARROW:  # else one element may well be most of what there is
        row = rows.argmax()
        column = matrix[row].argmax()
        others_in_row, others_in_column = matrix[row].clone(), matrix[:, column].clone()
        element = others_in_row[column].clone()
        others_in_row[column] = others_in_column[row] = 0.0
        others = others_in_row.sum() + rows.index_fill(0, row, 0.0).sum() * matrix.shape[1]
        is_outlier, usual = element > _OUTLIER * others, others / (matrix.numel() - 1)
        rows[row] = torch.where(is_outlier, (others_in_row.sum() + usual) / matrix.shape[1], rows[row])
        columns[column] = torch.where(is_outlier, (others_in_column.sum() + usual) / len(matrix), columns[column])
    largest = torch.finfo(torch.float32).max / max(1, matrix.numel())
    return Factored(rows.clamp_(max=largest), columns.clamp_(max=largest))


_OUTLIER, _NARROW = 4.0, 16


@dataclass(frozen=True, eq=False)
class Means:
    """Row and column means, in float32; parameters with one dimension go to `otherwise`."""

    otherwise: Codec

    def encode(self, value: Tensor, noise: RoundingNoise | None) -> Stored:
        """Return the means."""
        if value.dim() < 2:
            return self.otherwise.encode(value, noise)
        matrix = value.detach().reshape(len(value), -1).float()  # [N, M]
        return _without_outlier(matrix, Factored(matrix.mean(1), matrix.mean(0)))

    def decode(self, stored: Any, shape: torch.Size) -> Tensor:
        """Return their outer product over the mean of all."""
        if not isinstance(stored, Factored):
            return self.otherwise.decode(stored, shape)
        rows, columns = stored
        return torch.outer(rows / _positive(rows.mean()), columns).view(shape)  # [N], [M] -> [N, M]

    def num_bytes(self, shape: torch.Size) -> int:
        """Return bytes of the means, in float32."""
        if len(shape) < 2:
            return self.otherwise.num_bytes(shape)
        return 4 * (shape[0] + math.prod(shape[1:]))

    def unit(self, shape: torch.Size) -> int:
        """Return the number of elements in a row."""
        return self.otherwise.unit(shape) if len(shape) < 2 else math.prod(shape[1:])


class Away:
    """Codec that keeps moments in host memory; exact."""

    def encode(self, value: Tensor, noise: RoundingNoise | None) -> Elsewhere:
        """Return a copy elsewhere."""
        return Elsewhere(value.detach())

    def decode(self, stored: Elsewhere, shape: torch.Size) -> Tensor:
        """Return the moment, brought back to its device."""
        return stored.get()

    def num_bytes(self, shape: torch.Size) -> int:
        """Return 0: nothing stays on the device."""
        return 0

    def unit(self, shape: torch.Size) -> int:
        """Return the number of all elements, as they are fetched at once."""
        return math.prod(shape)


def _float_map(bits_of_exponent: int, bits_of_significand: int, largest: float) -> Tensor:
    """Return the positive values of a small float over the largest finite one, ascending, without zero."""
    bias, steps = 2 ** (bits_of_exponent - 1) - 1, 2**bits_of_significand
    subnormal = [i / steps * 2.0 ** (1 - bias) for i in range(1, steps)]
    normal = [(1 + i / steps) * 2.0 ** (e - bias) for e in range(1, 2**bits_of_exponent) for i in range(steps)]
    return torch.tensor(
        [v / largest for v in (*subnormal, *normal) if v <= largest], dtype=torch.float64, device="cpu"
    ).float()


def _both_signs(positive: Tensor) -> Tensor:
    return torch.cat([-positive.flip(0), positive.new_zeros(1), positive])


def _powers(num: int, exponent: float) -> Tensor:
    return (torch.arange(1, num + 1, device="cpu") / num) ** exponent


_IN_4BIT = BlockMap(_both_signs(_powers(7, 2)), 4), BlockMap(_powers(16, 2), 4)
_IN_5BIT = BlockMap(_both_signs(_powers(15, 2)), 5), BlockMap(_powers(32, 2), 5)
_IN_8BIT = BlockMap(_both_signs(_powers(127, 2.5)), 8), BlockMap(_powers(256, 5), 8)
CODECS: Mapping[str, tuple[Codec, Codec]] = {
    "4bit": _IN_4BIT,
    "8bit": _IN_8BIT,
    "fp8": (BlockMap(_both_signs(_float_map(4, 3, 448.0)), 8), BlockMap(_powers(256, 8), 8)),
    "factored": (_IN_8BIT[0], Means(_IN_8BIT[1])),
    "4bit-factored": (_IN_4BIT[0], Means(_IN_4BIT[1])),
    "5bit-factored": (_IN_5BIT[0], Means(_IN_5BIT[1])),
    "offload": (Away(), Away()),
}
"""Codecs by format: of first moments, and of second ones."""


def bound_step(first: Tensor, second: Tensor, betas: tuple[float, float]) -> None:
    """Raise a second moment that is far too small for the first one, in place.

    Whatever the gradients are, Adam's moments keep to (Cauchy-Schwarz; with 0.9 and 0.999: 53)

        first**2 <= second * (1 - b1)**2 / ((1 - b2) * (1 - b1**2 / b2))

    Means do not: huge gradients raise the mean of all, by which they are divided. Here steps are at most four times as
    long as Adam's can be.
    """
    beta1, beta2 = map(float, betas)
    least = (1 - beta2) * (1 - beta1**2 / beta2) / (4 * (1 - beta1)) ** 2
    if least > 0:  # in place, as there is little room
        second.addcmul_(first, first, value=-least).clamp_(min=0).addcmul_(first, first, value=least)


def codec_of(state_format: str, is_positive: bool) -> Codec | None:
    """Return how a moment is kept; `None`: as it is, in a format without codes."""
    return CODECS[state_format][is_positive] if state_format in CODECS else None


def unit_of(state_format: str, shape: torch.Size) -> int:
    """Return how many elements of a parameter, one after the other, step together; moments of a subspace are of all."""
    if state_format == "32bit":
        return 1
    return math.lcm(*(codec.unit(shape) for codec in CODECS.get(state_format, (Away(),))))


def decode(codec: Codec | None, stored: Any, shape: torch.Size) -> Any:
    """Return what `encode` kept, as a tensor; anything else as it is."""
    if isinstance(stored, (QuantizedMoment, Factored, Elsewhere)):
        assert codec is not None
        return codec.decode(stored, shape)
    return stored


def encode(codec: Codec | None, value: Any, shape: torch.Size, noise: RoundingNoise | None) -> Any:
    """Keep a moment of a parameter of `shape`; anything else, or without a codec, stays as it is."""
    if codec is None or not isinstance(value, Tensor) or value.shape != shape:
        return value
    return codec.encode(value, noise)


def put_back(codec: Codec | None, before: Any, value: Any, shape: torch.Size, noise: RoundingNoise) -> Any:
    """Encode what `before` was decoded to and has changed since; it goes where it was, in the same memory."""
    if isinstance(before, Elsewhere) and isinstance(value, Tensor):
        before.put(value)
        return before
    found = encode(codec, value, shape, noise)
    if not isinstance(found, (QuantizedMoment, Factored)) or type(before) is not type(found):
        return found
    if any((old.shape, old.device) != (new.shape, new.device) for old, new in zip(before, found, strict=True)):
        return found  # sparse weights, or the parameter, have moved
    for old, new in zip(before, found, strict=True):
        old.copy_(new)
    return before
