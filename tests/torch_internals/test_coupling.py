"""Which optimizers are stepped one parameter at a time."""

from __future__ import annotations

import pytest
import torch

from lightning_memsave.torch_internals.coupling import check_steps_parameters_alone
from lightning_memsave.torch_internals.fake_tensors import FakeTensorMode


class GlobalNorm(torch.optim.Optimizer):
    """Divides by the norm of all gradients together."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [(p, group["lr"]) for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p, _ in parameters]).norm()
        for p, lr in parameters:
            p.sub_(lr * p.grad / norm)


class OwnNorm(GlobalNorm):
    """Divides each gradient by its own norm."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["average"] = 0.9 * state.get("average", 0) + p.grad / p.grad.norm()
                p.sub_(group["lr"] * state["average"])


class Delegates(GlobalNorm):
    def __init__(self, params):
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups, 0.1)


def parameters():
    return [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize("kind", [GlobalNorm, Delegates, torch.optim.LBFGS])
def test_optimizers_that_couple_parameters_are_refused_by_name(kind):
    with pytest.raises(ValueError, match=f"precision.*each parameter by itself.*{kind.__name__}"):
        check_steps_parameters_alone(kind(parameters()), "precision")


@pytest.mark.parametrize("kind", [OwnNorm, torch.optim.AdamW, torch.optim.Adafactor])
def test_others_are_stepped_and_left_as_they_were(kind):
    optimizer = kind(parameters())
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    state = torch.get_rng_state()
    check_steps_parameters_alone(optimizer, "precision")
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(map(torch.equal, before, after))
    assert len(optimizer.state) == 0
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("kind", [OwnNorm, torch.optim.Muon])
def test_others_are_known_among_fake_tensors(kind):
    with FakeTensorMode(allow_non_fake_inputs=True):
        check_steps_parameters_alone(kind([torch.nn.Parameter(torch.ones(3, 2))]), "precision")
        with pytest.raises(ValueError, match=r"each parameter by itself.*GlobalNorm"):
            check_steps_parameters_alone(GlobalNorm(parameters()), "precision")
