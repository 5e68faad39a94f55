"""What stays float32, and what frozen weights become."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memsave import LowPrecision, apply_low_precision
from lightning_memsave.techniques.low_precision import Weights, estimate_low_precision
from tests.techniques.low_precision_subjects import (
    DTYPES,
    OPTIMIZERS,
    WITH_CORRECTION,
    every_format,
    factor_of,
    give_gradients,
    lowered,
    network,
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


@pytest.mark.parametrize(
    ("name", "value"), [("format", "fp16"), ("seed", -1), ("initial_scale", 0.0), ("growth_interval", 0)]
)
def test_settings_are_checked(name, value):
    with pytest.raises(ValueError, match=r"`precision` must be one of 'bf16-sr'|`LowPrecision." + name):
        LowPrecision(**{name: value})


def test_shorthands():
    assert LowPrecision.from_shorthand(True) == LowPrecision.from_shorthand("bf16-sr") == LowPrecision()
    assert LowPrecision.from_shorthand("bf16+8").format == "bf16+8"


def test_an_optimizer_of_all_parameters_is_refused_and_nothing_changed():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match="`precision` needs an optimizer that steps each parameter by itself"):
        apply_low_precision(model, optimizer, LowPrecision(format="bf16+8"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert list(model.buffers()) == []


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
    assert not model[0].weight.requires_grad
    assert sum(t.nbytes for t in (*model.parameters(), *model.buffers())) == estimate
    rounded = before["0.weight"].to(DTYPES[weight_format])
    assert torch.equal(model[0].weight, rounded)
    assert torch.equal(model.state_dict()["0.weight"], rounded)
    give_gradients(model[3], 0, factor_of(optimizer))
    optimizer.step()
    assert torch.equal(model[0].weight, rounded)
    assert model[0].weight not in optimizer.state
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
        model[0].weight.grad = torch.full((64, 64), 0.001).to(DTYPES[weight_format]) * factor_of(optimizer)
        optimizer.step()
    plain = torch.zeros(1, requires_grad=True)
    reference = OPTIMIZERS["SGD"]([plain])
    for _ in range(50):
        plain.grad = torch.full((1,), 0.001)
        reference.step()
    assert float((whole(model[0]) - before).mean()) == pytest.approx(plain.item(), rel=0.15)
    assert whole(model[0]).dtype == torch.float32
