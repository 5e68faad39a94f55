"""Samples: of what a layer reads for its weight's gradient alone, some elements or some rows.

The gradient of a Linear's or a convolution's weight is a sum of products with the input x; nothing else is made of x.

* `"topk-0.1"` keeps the tenth of all elements with the largest magnitudes, and one bit per element that says which. The
  rest is zero in backward, so that the gradient is too small: it is *changed*.
* `"rows-0.3"` keeps 30 % of a Linear's rows (tokens). Each row is kept with a probability, and divided by it, so that
  the mean of many draws is the gradient: *unbiased*. The probability is in proportion to the row's norm where that
  makes it less than 1. Rows with larger norms are always kept, as they are.

Bytes per element of float32, in rows of D elements: 4 f + 1/8 with `"topk-f"`, 4 f + 4 f / D with `"rows-f"`. Beside a
codec such as `"int4"`, which then holds for all else, what is kept is coded by it as well. Where ReLU reads the signs
of the same tensor, they take one bit more; a positive element that was dropped is the smallest positive number then.

Sources: Chen et al., "DropIT", 2022 (https://arxiv.org/abs/2202.13808), which keeps int32 positions instead of bits;
Liu et al., "Winner-Take-All Column Row Sampling", 2023 (https://arxiv.org/abs/2305.15265). It multiplies the norms by
those of the output's gradient in the previous epoch, which are not known here, and draws the rest with replacement.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memsave.numerics import kernels
from lightning_memsave.numerics.kbit import mix
from lightning_memsave.saved_tensors.call_site import Call
from lightning_memsave.saved_tensors.code_rows import Rows, covers_its_storage, rows_in_memory
from lightning_memsave.saved_tensors.encodings import BITS, Bf16, Encoding, Fidelity, Identity, IntCodes
from lightning_memsave.torch_internals.fake_tensors import is_fake

LEAST_ROWS = 10
"""Rows that are kept, at least, of as many; as in the paper's code."""
_CONVOLUTIONS = frozenset(f"conv{'_transpose' * t}{d}d" for t in (0, 1) for d in (1, 2, 3))
_LEAST_SHARE = 1e-12  # of the largest norm: no row has probability 0
_CERTAIN = 1 - 1e-9  # probability from which a row counts as always kept
_DIGIT = 8  # bits of a magnitude that are counted at a time
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Sampling(NamedTuple):
    """Rule by which inputs of layers are sampled."""

    kind: str
    """`"topk"`: elements; `"rows"`: rows of a Linear's input."""
    fraction: float

    def __str__(self) -> str:
        return f"{self.kind}-{self.fraction:g}"

    @property
    def drops_small(self) -> bool:
        """Whether small elements are dropped and nothing makes up for them, which changes the gradient."""
        return self.kind == "topk"

    def of(self, call: Call, tensor: Tensor) -> Sample | None:
        """Return a sample for what `call` keeps for its weight's gradient; `None` where none is taken, or all are."""
        if call.name != "linear" and (self.kind == "rows" or call.name not in _CONVOLUTIONS):
            return None
        if not covers_its_storage(tensor) or (self.kind == "rows" and not tensor.is_contiguous()):
            return None
        row = tensor.shape[-1] if self.kind == "rows" else 1
        num = tensor.numel() // row
        return Sample(self, row) if self.num_kept(num) < num else None

    def num_kept(self, num: int) -> int:
        """Return how many of `num` elements or rows are kept."""
        return min(num, max(LEAST_ROWS if self.kind == "rows" else 1, round(self.fraction * num)))


class Sample(NamedTuple):
    """A part of a tensor, of which the gradient of a weight is computed."""

    sampling: Sampling
    row: int
    """Elements that are kept or dropped together."""

    def encode(self, flat: Tensor, fidelity: Fidelity, seed: int, rows: Rows, signed: bool) -> Sampled:
        """Return the sample of a storage's elements, whose values are kept in `fidelity`; `rows` plays no part."""
        make = SampledRows if self.sampling.kind == "rows" else TopElements
        return make(self, flat, fidelity, seed, signed)


