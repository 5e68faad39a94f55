"""An optimizer that was changed before: what it is, what may replace it, and what a report says of it."""

from __future__ import annotations

from dataclasses import replace

import bitsandbytes
import pytest
import torch

from lightning_memsave import LowPrecision, apply_low_precision
from lightning_memsave.core.errors import NoEffectWarning
from lightning_memsave.techniques.optimizer_state import (
    OptimizerState,
    apply_optimizer_state,
    estimate_optimizer_state,
    is_8bit,
    reapply,
)
from lightning_memsave.techniques.optimizer_state.quantized import is_quantized

from .optimizer_state_subjects import (
    ALL,
    CONFIG,
    FORMATS,
    PLAIN,
    big_model,
    bytes_held,
    run_steps,
    trained_8bit,
)


@pytest.mark.parametrize("first", ["8bit", "fp8", "offload", "bitsandbytes"])
def test_another_format_replaces_an_earlier_one(first):
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    config = OptimizerState(backend="bitsandbytes", **ALL) if first == "bitsandbytes" else FORMATS[first]
    apply_optimizer_state(optimizer, config, model)
    run_steps(model, optimizer, range(3))
    applied = apply_optimizer_state(optimizer, FORMATS["4bit"], model)
    assert "4-bit" in applied.summary
    run_steps(model, optimizer, range(3, 4))
    estimate = estimate_optimizer_state(PLAIN["AdamW"](model.parameters()), FORMATS["4bit"], model)
    assert bytes_held(optimizer) == estimate
    assert all(float(state["step"]) == 4 for state in optimizer.state.values())
    applied.undo()
    assert type(optimizer) is torch.optim.AdamW


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_earlier_format_is_undone_with_the_one_that_replaced_it(order):
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    applied = [apply_optimizer_state(optimizer, FORMATS[name], model) for name in ("8bit", "4bit")]
    for number in order:
        applied[number].undo()
    assert type(optimizer) is torch.optim.AdamW


def test_a_setting_is_replaced_as_a_format_is():
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    apply_optimizer_state(optimizer, FORMATS["8bit"], model)
    run_steps(model, optimizer, range(1))
    kept = replace(FORMATS["8bit"], keep_32bit="0")
    apply_optimizer_state(optimizer, kept, model)
    run_steps(model, optimizer, range(1, 2))
    assert isinstance(optimizer.state[model[0].weight]["exp_avg"], torch.Tensor)
    released = apply_optimizer_state(optimizer, OptimizerState(first_moment="32bit", gradients="release"), model)
    assert type(optimizer) is torch.optim.AdamW
    assert released.loss_class == "exact"


def test_what_stands_on_a_format_is_not_pulled_away():
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    apply_optimizer_state(optimizer, replace(FORMATS["8bit"], gradients="into-state"), model)
    with pytest.raises(ValueError, match="while its gradients end in backward"):
        apply_optimizer_state(optimizer, FORMATS["4bit"], model)
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    apply_optimizer_state(sgd, FORMATS["8bit"], model)
    with pytest.raises(ValueError, match="first and second moments"):
        apply_optimizer_state(sgd, FORMATS["factored"], model)
    assert is_quantized(sgd)


def test_apply_twice_warns_and_does_nothing():
    model, optimizer, _ = trained_8bit("AdamW")
    state = {p: dict(s) for p, s in optimizer.state.items()}
    with pytest.warns(NoEffectWarning, match="low-bit"):
        applied = apply_optimizer_state(optimizer, CONFIG, model)
    assert applied.loss_class == "changed"  # what it was before stays low-bit
    applied.undo()
    assert is_8bit(optimizer)
    assert all(optimizer.state[p][k] is v for p, s in state.items() for k, v in s.items())


def test_bitsandbytes_own_optimizers_are_left_alone():
    model = big_model()
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    with pytest.warns(NoEffectWarning, match="AdamW8bit is a low-bit"):
        apply_optimizer_state(optimizer, CONFIG, model)
    assert type(optimizer) is bitsandbytes.optim.AdamW8bit


