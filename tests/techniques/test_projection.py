"""Moments of projected gradients: which parameters, how many bytes, and what stays outside."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memsave.techniques.optimizer_state import OptimizerState, apply_optimizer_state, projection
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME


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
    """A head that starts at zero makes such: the first gradient that is one finds it."""
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


# ------------------------------------------------------------------------------- which parameters, and how many bytes
@pytest.mark.parametrize(
    ("shape", "is_worth"),
    [((40, 60), True), ((60, 40), True), ((16, 60), False), ((60, 16), False), ((60,), False), ((20, 3, 3, 3), True)],
)
def test_both_sides_must_be_longer_than_the_rank(shape, is_worth):
    assert projection.is_worth_it(nn.Parameter(torch.zeros(shape)), 16) is is_worth


@pytest.mark.parametrize("shape", [(40, 60), (60, 40), (20, 3, 5, 5), (33, 33)])
@pytest.mark.parametrize("name", ["galore", "apollo"])
def test_bytes_of_moments_are_those_stated(name, shape):
    p = nn.Parameter(torch.randn(shape))
    optimizer = torch.optim.AdamW([p])
    model = nn.ParameterList([p])
    apply_optimizer_state(optimizer, OptimizerState(projection=name, rank=8, min_size=0), model)
    p.grad = torch.randn(shape)
    optimizer.step()
    state = optimizer.state[p]
    held = sum(v.nbytes for k, v in state.items() if isinstance(v, torch.Tensor) and k != "step")
    state_format = projection.format_of(state)
    assert state_format == {"galore": "lowrank", "apollo": "apollo"}[name]
    assert held == projection.num_bytes(state_format, p.shape, 8, 2)
    sides = shape[0], p.numel() // shape[0]
    assert held == 4 * 8 * (2 * max(sides) + (min(sides) if name == "galore" else 0))
    assert projection.rank_of(state) == 8
    assert projection.shape_of(p, state) == tuple(state["exp_avg"].shape)
    assert projection.shape_of_projection(p, state) == (min(sides), 8)


# ------------------------------------------------------------------------------- steps
@pytest.mark.parametrize("name", ["galore", "apollo"])
def test_a_convolution_steps_as_its_matrix(name):
    conv = nn.Parameter(torch.randn(20, 3, 3, 3))
    matrix = nn.Parameter(conv.detach().view(20, 27).clone())
    for seed in range(3):
        gradient = torch.randn(20, 27, generator=torch.Generator().manual_seed(seed))
        for p in (conv, matrix):
            if seed == 0:
                p.optimizer = torch.optim.AdamW([p], 0.1, weight_decay=0.1)
                config = OptimizerState(projection=name, rank=8, min_size=0)
                apply_optimizer_state(p.optimizer, config, nn.ParameterList([p]))
            p.grad = gradient.view(p.shape).clone()
            p.optimizer.step()
    torch.testing.assert_close(conv.detach().view(20, 27), matrix.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["galore", "apollo"])
def test_to_maximize_is_to_step_the_other_way(name):
    steps = []
    for maximize in (False, True):
        p = nn.Parameter(torch.zeros(40, 60))
        optimizer = torch.optim.AdamW([p], 0.1, weight_decay=0.0, maximize=maximize)
        apply_optimizer_state(
            optimizer, OptimizerState(projection=name, rank=8, min_size=0), model=nn.ParameterList([p])
        )
        p.grad = torch.randn(40, 60, generator=torch.Generator().manual_seed(1))
        optimizer.step()
        steps.append(p.detach().clone())
    assert steps[0].norm() > 0
    torch.testing.assert_close(steps[0], -steps[1])


# ------------------------------------------------------------------------------- whole moments as projected ones
def test_moments_are_projected_by_what_keeps_their_mean():
    """First moments by the projection; second ones by its squares, which is exact where gradients are independent."""
    torch.manual_seed(0)
    p, rank = nn.Parameter(torch.zeros(30, 50)), 4
    scales = torch.rand(30, 1) + 0.1  # of the gradients of a row
    state = {"step": torch.tensor(3.0), "exp_avg": torch.randn(30, 50), "exp_avg_sq": (scales**2).expand(30, 50)}
    first = state["exp_avg"].clone()
    projection.project_state(state, p, "lowrank", rank)
    basis = state[projection.PROJECTION]
    assert torch.allclose(basis.T @ basis, torch.eye(rank), atol=1e-5)
    torch.testing.assert_close(state["exp_avg"], basis.T @ first)
    drawn = basis.T @ (scales * torch.randn(30, 200_000))
    torch.testing.assert_close(state["exp_avg_sq"][:, 0], drawn.square().mean(1), rtol=0.03, atol=0)
    assert float(state["step"]) == 3.0


def test_moments_of_what_is_not_worth_it_stay_whole():
    p = nn.Parameter(torch.zeros(4, 50))
    state = {"exp_avg": torch.ones(4, 50)}
    projection.project_state(state, p, "lowrank", 4)
    assert torch.equal(state["exp_avg"], torch.ones(4, 50))
    empty = {}
    projection.project_state(empty, nn.Parameter(torch.zeros(30, 50)), "apollo", 4)
    assert empty == {}
