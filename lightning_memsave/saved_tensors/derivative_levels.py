"""Few-bit derivatives: of an activation's derivative, which of 2, 4, 8 or 16 levels it is next to.

The backward pass of y = f(x) multiplies by f'(x), which lies between the least and the greatest value of f'. These two
are the first and the last level; those between minimise the mean square error for normally distributed x, found by
dynamic programming. f'(x) is rounded up or down to a neighbouring level at random, so that the mean is f'(x): the
gradient is *unbiased*. Backward is given an x* whose f' is the level, so that no function is replaced.

| | 1 bit | 2 bits | 3 bits | 4 bits |
|---|---:|---:|---:|---:|
| bytes per element, and 4 bytes for each level | 0.125 | 0.25 | 0.375 | 0.5 |

Levels save where nobody keeps the activation's result either (a frozen layer behind it). A trained layer keeps it, and
from its code or bytes the result can be had again: `"exact"`, alone or beside a codec, keeps less then.

Source: Novikov et al., "Few-Bit Backward", 2022 (https://arxiv.org/abs/2202.00441), which rounds to the nearest level:
less noise per element, but a bias that does not average out. Different: rounding at random, the least and greatest
value as levels, no range of x outside of which the derivative is taken as constant.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memsave.numerics import bits, kbit
from lightning_memsave.saved_tensors.activation_derivatives import Derivative, refuse_second_derivative
from lightning_memsave.saved_tensors.code_rows import Rows
from lightning_memsave.saved_tensors.encodings import Fidelity
from lightning_memsave.torch_internals.fake_tensors import is_fake, with_values

_NUM_CANDIDATES = 601  # values of f', equally spaced, among which levels are chosen
_NUM_SAMPLES, _FARTHEST = 20_001, 8.0  # values of x for which they are chosen, and the largest of these


class Levels(NamedTuple):
    """Levels of an activation's derivative."""

    derivative: Derivative
    num_bits: int

    def encode(self, flat: Tensor, fidelity: Fidelity, seed: int, rows: Rows, signed: bool) -> LevelCodes:
        """Return codes of the derivatives; of the arguments, `flat` and `seed` play a part."""
        return LevelCodes(self, flat, seed)


class LevelCodes:
    """k bits per element: a level of f'(x), decoded to some x* of which f' is that level."""

    fidelity = Fidelity.PART

    def __init__(self, levels: Levels, flat: Tensor, seed: int) -> None:
        self.kind, self._levels, self._size = f"fewbit-{levels.num_bits}", levels, flat.numel()
        inputs, values = _table(levels, flat.dtype, flat.device)
        if is_fake(flat):  # the table is there before the step
            inputs, values = flat.new_empty(len(inputs)), flat.new_empty(len(values), dtype=torch.float32)
        self._packed = flat.new_empty(-(-flat.numel() * levels.num_bits // 8), dtype=torch.uint8)
        chunk, poison = _chunk(flat), torch.zeros((), device=flat.device)
        for number, (part, packed) in enumerate(self._parts(flat, chunk)):
            d = levels.derivative(part.float())
            upper = torch.bucketize(d, values, out_int32=True).clamp_(1, len(values) - 1)
            low, high = values[upper - 1], values[upper]
            is_low = _uniform(seed, number * chunk, d) * (high - low) >= d - low
            packed.copy_(bits.pack((upper - is_low.int()).to(torch.uint8), levels.num_bits))
            poison = poison + 0.0 * d.sum()
            if is_fake(flat):
                break  # the other parts take no more memory, one after the other
        self._inputs = inputs + poison.to(inputs.dtype)  # not a number where a derivative is none

    def _parts(self, flat: Tensor, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield elements, some at a time, with the bytes of their codes."""
        return zip(flat.split(chunk), self._packed.split(chunk * self._levels.num_bits // 8), strict=True)

    def flat(self) -> Tensor:
        """Return values that have the levels as derivatives.

        Raises:
            DifferentiatedTwiceError: backward itself is differentiated, for which they are no use.
        """
        refuse_second_derivative(self._levels.derivative, self.kind, "exact")
        out = self._inputs.new_empty(self._size)
        for part, packed in self._parts(out, _chunk(out)):
            part.copy_(self._inputs[bits.unpack(packed, self._levels.num_bits, len(part)).int()])
            if is_fake(out):
                break
        return out

    def payload(self) -> Iterator[Tensor]:
        """Yield codes and the table of x*."""
        yield from (self._packed, self._inputs)


def _chunk(flat: Tensor) -> int:
    """Return elements at a time, whole blocks of noise, which bounds the temporaries."""
    return 2**16 if flat.device.type == "cpu" else 2**22


def _uniform(seed: int, first: int, like: Tensor) -> Tensor:
    """Return numbers in [0, 1) with 24 bits, [n], the same on any device."""
    size = kbit.BLOCK_SIZE
    drawn = kbit.random_bits(seed, first // size, -(-len(like) // size), like.device).view(-1)[: len(like)]
    return (drawn >> 8).float() * 2.0**-24


# ------------------------------------------------------------------------------- the levels
@functools.cache
def _table(levels: Levels, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return x* for each level, in `dtype`, and f' of these, in rising order and float32, both [2^k]."""

    def built() -> tuple[Tensor, Tensor]:
        x = torch.linspace(-_FARTHEST, _FARTHEST, _NUM_SAMPLES, dtype=torch.float64, device="cpu")
        weights = torch.exp(-x.square() / 2)
        chosen = best_levels(levels.derivative(x), weights, levels.derivative.ends, 2**levels.num_bits)
        inputs = levels.derivative.invert(chosen.float()).to(dtype)
        values, order = levels.derivative(inputs.float()).sort()
        return inputs[order].to(device), values.to(device)

    return with_values(built)


def best_levels(derivatives: Tensor, weights: Tensor, ends: tuple[float, float], num: int) -> Tensor:
    """Return levels, [num], between which derivatives are rounded at random with the least mean square error.

    Rounding d at random to a or b has the variance (b - d) (d - a).

    Args:
        derivatives: float64, [n].
        weights: how often each occurs.
        ends: the first and the last level, between which all derivatives lie.
        num: 2 or more.
    """
    candidates = torch.linspace(*ends, _NUM_CANDIDATES, dtype=torch.float64, device="cpu")
    place = torch.bucketize(derivatives, candidates).clamp_(max=_NUM_CANDIDATES - 1)
    powers = torch.stack([weights, weights * derivatives, weights * derivatives.square()])
    sums = powers.new_zeros(3, _NUM_CANDIDATES).index_add_(1, place, powers).cumsum(1)
    zeroth, first, second = sums[:, None, :] - sums[:, :, None]  # [i, j]: of what lies between candidates i and j
    a, b = candidates[:, None], candidates[None, :]
    cost = (a + b) * first - second - a * b * zeroth
    cost = torch.where(b > a, cost, torch.inf)
    best, steps = cost[0], []  # of some levels, the last of which is candidate j
    for _ in range(num - 2):
        best, step = (best[:, None] + cost).min(0)
        steps.append(step)
    chosen = [_NUM_CANDIDATES - 1]
    for step in reversed(steps):
        chosen.append(int(step[chosen[-1]]))
    return candidates[[0, *reversed(chosen)]]
