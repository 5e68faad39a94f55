"""Steps of Adam and SGD on moments that are codes of a map, in one call of C for many parameters.

A block of 256 elements is decoded, stepped and coded again in the processor's first-level cache: nothing is allocated,
and the moments cross memory as codes alone. Every operation rounds as torch's own step on one tensor does, so that
moments, and SGD's weights, are equal to the bit; Adam's weights follow a square root that rounds to the nearest, where
torch's may be off by one unit in the last place (MKL's).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_memsave.numerics.kernels import native

FLOAT32, ROUNDED, CORRECTED = range(3)
"""Kinds of weights, as `native.c` numbers them."""
_Pointer, _Float, _Seed = ctypes.c_void_p, ctypes.c_float, ctypes.c_uint32


class Moment(ctypes.Structure):
    """Codes, their scales and the seed of their rounding."""

    _fields_ = (("codes", _Pointer), ("absmax", _Pointer), ("seed", _Seed))


class Rule(ctypes.Structure):
    """What the parameters of a group have in common in one step, as `native.c` declares it."""

    _fields_ = (
        *(("first", _Pointer), ("second", _Pointer), ("shift", _Seed), ("has_nesterov", ctypes.c_int)),
        *((name, _Float) for name in ("shrink", "decay", "keep", "take", "keep_second", "take_second")),
        *((name, _Float) for name in ("root_correction", "eps", "step")),
    )


class Part(ctypes.Structure):
    """Elements of a parameter that are coded together; `rule` is the address of a `Rule`."""

    _fields_ = (
        *(("rule", _Pointer), ("weights", _Pointer), ("correction", _Pointer), ("gradient", _Pointer)),
        *(("first", Moment), ("second", Moment), ("count", ctypes.c_long)),
        *(("kind", ctypes.c_int), ("has_short_gradient", ctypes.c_int), ("seed", _Seed)),
    )


@dataclass(frozen=True)
class ShortWeights:
    """How bfloat16 weights are written: with what they lack, an int8 tensor of their shape, or rounded by a seed."""

    correction: Tensor | None
    seed: int


def step_parts(parts: Sequence[Part], num_elements: int) -> None:
    """Step parts whose pointers are set, `num_elements` in all; several threads divide them."""
    addresses = (_Pointer * len(parts))(*map(ctypes.addressof, parts))
    native.run("step_parts", addresses, num_units=len(parts), per_unit=-(-num_elements // len(parts)))
