"""Weights in 16 bits: what stays float32, what is read and written whole, and what frozen ones become."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memsave import LowPrecision, apply_low_precision
from lightning_memsave.techniques.low_precision import Weights, estimate_low_precision
from lightning_memsave.techniques.low_precision.weights import parameters_kept_32bit
from tests.techniques.low_precision_subjects import (
    DTYPES,
    FORMATS,
    OPTIMIZERS,
    WITH_CORRECTION,
    error_of,
    every_format,
    factor_of,
    give_gradients,
    lowered,
    network,
    parameter,
    run,
    whole,
)


# ------------------------------------------------------------------------------- what stays float32
@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ((), {"1.weight", "1.bias"}),
        ("3", {"1.weight", "1.bias", "3.weight", "3.bias"}),
        (nn.Linear, None),
        ([nn.LayerNorm], {"1.weight", "1.bias"}),
        (("Lin*",), None),
    ],
)
def test_modules_that_stay_float32(keep, kept):
    model = network()
    config = LowPrecision(keep_32bit=keep)
    assert hash(config) is not None
    if kept is None:
        with pytest.raises(ValueError, match="`precision` needs float32 parameters"):
            Weights(model, config.format, config.keep_32bit, 0)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        return
    Weights(model, config.format, config.keep_32bit, 0)
    assert {name for name, p in model.named_parameters() if p.dtype == torch.float32} == kept


def test_a_selector_that_matches_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"LowPrecision.keep_32bit. must match a module, got 'Conv\*'"):
        lowered(keep_32bit=("Conv*",))


@pytest.mark.parametrize("weight_format", WITH_CORRECTION)
def test_a_part_of_the_model_writes_and_reads_whole_weights_too(weight_format):
    model, optimizer, _ = lowered(weight_format)
    run(model, optimizer, range(3))
    part, everything = model[0].state_dict(), model.state_dict()
    assert part["weight"].dtype == torch.float32
    assert torch.equal(part["weight"], everything["0.weight"])
    second, _, _ = lowered(weight_format)
    second[0].load_state_dict(part)
    assert torch.equal(second.state_dict()["0.weight"], part["weight"])


@pytest.mark.parametrize("weight_format", WITH_CORRECTION)
def test_tied_weights_are_whole_under_both_names(weight_format):
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    _, optimizer, _ = lowered(weight_format, model=model)
    run(model, optimizer, range(3))
    saved = model.state_dict()
    assert torch.equal(saved["a.weight"], saved["b.weight"])
    assert torch.equal(model["b"].state_dict()["weight"], saved["a.weight"])
    assert not torch.equal(saved["a.weight"], saved["a.weight"].bfloat16().float())
    copied = copy.deepcopy(model)
    run(model, optimizer, range(3, 4))
    assert torch.equal(copied.state_dict()["b.weight"], saved["b.weight"])


@pytest.mark.parametrize("weight_format", WITH_CORRECTION)
def test_a_parameter_with_two_names_in_one_module_is_whole_under_both(weight_format):
    model = nn.Linear(8, 8)
    model.again = model.weight
    _, optimizer, _ = lowered(weight_format, model=model)
    run(model, optimizer, range(3))
    saved = model.state_dict()
    assert torch.equal(saved["weight"], saved["again"])
    assert not torch.equal(saved["weight"], saved["weight"].bfloat16().float())


# ------------------------------------------------------------------------------- frozen weights
@every_format
def test_frozen_weights_are_lowered_when_asked(weight_format):
    model = network()
    model[0].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = LowPrecision(format=weight_format, lower_frozen=True)
    estimate = estimate_low_precision(model, config)
    optimizer = OPTIMIZERS["AdamW"](list(model.parameters()))
    applied = apply_low_precision(model, optimizer, config)
    assert model[0].weight.dtype == DTYPES[weight_format]
    assert not parameter(model[0]).requires_grad
    assert sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())) == estimate
    rounded = model[0].weight.detach().clone()
    if weight_format == "int8-sr":
        assert (rounded - before["0.weight"]).abs().max() <= error_of(weight_format, before["0.weight"]) / 2
    else:
        assert torch.equal(rounded, before["0.weight"].to(DTYPES[weight_format]))
    assert torch.equal(model.state_dict()["0.weight"], rounded)
    give_gradients(model[3], 0, factor_of(optimizer))
    optimizer.step()
    assert torch.equal(model[0].weight, rounded)
    assert parameter(model[0]) not in optimizer.state
    applied.undo()
    assert torch.equal(model[0].weight, rounded.float())


@every_format
def test_a_lowered_weight_that_is_unfrozen_later_trains(weight_format):
    model = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(4, 4)])
    model[0].requires_grad_(False)
    _, optimizer, _ = lowered(weight_format, "SGD", model, lower_frozen=True)
    model[0].requires_grad_(True)
    before = whole(model[0])
    for _ in range(50):  # each step below what 16 bits show
        parameter(model[0]).grad = torch.full((64, 64), 0.001).to(DTYPES[weight_format]) * factor_of(optimizer)
        optimizer.step()
    plain = torch.zeros(1, requires_grad=True)
    reference = OPTIMIZERS["SGD"]([plain])
    for _ in range(50):
        plain.grad = torch.full((1,), 0.001)
        reference.step()
    assert float((whole(model[0]) - before).mean()) == pytest.approx(plain.item(), rel=0.15)


# ------------------------------------------------------------------------------- by themselves
def kept_names(model, keep=()):
    kept = parameters_kept_32bit(model, keep)
    return {name for name, p in model.named_parameters() if p in kept}


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)


def test_vectors_that_stand_by_themselves_stay_float32():
    model = nn.Sequential(Scaled(), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Embedding(3, 3))
    assert kept_names(model) == {"0.scale", "1.weight", "1.bias"}
    assert kept_names(model, ("2",)) == {"0.scale", "1.weight", "1.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("weight_format", FORMATS)
def test_weights_are_as_near_as_their_format(weight_format):
    model = nn.Linear(64, 64)
    exact = model.weight.detach().clone()
    weights = Weights(model, weight_format, (), 0)
    assert set(weights) == set(model.parameters())
    assert parameter(model) in weights
    assert exact not in weights
    error = (weights.whole(parameter(model)) - exact).abs()
    assert (error <= error_of(weight_format, exact) + 1e-7).all()
    assert error.any(), "float32 does not fit"


@pytest.mark.parametrize("weight_format", WITH_CORRECTION)
def test_what_was_written_is_read_again_to_the_bit(weight_format):
    model = nn.Linear(64, 64)
    weights = Weights(model, weight_format, (), 0)
    with torch.no_grad():
        weights.write(model.weight, torch.randn(64, 64), num_steps=1)
        first = weights.whole(model.weight)
        weights.write(model.weight, first, num_steps=2)
    assert torch.equal(weights.whole(model.weight), first)


def test_noise_has_no_side_and_tells_steps_and_draws_apart():
    model = nn.Linear(100, 100)
    weights, value = Weights(model, "bf16-sr", (), 0), torch.full((100, 100), 1 + 2.0**-9)  # a quarter of a step
    rounded = [weights.rounded(model.weight, value, n, draw).float() for n in range(10) for draw in (0, 1)]
    assert all(set(each.unique().tolist()) == {1.0, 1 + 2.0**-7} for each in rounded)
    up = torch.stack([each > 1 for each in rounded]).double()
    assert abs(float(up.mean()) - 0.25) < 4 * (0.25 * 0.75 / up.numel()) ** 0.5
    assert not any(torch.equal(a, b) for i, a in enumerate(rounded) for b in rounded[:i])
    assert torch.equal(weights.rounded(model.weight, value, 0).float(), rounded[0])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_model_has_its_dtypes_and_buffers_back(weight_format):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8).bfloat16())
    names = [name for name, _ in model.named_buffers()]
    weights = Weights(model, weight_format, (), 0)
    parameter(model[0]).grad = torch.ones(8, 8, dtype=DTYPES[weight_format])
    whole_before = weights.whole(parameter(model[0]))
    weights.restore()
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 4 + [torch.bfloat16] * 2
    assert [name for name, _ in model.named_buffers()] == names
    assert torch.equal(model[0].weight, whole_before)
    assert torch.equal(model[0].weight.grad, torch.ones(8, 8))
    assert list(weights) == []
    assert {key: value.dtype for key, value in model[0].state_dict().items()} == {
        "weight": torch.float32,
        "bias": torch.float32,
    }


def test_weights_beyond_float16_are_refused_by_name():
    for value in (7e4, float("inf"), float("nan")):
        model = nn.Sequential(nn.Linear(4, 4))
        with torch.no_grad():
            model[0].weight[1, 2] = -value
        with pytest.raises(ValueError, match=r'65,504 in float16, got .0.weight with .*precision="bf16-sr"'):
            Weights(model, "fp16-scaled", (), 0)
        assert model[0].weight.dtype == torch.float32
    model[0].requires_grad_(False)
    with torch.no_grad():
        model[0].weight[1, 2] = 65504.0
    model[0].requires_grad_(True)
    Weights(model, "fp16-scaled", (), 0)
    assert model[0].weight[1, 2] == 65504.0
