"""Stochastic rounding to a map, blockwise."""

from __future__ import annotations

import pytest
import torch

from lightning_memsave.numerics import blockwise
from lightning_memsave.numerics.blockwise import dequantize_blockwise, quantize_blockwise, quantize_stochastically
from lightning_memsave.numerics.kernels import native
from lightning_memsave.techniques.optimizer_state.moment_codecs import CODECS

_SIGNED, _POSITIVE = (codec.code_map for codec in CODECS["4bit"])

maps = pytest.mark.parametrize(("code_map", "largest_gap"), [(_SIGNED, 0.2654), (_POSITIVE, 0.1211)])


def samples(code_map, size=3000):
    x = torch.randn(size) * torch.exp(torch.randn(size))
    return x if code_map[0] < 0 else x.abs() + 1e-6


@maps
def test_the_error_is_below_the_written_bound(code_map, largest_gap):
    x = samples(code_map)
    for codes, absmax in (quantize_stochastically(x, code_map, 3), quantize_blockwise(x, code_map)):
        assert codes.max() < 16
        error = (dequantize_blockwise(codes, code_map, absmax) - x).abs() / absmax.repeat_interleave(256)[:3000]
        assert float(error.max()) <= largest_gap
    assert float((code_map[1:] - code_map[:-1]).max()) == pytest.approx(largest_gap, abs=1e-4)


@maps
def test_it_is_unbiased_above_the_lowest_value(code_map, largest_gap):
    x = samples(code_map, 512)
    x[0] = x[256] = 3 * x.abs().max()
    scale = x[0]
    x = torch.where(x.abs() < scale / 256, scale / 256, x)  # the second moment's lowest value
    draws = torch.stack(
        [dequantize_blockwise(*((q := quantize_stochastically(x, code_map, s))[0], code_map, q[1])) for s in range(600)]
    )
    error = (draws.double().mean(0) - x) / scale
    assert float(error.abs().max()) < 6 * largest_gap / 2 / 600**0.5
    assert abs(float(error.mean())) < 4 * largest_gap / 2 / (600 * 512) ** 0.5
    assert draws.std(0).max() > 0


@maps
def test_what_was_decoded_is_found_again_exactly(code_map, largest_gap):
    codes, absmax = quantize_stochastically(samples(code_map), code_map, 1)
    again, scales = quantize_blockwise(dequantize_blockwise(codes, code_map, absmax), code_map)
    assert torch.equal(scales, absmax)
    assert torch.equal(again, codes)


@maps
def test_a_block_of_zeros_stays_zero(code_map, largest_gap):
    codes, absmax = quantize_stochastically(torch.zeros(300), code_map, 1)
    assert torch.equal(dequantize_blockwise(codes, code_map, absmax), torch.zeros(300))


def test_noise_does_not_depend_on_the_chunk():
    from lightning_memsave.numerics import blockwise

    x = torch.randn(2 * blockwise._CHUNK + 5)
    whole, _ = quantize_stochastically(x, _SIGNED, 9)
    tail = x[blockwise._CHUNK :]
    assert not torch.equal(whole[: blockwise._CHUNK], whole[blockwise._CHUNK : 2 * blockwise._CHUNK])
    assert whole[blockwise._CHUNK :].shape == tail.shape


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
@pytest.mark.parametrize("state_format", ["4bit", "5bit-factored", "8bit", "fp8"])
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("size", [1, 5, 7, 8, 255, 256, 257, 3001])
def test_the_kernel_equals_the_reference_bit_for_bit(state_format, number, size):
    codec = CODECS[state_format][number]
    codec = getattr(codec, "otherwise", codec)  # of what has no rows and columns
    torch.manual_seed(size)
    spread = torch.randn(size) * torch.exp(4 * torch.randn(size))
    for x in (spread, torch.zeros(size), spread * 1e-38, spread.bfloat16(), spread.double()):
        values = x if codec.code_map[0] < 0 else x.abs()
        found = native.quantize_to_map(values, codec.code_map, codec.bits, 77, 3 * 2**30)
        expected = blockwise.quantize_to_map(values.float(), codec.code_map, codec.bits, 77, 3 * 2**30)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        decoded = native.dequantize_from_map(found[0], codec.code_map, found[1], codec.bits, size)
        reference = blockwise.dequantize_from_map(*expected[:1], codec.code_map, expected[1], codec.bits, size)
        assert torch.equal(decoded, reference)


@pytest.mark.skipif(native.library() is None, reason="needs a C compiler")
def test_the_kernel_keeps_what_is_not_finite_apart():
    code_map = CODECS["8bit"][0].code_map
    x = torch.randn(600)
    x[300] = torch.nan
    codes, absmax = native.quantize_to_map(x, code_map, 8, 3)
    decoded = native.dequantize_from_map(codes, code_map, absmax, 8, 600)
    assert decoded[256:512].isnan().all()
    assert decoded[:256].isfinite().all()
    assert decoded[512:].isfinite().all()


def test_errors_cancel_when_the_noise_goes_by_the_golden_ratio():
    code_map = CODECS["4bit"][1].code_map

    def wandered(noise):
        """How far a value is from the truth that grows by little steps, less than a code apart."""
        torch.manual_seed(0)
        steps, found, truth = torch.rand(256) / 1000, torch.full((256,), 0.3), torch.full((256,), 0.3)
        found[0] = truth[0] = 1.0
        steps[0] = 0.0
        for step in range(200):
            truth = truth + steps
            codes, absmax = quantize_stochastically(found + steps, code_map, *noise(step))
            found = dequantize_blockwise(codes, code_map, absmax)
        return float((found - truth).square().mean().sqrt())

    assert wandered(lambda step: (7, step * 0x9E3779B9)) < 0.75 * wandered(lambda step: (step, 0))
