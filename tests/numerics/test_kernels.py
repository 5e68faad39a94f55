"""Masks of whichever implementation is there, and which one that is."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from lightning_memsave.numerics import bits, kernels

CPU = torch.device("cpu")


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@given(mask=st.lists(st.booleans(), max_size=70))
def test_masks_equal_the_reference(mask):
    mask = torch.tensor(mask, dtype=torch.bool)
    packed = kernels.pack_mask(mask)
    assert torch.equal(packed, bits.pack(mask, 1))
    assert packed.numel() == math.ceil(len(mask) / 8)
    assert torch.equal(kernels.unpack_mask(packed, len(mask)), mask)


@given(values=st.lists(st.floats(width=16), max_size=70), dtype=st.sampled_from(DTYPES))
def test_masks_of_positive_values_equal_the_reference(values, dtype):
    values = torch.tensor(values, dtype=dtype)
    packed = kernels.pack_positive(values)
    assert torch.equal(packed, bits.pack(~(values <= 0), 1))
    assert torch.equal(kernels.unpack_mask(packed, len(values)), ~(values <= 0))


@pytest.mark.parametrize(("has_triton", "expected"), [(True, "triton"), (False, "torch")])
def test_cuda_uses_triton_where_it_is(has_triton, expected, monkeypatch):
    monkeypatch.setattr(kernels, "_has_triton", lambda: has_triton)
    assert kernels.implementation(torch.device("cuda")) == expected
    assert kernels.implementation(CPU) in {"c", "torch"}
