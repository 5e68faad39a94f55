import bitsandbytes.functional as bnb
import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from lightning_memsave.numerics.blockwise import (
    BLOCK_SIZE,
    blockwise_absmax,
    dequantize_blockwise,
    num_blocks,
    quantize_blockwise,
)

MAPS = {"signed": bnb.create_dynamic_map(signed=True), "unsigned": bnb.create_dynamic_map(signed=False)}
SHAPES = st.one_of(
    st.sampled_from([(), (0,), (0, 3), (1,), (255,), (256,), (257,), (512,), (513,)]),
    st.lists(st.integers(1, 13), min_size=1, max_size=3).map(tuple),
)
SEEDS = st.integers(0, 2**31)
fast = settings(max_examples=60, deadline=None, derandomize=True)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def draw_values(shape, seed, map_name, scale=1.0):
    values = torch.randn(shape, generator=generator(seed))
    return (values if map_name == "signed" else values.square()) * scale


@pytest.mark.parametrize(("elements", "blocks"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (512, 2), (513, 3)])
def test_num_blocks(elements, blocks):
    assert num_blocks(elements) == blocks


@pytest.mark.parametrize("map_name", MAPS)
def test_maps_are_what_the_code_assumes(map_name):
    code_map = MAPS[map_name]
    assert code_map.shape == (256,)
    assert bool((code_map.diff() > 0).all())
    assert code_map.abs().max() == 1.0
    assert (code_map == 0).sum() == 1


@fast
@given(shape=SHAPES, seed=SEEDS)
def test_absmax_is_the_largest_magnitude_of_each_block(shape, seed):
    values = draw_values(shape, seed, "signed")
    flat = values.flatten().tolist()
    expected = [max(map(abs, flat[i : i + BLOCK_SIZE])) for i in range(0, len(flat), BLOCK_SIZE)]
    found = blockwise_absmax(values)
    assert found.dtype == torch.float32
    assert found.tolist() == expected


@pytest.mark.parametrize("map_name", MAPS)
@fast
@given(seed=SEEDS, exponents=st.lists(st.integers(-28, 30), min_size=1, max_size=4))
def test_every_code_survives_dequantize_then_quantize(map_name, seed, exponents):
    # One block per absmax, and every block holds all 256 codes in an order of its own.
    random = generator(seed)
    codes = torch.stack([torch.randperm(256, generator=random) for _ in exponents]).to(torch.uint8)
    absmax = (1 + torch.rand(len(exponents), generator=random)) * torch.tensor([10.0**e for e in exponents])
    values = dequantize_blockwise(codes, MAPS[map_name], absmax)
    again, scales = quantize_blockwise(values, MAPS[map_name], absmax)
    assert torch.equal(again, codes)
    assert torch.equal(scales, absmax)


@pytest.mark.parametrize("map_name", MAPS)
@fast
@given(shape=SHAPES, seed=SEEDS, exponent=st.integers(-20, 20))
def test_shapes_and_dtypes(map_name, shape, seed, exponent):
    values = draw_values(shape, seed, map_name, 10.0**exponent)
    codes, absmax = quantize_blockwise(values, MAPS[map_name])
    restored = dequantize_blockwise(codes, MAPS[map_name], absmax)
    assert (codes.shape, codes.dtype) == (values.shape, torch.uint8)
    assert (absmax.shape, absmax.dtype) == ((num_blocks(values.numel()),), torch.float32)
    assert (restored.shape, restored.dtype) == (values.shape, torch.float32)