class Sampled(ABC):
    """Values of a sample, where they belong, and the signs of all elements where these are read."""

    fidelity = Fidelity.PART

    def __init__(self, sample: Sample, flat: Tensor, values: Encoding, places: Tensor, signed: bool) -> None:
        self.kind, self.row = str(sample.sampling), sample.row
        self._values, self._places = values, places
        self._positive = kernels.pack_positive(flat) if signed else None
        self._size, self._dtype = flat.numel(), flat.dtype

    def flat(self) -> Tensor:
        """Return the values where they belong, and zeros elsewhere; signs as they were where somebody reads them."""
        values = self._values.flat()
        out = self.put(torch.zeros(self._size, dtype=self._dtype, device=values.device), values)
        if self._positive is not None:
            is_positive = kernels.unpack_mask(self._positive, self._size)
            out.masked_fill_(is_positive & (out <= 0), torch.finfo(self._dtype).tiny)
        return out

    @abstractmethod
    def put(self, out: Tensor, values: Tensor) -> Tensor:
        """Write values into zeros, [n]."""

    def payload(self) -> Iterator[Tensor]:
        """Yield values, places and signs."""
        yield from self._values.payload()
        yield self._places
        if self._positive is not None:
            yield self._positive


class TopElements(Sampled):
    """The elements with the largest magnitudes, and one bit per element that says which; zeros elsewhere."""

    def __init__(self, sample: Sample, flat: Tensor, fidelity: Fidelity, seed: int, signed: bool) -> None:
        packed, values = _largest(flat, sample.sampling.num_kept(flat.numel()))
        super().__init__(sample, flat, _coded(values, fidelity, seed, Rows(len(values)), signed), packed, signed)

    def put(self, out: Tensor, values: Tensor) -> Tensor:
        """Write values where the bits are set."""
        return out.masked_scatter_(kernels.unpack_mask(self._places, len(out)), values)


class SampledRows(Sampled):
    """Rows drawn in proportion to their norms, each divided by its probability; zeros elsewhere."""

    def __init__(self, sample: Sample, flat: Tensor, fidelity: Fidelity, seed: int, signed: bool) -> None:
        rows = flat.view(-1, sample.row)  # [N, D]
        num_kept = sample.sampling.num_kept(len(rows))
        index, weights = draw_rows(rows, num_kept, mix(seed ^ 0x2545F491) * 2.0**-32)
        values = rows[index].mul_(weights[:, None])  # [k, D]
        coded = _coded(
            values.view(-1), fidelity, seed, rows_in_memory(values.shape, values.stride(), values.numel()), signed
        )
        super().__init__(sample, flat, coded, index.int(), signed)

    def put(self, out: Tensor, values: Tensor) -> Tensor:
        """Write each row in its place."""
        out.view(-1, self.row).index_copy_(0, self._places.long(), values.view(-1, self.row))
        return out


def _coded(values: Tensor, fidelity: Fidelity, seed: int, rows: Rows, signed: bool) -> Encoding:
    """Return a code of that fidelity, or the values themselves."""
    found: Encoding | None = None
    if fidelity == Fidelity.BF16:
        found = Bf16.of(values, seed)
    elif fidelity in BITS:
        found = IntCodes.of(values, fidelity, seed, signed, rows)
    return found or Identity(values)