def test_what_was_changed_here_is_told_from_what_was_not():
    made = {
        "plain": torch.optim.AdamW(big_model().parameters()),
        "bitsandbytes' own": bitsandbytes.optim.AdamW8bit(big_model().parameters()),
    }
    for name in ("8bit", "offload", "lowrank", "bitsandbytes"):
        model = big_model()
        made[name] = torch.optim.AdamW(model.parameters())
        config = OptimizerState(backend="bitsandbytes") if name == "bitsandbytes" else FORMATS[name]
        apply_optimizer_state(made[name], config, model)
    found = {name: (reapply.is_ours(each), reapply.is_low_bit(each)) for name, each in made.items()}
    assert found == {
        "plain": (False, False),
        "bitsandbytes' own": (False, True),
        **dict.fromkeys(("8bit", "offload", "lowrank", "bitsandbytes"), (True, True)),
    }
    formats = {name: reapply.format_of(each) for name, each in made.items() if reapply.is_ours(each)}
    assert formats == {"8bit": "8bit", "offload": "offload", "lowrank": "lowrank", "bitsandbytes": "8bit"}


@pytest.mark.parametrize("name", ["8bit", "bitsandbytes"])
def test_a_view_of_the_plain_class_shares_groups_and_state(name):
    model, plain = big_model(), None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    assert reapply.as_plain(optimizer) is optimizer
    config = OptimizerState(backend="bitsandbytes") if name == "bitsandbytes" else FORMATS[name]
    apply_optimizer_state(optimizer, config, model)
    run_steps(model, optimizer, range(1))
    plain = reapply.as_plain(optimizer)
    assert type(plain) is torch.optim.AdamW
    assert plain.param_groups is optimizer.param_groups
    assert plain.state is optimizer.state
    assert reapply.is_ours(optimizer)
    assert not reapply.is_ours(plain)


def test_one_that_is_as_asked_is_left_as_it_is():
    model = big_model()
    optimizer = torch.optim.AdamW(model.parameters())
    apply_optimizer_state(optimizer, FORMATS["lowrank"], model)
    asked = [FORMATS["lowrank"], replace(FORMATS["lowrank"], rank=8), FORMATS["apollo"], FORMATS["8bit"]]
    kept = reapply.memory(optimizer).kept
    found = [reapply.is_as_asked(optimizer, config, kept, uses_bitsandbytes=False) for config in asked]
    assert found == [True, False, False, False]
    assert not reapply.is_as_asked(optimizer, asked[0], kept | {model[0].weight}, uses_bitsandbytes=False)
    assert not reapply.is_as_asked(optimizer, asked[0], kept, uses_bitsandbytes=True)
    assert reapply.is_as_asked(optimizer, asked[0], kept | {torch.zeros(1)}, uses_bitsandbytes=False)


@pytest.mark.parametrize("name", ["8bit", "factored", "bitsandbytes"])
def test_who_leaves_a_format_is_plain_with_the_moments_that_it_had(name):
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    config = OptimizerState(backend="bitsandbytes") if name == "bitsandbytes" else FORMATS[name]
    apply_optimizer_state(optimizer, config, model)
    run_steps(model, optimizer, range(3))
    moments = optimizer.state_dict()["state"]  # in float32
    reapply.leave(optimizer)
    assert type(optimizer) is torch.optim.AdamW
    for number, p in enumerate(model.parameters()):
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[p][moment], moments[number][moment])


def test_what_lies_beneath_16_bit_weights_is_not_replaced():
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    apply_optimizer_state(optimizer, FORMATS["8bit"], model)
    apply_low_precision(model, optimizer, LowPrecision())
    with pytest.raises(ValueError, match=r"of 16-bit weights, got '4bit instead of 8bit'"):
        reapply.check_replaceable(optimizer, FORMATS["4bit"])


def test_a_report_of_what_an_earlier_fit_left():
    model = big_model()
    optimizer = PLAIN["AdamW"](model.parameters())
    assert reapply.inherited(optimizer, was_asked=False).loss_class == "exact"
    apply_optimizer_state(optimizer, FORMATS["offload"], model)
    assert reapply.inherited(optimizer, was_asked=False).loss_class == "exact"
    apply_optimizer_state(optimizer, FORMATS["8bit"], model)
    assert reapply.inherited(optimizer, was_asked=False).loss_class == "changed"
    with pytest.warns(NoEffectWarning, match="is a low-bit optimizer already"):
        reapply.inherited(optimizer, was_asked=True)
