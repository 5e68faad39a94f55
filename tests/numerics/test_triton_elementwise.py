"""Triton against the references: on a GPU, or on the CPU with Triton installed and `TRITON_INTERPRET=1`."""

import math
import os

import pytest
import torch

from lightning_memsave.numerics import bits, blockwise, kernels, rounding
from lightning_memsave.techniques.optimizer_state import moment_codecs

triton_elementwise = pytest.importorskip("lightning_memsave.numerics.kernels.triton_elementwise", reason="needs triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, about NaN and division by zero
if not INTERPRETED:
    pytestmark += [pytest.mark.gpu, pytest.mark.kernels]
MAPS = {4: moment_codecs._IN_4BIT, 5: moment_codecs._IN_5BIT, 8: moment_codecs._IN_8BIT}
SIZES = (1, 7, 255, 256, 257, 5000)


def of_all_magnitudes(size, dtype=torch.float32):
    values = torch.randn(size, dtype=torch.float64) * 10.0 ** torch.randint(-44, 38, (size,)).double()
    values[::7] = 0.0
    values[3::11] = -0.0
    return values.float().to(DEVICE, dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1])
@pytest.mark.parametrize("name", ["round_to_bfloat16", "round_to_float16"])
def test_rounding_equals_the_reference(name, seed, size):
    for values in (of_all_magnitudes(size), torch.randn(size, device=DEVICE) * 1e-5):
        found = getattr(triton_elementwise, name)(values, seed)
        expected = getattr(rounding, name)(values, seed)
        assert found.dtype == expected.dtype
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("name", ["round_to_bfloat16", "round_to_float16"])
def test_rounding_keeps_what_is_not_finite(name):
    values = torch.randn(600, device=DEVICE)
    expected = getattr(rounding, name)(values, 3)
    values[[1, 2, 3, 500]] = torch.tensor([math.inf, -math.inf, math.nan, math.inf], device=DEVICE)
    found = getattr(triton_elementwise, name)(values, 3)
    assert found[[1, 2, 500]].tolist() == [math.inf, -math.inf, math.inf]
    assert found[3].isnan()
    kept = values.isfinite()
    assert torch.equal(found[kept], expected[kept])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_masks_equal_the_reference(dtype, size):
    values = of_all_magnitudes(size, dtype)
    values[size // 2] = math.nan
    packed = triton_elementwise.pack_positive(values)
    assert torch.equal(packed, bits.pack_positive(values))
    mask = values > 0
    packed = triton_elementwise.pack_mask(mask)
    assert torch.equal(packed, bits.pack_mask(mask))
    assert torch.equal(triton_elementwise.unpack_mask(packed, size), mask)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_positive", [False, True], ids=["signed", "positive"])
@pytest.mark.parametrize("width", [4, 5, 8])
def test_maps_equal_the_reference(width, is_positive, size):
    code_map = MAPS[width][is_positive].code_map.to(DEVICE)
    values = torch.randn(size, device=DEVICE) * 10.0 ** torch.randint(-12, 3, (size,), device=DEVICE)
    values[::5] = 0.0
    values = values.abs() if is_positive else values
    found = triton_elementwise.quantize_to_map(values, code_map, width, 77, 3 * 2**30)
    expected = blockwise.quantize_to_map(values, code_map, width, 77, 3 * 2**30)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    decoded = triton_elementwise.dequantize_from_map(*(found[0], code_map, found[1], width, size))
    assert torch.equal(decoded, blockwise.dequantize_from_map(*(found[0], code_map, found[1], width, size)))


@pytest.mark.parametrize("width", [4, 8])
def test_a_block_that_is_not_finite_decodes_to_what_is_not(width):
    code_map = MAPS[width][False].code_map.to(DEVICE)
    values = torch.randn(768, device=DEVICE)
    values[300] = math.nan
    codes, absmax = triton_elementwise.quantize_to_map(values, code_map, width, 5)
    decoded = triton_elementwise.dequantize_from_map(codes, code_map, absmax, width, 768)
    assert decoded[256:512].isnan().all()
    assert decoded[:256].isfinite().all()
    assert decoded[512:].isfinite().all()


def test_a_table_is_looked_up_as_in_the_reference():
    values = torch.cat([torch.randn(3000, device=DEVICE) * 5, torch.tensor([math.inf, -math.inf, math.nan]).to(DEVICE)])
    table = torch.randn(300, device=DEVICE)
    found = triton_elementwise.look_up(values.clone(), table, 31.7, 150.3)
    expected = bits.look_up(values.clone(), table, 31.7, 150.3)
    assert torch.equal(found.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.kernels
@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs compiled kernels")
def test_they_are_what_cuda_uses():
    values = torch.randn(1000, device=DEVICE)
    values[0] = math.nan
    assert kernels.round_to_bfloat16(values, 1) is not None
    assert torch.equal(kernels.pack_positive(values).cpu(), kernels.pack_positive(values.cpu()))
