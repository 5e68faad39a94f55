"""Steps in Triton against plain torch: on a GPU, or on the CPU with Triton installed and `TRITON_INTERPRET=1`."""

import os

import pytest
import torch
from torch import nn

from lightning_memsave import LowPrecision, OptimizerState, apply_low_precision, apply_optimizer_state
from lightning_memsave.numerics import blockwise, master_weights, rounding
from lightning_memsave.numerics.kernels.coded_step import Rule, ShortWeights
from lightning_memsave.techniques.optimizer_state import fused_step, moment_codecs, quantized

triton_coded_step = pytest.importorskip("lightning_memsave.numerics.kernels.triton_coded_step", reason="needs triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device or TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy's, about division by zero
if not INTERPRETED:
    pytestmark += [pytest.mark.gpu, pytest.mark.kernels]
SHIFT = 0x9E3779B9
MAPS = {4: moment_codecs._IN_4BIT, 8: moment_codecs._IN_8BIT}
RULES = {
    "AdamW": {"shrink": 0.999, "take": 0.1, "keep_second": 0.99, "take_second": 0.01, "root_correction": 0.3,
              "eps": 1e-8, "step": -1e-2},
    "Adam, decay": {"shrink": 1.0, "decay": 0.05, "take": 0.2, "keep_second": 0.9, "take_second": 0.1,
                    "root_correction": 0.9, "eps": 1e-3, "step": -1e-2},
    "SGD": {"keep": 0.9, "take": 1.0, "step": -0.1},
    "SGD, nesterov, decay": {"keep": 0.8, "take": 0.7, "decay": 0.01, "step": -0.1, "has_nesterov": 1},
}  # fmt: skip


def in_torch(rule, p, gradient, moments):
    """The weights and the moments, each product and sum on its own; some square roots of torch are a bit off."""
    first, *second = (blockwise.dequantize_from_map(m.codes, m.code_map, m.absmax, m.bits, p.numel()) for m in moments)
    gradient = gradient.float()
    if second:
        p = p * rule.shrink
        gradient = gradient + rule.decay * p if rule.decay else gradient
        first = first + rule.take * (gradient - first)
        second = second[0] * rule.keep_second + rule.take_second * gradient * gradient
        # On CUDA torch multiplies by the reciprocal of a number that it divides by, but not of a tensor.
        root_correction = torch.full((1,), rule.root_correction, device=DEVICE)
        p = p + rule.step * first / (second.double().sqrt().float() / root_correction + rule.eps)
        found = [first, second]
    else:
        gradient = gradient + rule.decay * p if rule.decay else gradient
        first = first * rule.keep + rule.take * gradient
        p = p + rule.step * (gradient + rule.keep * first if rule.has_nesterov else first)
        found = [first]
    coded = [
        blockwise.quantize_to_map(value, m.code_map, m.bits, m.seed, SHIFT)
        for value, m in zip(found, moments, strict=True)
    ]
    return p, coded


def moments_of(size, bits, is_adam):
    found = []
    for number, code in enumerate(MAPS[bits][: 1 + is_adam]):
        values, code_map = torch.randn(size, device=DEVICE) * 1e-2, code.code_map.to(DEVICE)
        values = values.square() if number else values
        codes, absmax = blockwise.quantize_to_map(values, code_map, bits, 5, 0)
        found.append(triton_coded_step.CodedMoment(codes, absmax, code_map, bits, 77 + number))
    return found


@pytest.mark.parametrize("size", [1, 255, 256, 1025, 3000])
@pytest.mark.parametrize("kind", ["float32", "short gradient", "rounded", "corrected"])
@pytest.mark.parametrize("bits", MAPS)
@pytest.mark.parametrize("name", RULES)
def test_a_step_has_the_bits_of_torch(name, bits, kind, size):
    rule = Rule(shift=SHIFT, **RULES[name])
    moments = moments_of(size, bits, "Adam" in name)
    p = nn.Parameter(torch.randn(size, device=DEVICE))
    short, whole = None, p.detach().clone()
    if kind == "rounded":
        p.data, short = p.data.bfloat16(), ShortWeights(None, 123)
        whole = p.detach().float()
    elif kind == "corrected":
        values, correction = master_weights.split(whole, torch.int8)
        p.data, short = values, ShortWeights(correction, 0)
        whole = master_weights.join(values, correction)
    if kind == "float32" or (INTERPRETED and kind != "float32"):  # the interpreter reads bfloat16 as others do
        gradient = torch.randn(size, device=DEVICE).to(p.dtype)
    else:
        gradient = torch.randn(size, device=DEVICE).bfloat16()
    if p.dtype != gradient.dtype:
        p.grad_dtype = gradient.dtype
    p.grad = gradient
    expected, coded = in_torch(rule, whole, gradient, moments)
    triton_coded_step.step(rule, p, moments, short)
    for moment, (codes, absmax) in zip(moments, coded, strict=True):
        assert torch.equal(moment.absmax, absmax)
        assert torch.equal(moment.codes, codes)
    if short is None:
        assert torch.equal(p, expected)
    elif kind == "rounded":
        assert torch.equal(p, rounding.round_to_bfloat16(expected, 123))
    else:
        values, correction = master_weights.split(expected, torch.int8)
        assert torch.equal(p, values)
        assert torch.equal(short.correction, correction)


@pytest.mark.kernels
@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs compiled kernels")
@pytest.mark.parametrize("precision", [None, "bf16-sr", "bf16+8"])
@pytest.mark.parametrize("state", ["8bit", "4bit"])
def test_an_optimizer_uses_it_and_is_near_the_general_way(state, precision, monkeypatch):
    called, found = [], []
    on_cuda = fused_step._step_on_cuda
    monkeypatch.setattr(fused_step, "_step_on_cuda", lambda *a: (called.append(1), on_cuda(*a)))
    for is_fused in (True, False):
        torch.manual_seed(0)
        model = nn.ParameterList(nn.Parameter(torch.randn(shape, device=DEVICE)) for shape in ((300, 17), (64, 64)))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
        apply_optimizer_state(
            optimizer,
            OptimizerState(first_moment=state, min_size=0, **{"backend": "own"} if state == "8bit" else {}),
            model,
        )
        if precision is not None:
            apply_low_precision(model, optimizer, LowPrecision(format=precision))
        with monkeypatch.context() as patch:
            if not is_fused:
                patch.setattr(quantized, "step_fused", lambda o, m, g, parameters, *_: list(parameters))
            for _ in range(5):
                for p in model:
                    p.grad = torch.randn_like(p)
                optimizer.step()
        found.append(torch.cat([p.detach().float().view(-1) for p in model]))
    assert len(called) == 4  # the first step makes the state
    assert float((found[0] - found[1]).norm() / found[1].norm()) < (1e-4 if precision is None else 4e-3)
