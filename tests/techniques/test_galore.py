"""GaLore: the subspace, and what passes by it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memsave.techniques.optimizer_state import OptimizerState, apply_optimizer_state, galore

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
