"""The operators of compiled code: what they keep, in which order, and whose noise it is."""

from __future__ import annotations

import math

import pytest
import torch

from lightning_memsave import NoEffectWarning
from lightning_memsave.numerics import kbit
from lightning_memsave.saved_tensors import compiled_operators as operators
from tests.saved_tensors.compiled_nets import Counting

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(3, 1, 0, 2),
    "a part": lambda x: x[:, ::2],
    "expanded": lambda x: x[:1].expand(4, -1, -1, -1),
}


def tensor(layout):
    return LAYOUTS[layout](torch.randn(4, 8, 16, 16, generator=torch.Generator().manual_seed(0)))


def contiguous(x):
    return list(torch.empty(x.shape).stride())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bits", kbit.BITS)
@pytest.mark.parametrize("signed", [False, True])
def test_codes_are_those_of_the_reference_in_the_order_that_is_asked_for(layout, bits, signed):
    x, scope = tensor(layout), Counting()
    row = x.shape[-1] * x.shape[-2]
    with operators.told_to(scope):
        codes, ranges = operators.encode(x, 1, bits, signed, row, contiguous(x))
    scope.noise.go_to((0, {}))
    expected = kbit.quantize(x.contiguous().view(-1), bits, scope.noise.next_seed(1), signed, row)
    assert torch.equal(codes, expected[0])
    assert torch.equal(ranges, expected[1])
    found = operators.decode(codes, ranges, bits, signed, row, x.shape, contiguous(x), x.dtype)
    out = torch.empty(x.numel())
    assert torch.equal(found.view(-1), kbit.dequantize(*expected, bits, out, signed, row))
    assert scope.noted == [(f"int{bits}", 4 * x.numel(), codes.nbytes + ranges.nbytes)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("signed", [False, True])
def test_a_block_with_a_value_that_is_not_finite_is_nan_and_the_others_are_not(bad, signed):
    x = torch.randn(4, 256)
    x[1, 3] = bad
    with operators.told_to(Counting()):
        coded = operators.encode(x, 1, 8, signed, 256, [256, 1])
    found = operators.decode(*coded, 8, signed, 256, x.shape, [256, 1], x.dtype)
    assert found[1].isnan().all()
    others = [0, 2, 3]
    assert (found[others] - x[others]).abs().max() < 0.05


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_and_signs_come_back_exactly(layout):
    x = tensor(layout)
    x = torch.where(x > 1, torch.zeros(()), x)
    with operators.told_to(scope := Counting()):
        mask = operators.pack_mask(x > 0, contiguous(x))
        signs = operators.pack_positive(x, contiguous(x))
    assert torch.equal(operators.unpack_mask(mask, x.shape, contiguous(x)), x > 0)
    assert torch.equal(operators.unpack_positive(signs, x.shape, contiguous(x), x.dtype), (x > 0).to(x.dtype))
    assert {held for _, _, held in scope.noted} == {-(-x.numel() // 8)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_is_rounded_to_one_of_two_neighbours(layout):
    x = tensor(layout)
    with operators.told_to(Counting()):
        found = operators.round_to_bfloat16(x, 1, contiguous(x))
    assert found.dtype == torch.bfloat16
    assert ((found.float() - x).abs() <= x.abs() * 2.0**-7).all()


def test_shapes_without_values_are_those_with_values():
    x = tensor("contiguous")
    calls = [
        (operators.encode, (x, 1, 4, True, 256, contiguous(x))),
        (operators.round_to_bfloat16, (x, 1, contiguous(x))),
        (operators.pack_positive, (x, contiguous(x))),
        (operators.pack_mask, (x > 0, contiguous(x))),
    ]
    for operator, arguments in calls:
        with operators.told_to(Counting()):
            torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_outside_of_a_scope_there_is_a_warning():
    x = torch.randn(4, 256)
    with pytest.warns(NoEffectWarning, match="runs outside of the scope"):
        operators.encode(x, 1, 8, False, 256, [256, 1])


def test_the_inner_scope_is_told():
    outer, inner, x = Counting(), Counting(), torch.randn(4, 256)
    with operators.told_to(outer):
        with operators.told_to(inner):
            operators.encode(x, 1, 8, False, 256, [256, 1])
        assert not outer.noted
        operators.encode(x, 1, 8, False, 256, [256, 1])
    assert len(outer.noted) == len(inner.noted) == 1
