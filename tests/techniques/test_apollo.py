"""APOLLO against its definition, in float64 and with torch's own AdamW."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lightning_memsave.techniques.optimizer_state import OptimizerState, apollo, apply_optimizer_state
from lightning_memsave.techniques.optimizer_state.projection import PROJECTION

LR = 0.01


def prepared(shape, rank, **settings):
    """A layer with weights [N, M] and its optimizer."""
    torch.manual_seed(0)
    model = nn.Linear(shape[1], shape[0], bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), LR, **settings)
    apply_optimizer_state(optimizer, OptimizerState(projection="apollo", rank=rank, min_size=0), model)
    return model.weight, optimizer


def stepped(weight, optimizer, gradient):
    """The step that `gradient` leads to."""
    before = weight.detach().clone()
    weight.grad = gradient.clone()
    optimizer.step()
    return weight.detach() - before


def signs(optimizer, weight):
    """The matrix of the next step, [min(N, M), R]."""
    state = optimizer.state[weight]
    return apollo.matrix(state[PROJECTION], weight, min(state["exp_avg"].shape))


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("shape", "rank"), [((24, 40), 8), ((40, 24), 8), ((24, 40), 1), ((33, 33), 32)])
def test_it_is_its_definition(shape, rank, maximize):
    weight, optimizer = prepared(shape, rank, weight_decay=0.1, maximize=maximize)
    wide = shape[0] <= shape[1]
    inner = nn.Parameter(torch.zeros((rank, shape[1]) if wide else (shape[0], rank), dtype=torch.float64))
    adamw = torch.optim.AdamW([inner], LR, weight_decay=0.0)
    for seed in range(4):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        start = weight.detach().double()
        found = stepped(weight, optimizer, gradient).double()
        descent = gradient.double() * (-1 if maximize else 1)
        projection = signs(optimizer, weight).double()
        projected = projection.T @ descent if wide else descent @ projection
        with torch.no_grad():
            inner.zero_()
        inner.grad = projected
        adamw.step()
        dim = None if rank == 1 else int(not wide)
        scale = inner.detach().norm(dim=dim, keepdim=True) / descent.norm(dim=dim, keepdim=True)
        expected = -math.sqrt(min(shape) / rank) * scale * descent - LR * 0.1 * start
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_a_first_step_is_as_long_as_adamws(shape):
    weight, optimizer = prepared(shape, 8, weight_decay=0.0)
    found = stepped(weight, optimizer, torch.randn(shape))
    length = found.norm(dim=int(shape[0] > shape[1]))
    torch.testing.assert_close(length, torch.full_like(length, LR * math.sqrt(24)))


def test_a_column_that_the_subspace_does_not_see_stays():
    weight, optimizer = prepared((2, 40), 1)
    stepped(weight, optimizer, torch.full((2, 40), 1e-30))
    unseen = signs(optimizer, weight).flip(0) * torch.tensor([[1.0], [-1.0]])  # [2, 1], orthogonal to the signs
    gradient = torch.zeros(2, 40)
    gradient[:, :1] = unseen
    weight.grad = gradient
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert stepped(weight, optimizer, gradient).count_nonzero() == 0


@pytest.mark.parametrize(("rows", "rank"), [(64, 16), (5, 3), (300, 1)])
def test_signs_are_random_and_of_length_one(rows, rank):
    found = apollo.matrix(7, torch.empty(rows, 2 * rows), rank)
    assert found.shape == (rows, rank)
    assert torch.equal(found.abs(), torch.full((rows, rank), 1 / math.sqrt(rank)))
    assert torch.equal(found, apollo.matrix(7, torch.empty(2 * rows, rows), rank))
    assert not torch.equal(found, apollo.matrix(8, torch.empty(rows, 2 * rows), rank))
    many = torch.stack([apollo.matrix(seed, torch.empty(rows, rows), rank) for seed in range(400)]).sign()
    assert many.mean(0).abs().max() < 5 / math.sqrt(400)  # each sign by itself
    neighbours = (many[:, 1:] * many[:, :-1]).mean(0)
    assert neighbours.abs().max() < 5 / math.sqrt(400)  # and pairs


def test_lengths_survive_the_projection():
    columns = torch.randn(256, 2000)
    projected = apollo.matrix(3, columns, 64).T @ columns
    ratio = projected.norm(dim=0) / columns.norm(dim=0)
    assert abs(ratio.square().mean() - 1) < 0.02
    assert ratio.std() < 2 / math.sqrt(2 * 64)  # Johnson-Lindenstrauss: about 1 / sqrt(2 R)


def test_the_subspace_turns_every_200_steps():
    weight, optimizer = prepared((6, 8), 2)
    seeds = []
    for _ in range(202):
        stepped(weight, optimizer, torch.randn(6, 8))
        seeds.append(optimizer.state[weight][PROJECTION])
    assert len(set(seeds)) == 2
    assert seeds.count(seeds[0]) in (199, 200)


def test_a_checkpoint_of_galore_is_refused():
    weight, optimizer = prepared((24, 40), 8)
    stepped(weight, optimizer, torch.randn(24, 40))
    model = nn.Linear(40, 24, bias=False)
    other = torch.optim.AdamW(model.parameters())
    apply_optimizer_state(other, OptimizerState(projection="galore", rank=8, min_size=0), model)
    with pytest.raises(ValueError, match=r"those of a subspace of 'apollo'.*projection=\"apollo"):
        other.load_state_dict(optimizer.state_dict())


def test_sgd_is_refused():
    model = nn.Linear(40, 24)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with pytest.raises(ValueError, match="in 'apollo' needs an optimizer with first and second moments"):
        apply_optimizer_state(optimizer, OptimizerState(projection="apollo"), model)