# ------------------------------------------------------------------------------- rows
def draw_rows(rows: Tensor, num_kept: int, start: float) -> tuple[Tensor, Tensor]:
    """Draw rows without repetition, and return which, int64 [k], and 1 / the probability of each, [k].

    With norms p in falling order, of which the first c are always kept, another is kept with probability
    p (k - c) / (sum of the others' p). c is the smallest number with which that is at most 1 for all of them.

    Args:
        rows: [N, D].
        num_kept: k, at most N.
        start: uniform in [0, 1). Rows are drawn at start, start + 1, ... along the sum of their probabilities, which
            is k: systematic sampling.
    """
    dtype = torch.promote_types(rows.dtype, torch.float32)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=dtype).double()
    norms = norms.clamp_min(norms.max() * _LEAST_SHARE).clamp_min(torch.finfo(torch.float32).tiny)
    norms, order = norms.sort(descending=True)
    rest = norms.flip(0).cumsum(0).flip(0)  # the sum of each norm and those behind it
    number = torch.arange(len(norms), device=rows.device)
    left = (num_kept - number).clamp_min(0)
    num_certain = (norms * left <= rest).int().argmax().view(1)  # the first
    probabilities = norms * (left / rest).gather(0, num_certain)
    probabilities = torch.where((number < num_certain) | (probabilities >= _CERTAIN), 1.0, probabilities)
    ends = probabilities.cumsum(0)
    ends[-1] = num_kept  # but for rounding it is
    places = torch.arange(num_kept, device=rows.device) + torch.tensor(start, dtype=ends.dtype, device=rows.device)
    drawn = torch.searchsorted(ends, places, right=True).clamp_max(len(norms) - 1)  # not a number: none is found
    return order[drawn], (1 / probabilities[drawn]).to(dtype)


# ------------------------------------------------------------------------------- elements
def _largest(flat: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
    """Return which elements have the largest magnitudes, one bit each, and these in order; of equal ones the first."""
    packed = flat.new_empty(-(-flat.numel() // 8), dtype=torch.uint8)
    values = flat.new_empty(num_kept)
    threshold, num_ties = (0, num_kept) if is_fake(flat) else _magnitude_of_rank(flat, num_kept)
    first, chunk = 0, _chunk(flat)
    for part, bits in zip(flat.split(chunk), packed.split(chunk // 8), strict=True):
        magnitudes = _magnitudes(part)
        ties = magnitudes == threshold
        mask = (magnitudes > threshold) | (ties & (ties.cumsum(0, dtype=torch.int32) <= num_ties))
        bits.copy_(kernels.pack_mask(mask))
        if is_fake(part):
            break  # the other parts take no more memory, one after the other
        num_ties -= int(ties.sum())
        kept = part[mask]
        values[first : first + len(kept)] = kept
        first += len(kept)
    return packed, values


def _magnitude_of_rank(flat: Tensor, rank: int) -> tuple[int, int]:
    """Return the magnitude, as an integer, that `rank` elements reach, and how many equal to it are among these.

    Digit by digit, by counting, as a radix sort does: a partial sort of the whole would hold several copies of it.
    """
    found, largest = 0, 2**_DIGIT - 1
    for shift in range(8 * flat.element_size() - _DIGIT, -1, -_DIGIT):
        counts = torch.zeros(largest + 1, dtype=torch.int64, device=flat.device)
        for part in flat.split(_chunk(flat)):
            digits = _magnitudes(part) >> shift
            counts += torch.bincount(digits[digits >> _DIGIT == found] & largest, minlength=largest + 1)
        reach = counts.flip(0).cumsum(0)  # how many have this digit or a larger one, from the largest on
        place = int((reach >= rank).int().argmax())
        rank -= int(reach[place - 1]) if place else 0
        found = found << _DIGIT | largest - place
    return found, rank


def _magnitudes(part: Tensor) -> Tensor:
    """Return |x| as integers in the same order, not numbers above all."""
    dtype = _INTEGERS[part.element_size()]
    found = part.view(dtype) & torch.iinfo(dtype).max
    return found.int() if dtype == torch.int16 else found


def _chunk(flat: Tensor) -> int:
    """Return elements at a time, a multiple of 8, which bounds the temporaries."""
    return 2**16 if flat.device.type == "cpu" else 2**24
