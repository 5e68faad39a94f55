"""GaLore: the subspace, and what passes by it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memsave.techniques.optimizer_state import OptimizerState, apply_optimizer_state, galore
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME

from .optimizer_state_subjects import flat


def test_a_gradient_inside_of_the_subspace_loses_nothing():
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(40, 3)).Q
    models = [nn.Linear(60, 40, bias=False), nn.Linear(60, 40, bias=False)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=0.0) for m in models]
    apply_optimizer_state(optimizers[1], OptimizerState(projection="galore", rank=3, min_size=0), models[1])
    start = flat(models[0])
    for _ in range(6):
        gradient = basis @ torch.randn(3, 60)
        for model, optimizer in zip(models, optimizers, strict=True):
            model.weight.grad = gradient.clone()
            optimizer.step()
    assert optimizers[1].state[models[1].weight]["momentum_buffer"].shape == (3, 60)
    assert (flat(models[1]) - flat(models[0])).norm() < 1e-5 * (flat(models[0]) - start).norm()


@pytest.mark.parametrize("shape", [(40, 60), (60, 40)])
def test_the_subspace_is_that_of_the_singular_vectors(shape):
    torch.manual_seed(0)
    left, right = torch.linalg.qr(torch.randn(shape[0], 40)).Q, torch.linalg.qr(torch.randn(shape[1], 40)).Q
    gradient = left @ torch.diag(0.5 ** torch.arange(40.0)) @ right.T
    found = galore.begin(gradient, 5, 3)
    exact = (left if shape[0] <= shape[1] else right)[:, :5]
    assert torch.allclose(found.T @ found, torch.eye(5), atol=1e-5)
    assert (exact @ exact.T - found @ found.T).norm() < 1e-3


@pytest.mark.parametrize("decoupled", [False, True])
def test_weight_decay_stays_outside_of_the_subspace(decoupled):
    model = nn.Linear(60, 40, bias=False)
    build = torch.optim.AdamW if decoupled else torch.optim.SGD
    settings = {} if decoupled else {"momentum": 0.9}
    optimizer = build(model.parameters(), 0.1, weight_decay=0.5, **settings)
    apply_optimizer_state(optimizer, OptimizerState(projection="galore", rank=39, min_size=0), model)
    before = model.weight.detach().clone()
    model.weight.grad = torch.zeros_like(before)
    optimizer.step()
    exact = 0.95 * before
    error = (model.weight - exact).norm() / (0.05 * before).norm()
    assert error < (1e-5 if decoupled else 0.2)  # L2 decay is a part of the gradient


@pytest.mark.parametrize("state_format", ["lowrank", "apollo"])
def test_gradients_of_zeros_find_no_subspace(state_format):
    """As behind a head that starts at zero: the first gradient that is one does."""
    torch.manual_seed(0)
    model = nn.Linear(60, 40, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, weight_decay=0.5)
    apply_optimizer_state(optimizer, OptimizerState(**BY_NAME[state_format], rank=1, min_size=0), model)
    before = model.weight.detach().clone()
    model.weight.grad = torch.zeros_like(before)
    optimizer.step()
    assert torch.equal(model.weight, before * 0.95)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    column, row = torch.randn(40, 1), torch.randn(1, 60)
    before = model.weight.detach() * 0.95
    model.weight.grad = column @ row
    optimizer.step()
    moved = before - model.weight.detach()
    expected = column @ (row.sign() if state_format == "lowrank" else row)
    assert torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), dim=0) > 0.99


def test_moments_without_a_direction_find_no_subspace():
    """Such as the first ones of Adafactor."""
    torch.manual_seed(0)
    model = nn.Linear(60, 40, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    optimizer.state[model.weight] = {
        "step": torch.tensor(3.0),
        "exp_avg": torch.zeros(40, 60),
        "exp_avg_sq": torch.rand(40, 60),
    }
    apply_optimizer_state(optimizer, OptimizerState(projection="galore", rank=3, min_size=0), model)
    assert optimizer.state[model.weight] == {}
