"""LAMB with 8-bit moments against its definition."""

import copy

import pytest
import torch
from torch import nn

from lightning_memsave.techniques.optimizer_state import (
    apply_optimizer_state,
)
from lightning_memsave.techniques.optimizer_state.lamb import lamb_config, lamb_step

from .optimizer_state_subjects import (
    ALL_32BIT,
    CONFIG,
    LAMB,
    big_model,
    flat,
    run_steps,
)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lamb_keeps_the_trust_ratio(weight_decay):
    model = big_model().double()
    reference_model = copy.deepcopy(model)
    model.float()
    with torch.no_grad():
        for p in (*model.parameters(), *reference_model.parameters()):
            p.mul_(7)  # far from 1, so that a missing ratio is a large error
    reference = LAMB(reference_model.parameters(), lr=1e-2, weight_decay=weight_decay)
    ours = LAMB(model.parameters(), lr=1e-2, weight_decay=weight_decay)
    apply_optimizer_state(ours, ALL_32BIT, model)
    start = flat(reference_model)
    expected, found = run_steps(reference_model, reference, range(10)), run_steps(model, ours, range(10))
    assert (found - expected).norm() / (expected - start).norm() < 1e-4


def test_lamb_takes_a_zero_parameter_and_a_zero_gradient():
    model = nn.Linear(80, 64)
    with torch.no_grad():
        model.weight.zero_()
    optimizer = LAMB(model.parameters(), lr=0.1)
    apply_optimizer_state(optimizer, CONFIG, model)
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.zeros_like(model.bias)
    bias = model.bias.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full_like(model.weight, -0.1))  # ratio 1
    assert torch.equal(model.bias.detach(), bias)


def test_lamb_takes_adams_kernels():
    """CUDA has none of 8 bits under LAMB's name."""
    model = big_model()
    optimizer = LAMB(model.parameters())
    apply_optimizer_state(optimizer, CONFIG, model)
    assert optimizer.optimizer_name == "adam"


def test_a_bare_step_is_asked_for_whatever_the_group_says():
    config = lamb_config(lambda self, gindex, pindex, group: {"lr": 0.1, "weight_decay": 0.3, "eps": 1e-6})
    assert config(None, 0, 0, {}) == {"lr": 1.0, "weight_decay": 0.0, "eps": 1e-6}


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_a_step_has_the_length_of_the_parameter_times_the_rate(weight_decay):
    """The ratio of the norms: |step| = lr |p|, whatever the size of the direction."""

    def step_of_adam(self, group, p, gindex, pindex):
        p.sub_(direction)  # at size one

    p, direction = nn.Parameter(torch.randn(50)), 1000 * torch.randn(50)
    before = p.detach().double()
    lamb_step(step_of_adam)(None, {"lr": 0.01, "weight_decay": weight_decay}, p, 0, 0)
    update = direction.double() + weight_decay * before
    expected = before - 0.01 * before.norm() / update.norm() * update
    torch.testing.assert_close(p.detach().double(), expected, rtol=1e-5, atol=1e-7)
    assert float((p.detach().double() - before).norm() / before.norm()) == pytest.approx(0.01, rel=1e-4)


def test_a_parameter_or_a_direction_of_zeros_has_the_ratio_one():
    p = nn.Parameter(torch.zeros(4))
    lamb_step(lambda self, group, p, *_: p.sub_(2.0))(None, {"lr": 0.1, "weight_decay": 0.5}, p, 0, 0)
    assert p.tolist() == pytest.approx([-0.2] * 4)
    p = nn.Parameter(torch.ones(4))
    lamb_step(lambda self, group, p, *_: None)(None, {"lr": 0.1, "weight_decay": 0.0}, p, 0, 0)
    assert p.tolist() == [1.0] * 4


def test_bfloat16_weights_are_rounded_once():
    p = nn.Parameter(torch.tensor([1.0, 2.0, -3.0]).bfloat16())
    before = p.detach().double()
    lamb_step(lambda self, group, p, *_: p.sub_(1.0))(None, {"lr": 0.01, "weight_decay": 0.0}, p, 0, 0)
    expected = before - 0.01 * before.norm() / 3**0.5
    assert torch.equal(p.detach(), expected.bfloat16())
