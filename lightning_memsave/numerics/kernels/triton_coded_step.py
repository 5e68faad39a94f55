"""Steps of Adam and SGD on moments that are codes of a map, on CUDA: one kernel for a parameter, in Triton.

Blocks of 256 elements are decoded, stepped and coded again in registers: nothing is allocated, and the moments cross
memory as codes alone. Every product and sum rounds on its own, as in plain torch; codes are those of
`blockwise.quantize_to_map`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_memsave.numerics.blockwise import BLOCK_SIZE
from lightning_memsave.numerics.kernels.coded_step import CORRECTED, FLOAT32, ROUNDED, Rule, ShortWeights
from lightning_memsave.numerics.kernels.triton_elementwise import (
    _ALL_BUT_SIGN,
    _BLOCKS,
    _EXPONENT,
    _SIZE,
    OPTIONS,
    _noise,
    _places,
    _signed,
    decode_block,
    encode_block,
    rounded_to_bfloat16,
)
from lightning_memsave.numerics.kernels.triton_kbit import _bits, _from_bits

_FLOAT32, _ROUNDED, _CORRECTED = map(tl.constexpr, (FLOAT32, ROUNDED, CORRECTED))


class CodedMoment(NamedTuple):
    """A moment with what codes it: a map, on the same device, of 4, 5 or 8 bits, and the seed of the rounding."""

    codes: Tensor
    absmax: Tensor
    code_map: Tensor
    bits: int
    seed: int


def step(rule: Rule, p: Tensor, moments: Sequence[CodedMoment], short: ShortWeights | None) -> None:
    """Step a parameter, which lies one element after the other as its gradient does, in place."""
    assert p.grad is not None
    kind = FLOAT32 if short is None else ROUNDED if short.correction is None else CORRECTED
    correction = None if short is None else short.correction
    seed = 0 if short is None else short.seed
    first, second = moments[0], moments[-1]
    weights = p.detach().view(-1) if short is None else p.detach().view(-1).view(torch.int16)
    num_blocks = triton.cdiv(p.numel(), BLOCK_SIZE)
    with torch.cuda.device_of(p):
        _step[(triton.cdiv(num_blocks, _BLOCKS),)](
            *(weights, weights if correction is None else correction.view(-1), p.grad.view(-1)),
            *(first.codes, first.absmax, first.code_map, second.codes, second.absmax, second.code_map),
            *(p.numel(), num_blocks, first.code_map.numel(), second.code_map.numel()),
            *map(_signed, (first.seed, second.seed, seed, rule.shift)),
            *(rule.shrink, rule.decay, rule.keep, rule.take, rule.keep_second, rule.take_second),
            *(rule.root_correction, rule.eps, rule.step),
            *(first.bits, second.bits, kind, len(moments) == 2, rule.decay != 0, bool(rule.has_nesterov)),
            _BLOCKS,
            **OPTIONS,
        )


@triton.jit(do_not_specialize=["first_seed", "second_seed", "seed", "shift"])
def _step(
    weights,
    correction,
    gradient,
    first,
    first_absmax,
    first_map,
    second,
    second_absmax,
    second_map,
    size,
    num_blocks,
    first_entries,
    second_entries,
    first_seed,
    second_seed,
    seed,
    shift,
    shrink,
    decay,
    keep,
    take,
    keep_second,
    take_second,
    root_correction,
    eps,
    step,
    first_bits: tl.constexpr,
    second_bits: tl.constexpr,
    kind: tl.constexpr,
    is_adam: tl.constexpr,
    has_decay: tl.constexpr,
    has_nesterov: tl.constexpr,
    blocks: tl.constexpr,
):
    block, element = _places(blocks)
    place = block * _SIZE + element
    exists = place < size
    p = _weights(weights, correction, place, exists, kind)
    g = tl.load(gradient + place, mask=exists, other=0.0).to(tl.float32)
    m = decode_block(first, first_map, first_absmax, block, place, size, first_bits)
    if is_adam:
        p *= shrink
        g = g + decay * p if has_decay else g
        m = m + take * (g - m)
        v = decode_block(second, second_map, second_absmax, block, place, size, second_bits)
        v = v * keep_second + take_second * g * g
        root = tl.math.sqrt_rn(v)
        denominator = tl.math.div_rn(root, tl.full(root.shape, 0.0, tl.float32) + root_correction) + eps
        p += tl.math.div_rn(step * m, denominator)
        noise = _noise(block, element, second_seed) + shift.to(tl.uint32)
        v = tl.where(exists, v, 0.0)
        encode_block(
            v,
            second_map,
            second,
            second_absmax,
            block,
            place,
            size,
            num_blocks,
            second_entries,
            noise,
            second_bits,
            blocks,
        )
    else:
        g = g + decay * p if has_decay else g
        m = m * keep + take * g
        p += step * (g + keep * m if has_nesterov else m)
    _write(p, weights, correction, place, exists, _noise(block, element, seed), kind)
    noise = _noise(block, element, first_seed) + shift.to(tl.uint32)
    m = tl.where(exists, m, 0.0)
    encode_block(
        m, first_map, first, first_absmax, block, place, size, num_blocks, first_entries, noise, first_bits, blocks
    )


@triton.jit
def _weights(weights, correction, place, exists, kind: tl.constexpr):
    """Return float32 weights, joined with what 16 bits lack as `master_weights.join` does."""
    if kind == _FLOAT32:
        return tl.load(weights + place, mask=exists, other=0.0)
    pattern = tl.load(weights + place, mask=exists, other=0).to(tl.int32) << 16
    if kind == _CORRECTED:
        missing = tl.load(correction + place, mask=exists, other=0).to(tl.int32) * 256
        pattern = tl.where((pattern & _ALL_BUT_SIGN) != 0, pattern + missing, pattern)
    return _from_bits(pattern)


@triton.jit
def _write(p, weights, correction, place, exists, noise, kind: tl.constexpr):
    """Write float32 weights: as they are, rounded, or in two parts as `master_weights.split` does."""
    if kind == _FLOAT32:
        tl.store(weights + place, p, mask=exists)
    else:
        pattern = _bits(p)
        if kind == _ROUNDED:
            value = rounded_to_bfloat16(pattern, noise)
        else:
            to_even = pattern + 0x7FFF + ((pattern >> 16) & 1)
            is_nan = (pattern & _ALL_BUT_SIGN) > _EXPONENT
            value = tl.where(is_nan, 0x7FC0, to_even >> 16)
            missing = (pattern - (value << 16) + 128) >> 8
            missing = tl.minimum(tl.maximum(missing, -127), 127)
            missing = tl.where((value & 0x7FFF) != 0, missing, 0)
            tl.store(correction + place, missing.to(tl.int8), mask=exists)
        tl.store(weights + place, value.to(tl.int16), mask=exists)