@pytest.mark.parametrize("map_name", MAPS)
@fast
@given(shape=SHAPES, seed=SEEDS, exponent=st.integers(-10, 10))
def test_rounds_to_the_nearest(map_name, shape, seed, exponent):
    values = draw_values(shape, seed, map_name, 10.0**exponent)
    codes, absmax = quantize_blockwise(values, MAPS[map_name])
    code_map = MAPS[map_name].double()
    for i, (value, code) in enumerate(zip(values.double().flatten(), codes.flatten().int(), strict=True)):
        unit = value / absmax[i // BLOCK_SIZE].double()
        distances = (code_map - unit).abs()
        # Within float32 rounding of a midpoint either neighbour is the nearest.
        assert distances[code] <= distances[distances.argmin()] + 1.2e-7 * unit.abs()


@pytest.mark.parametrize("map_name", MAPS)
@fast
@given(shape=SHAPES, seed=SEEDS, exponent=st.integers(-20, 20))
def test_requantising_with_the_same_absmax_changes_nothing(map_name, shape, seed, exponent):
    values = draw_values(shape, seed, map_name, 10.0**exponent)
    codes, absmax = quantize_blockwise(values, MAPS[map_name])
    once = dequantize_blockwise(codes, MAPS[map_name], absmax)
    again, scales = quantize_blockwise(once, MAPS[map_name], absmax)
    assert torch.equal(again, codes)
    assert torch.equal(dequantize_blockwise(again, MAPS[map_name], scales), once)


def test_without_the_absmax_requantising_drifts():
    # The signed map ends at 1 but starts above -1: why checkpoints carry the absmax.
    values = -torch.linspace(0.01, 1, 256)
    codes, absmax = quantize_blockwise(values, MAPS["signed"])
    once = dequantize_blockwise(codes, MAPS["signed"], absmax)
    twice = dequantize_blockwise(*_with_map(quantize_blockwise(once, MAPS["signed"])))
    thrice = dequantize_blockwise(*_with_map(quantize_blockwise(once, MAPS["signed"], absmax)))
    assert not torch.equal(twice, once)
    assert torch.equal(thrice, once)


def _with_map(quantized):
    codes, absmax = quantized
    return codes, MAPS["signed"], absmax


@pytest.mark.parametrize("map_name", MAPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@fast
@given(shape=SHAPES, seed=SEEDS)
def test_other_dtypes_count_as_their_float32_values(map_name, dtype, shape, seed):
    values = draw_values(shape, seed, map_name).to(dtype)
    codes, absmax = quantize_blockwise(values, MAPS[map_name])
    expected_codes, expected_absmax = quantize_blockwise(values.float(), MAPS[map_name])
    assert absmax.dtype == torch.float32
    assert torch.equal(codes, expected_codes)
    assert torch.equal(absmax, expected_absmax)


@pytest.mark.parametrize("map_name", MAPS)
def test_a_block_of_zeros_stays_zero(map_name):
    values = torch.cat([torch.zeros(256), torch.ones(3)])
    codes, absmax = quantize_blockwise(values, MAPS[map_name])
    assert absmax.tolist() == [0.0, 1.0]
    assert torch.equal(dequantize_blockwise(codes, MAPS[map_name], absmax), values)


@pytest.mark.parametrize("shape", [(7,), (256,), (3, 257), (16, 256)])
@pytest.mark.parametrize("map_name", MAPS)
def test_dequantizes_as_bitsandbytes_does(map_name, shape):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    absmax = torch.rand(num_blocks(codes.numel())) + 0.1
    theirs = torch.ops.bitsandbytes.dequantize_blockwise(codes, absmax, MAPS[map_name], BLOCK_SIZE, torch.float32)
    assert torch.equal(dequantize_blockwise(codes, MAPS[map_name], absmax), theirs)


def test_views_are_read_in_logical_order():
    values = torch.randn(40, 30).t()
    codes, absmax = quantize_blockwise(values, MAPS["signed"])
    expected_codes, expected_absmax = quantize_blockwise(values.contiguous(), MAPS["signed"])
    assert torch.equal(codes, expected_codes)
    assert torch.equal(absmax, expected_absmax)


def test_neither_direction_writes_to_its_inputs():
    values, code_map = torch.randn(300, requires_grad=True), MAPS["signed"].clone()
    before = values.detach().clone()
    codes, absmax = quantize_blockwise(values, code_map)
    kept = codes.clone(), absmax.clone()
    dequantize_blockwise(codes, code_map, absmax)
    assert torch.equal(values, before)
    assert torch.equal(code_map, MAPS["signed"])
    assert torch.equal(codes, kept[0])
    assert torch.equal(absmax, kept[1])
    assert not codes.requires_grad
