"""Optimizers that hold others: those that only call the steps of others are told from those that do more."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memsave.simulation.fake_model import optimizer_state_bytes
from lightning_memsave.torch_internals.coupling import check_steps_parameters_alone, held_by
from lightning_memsave.torch_internals.fake_tensors import FakeTensorMode
from lightning_memsave.torch_internals.held_optimizers import stepping, with_held

from .held_optimizers_subjects import Both, Clipping, ClosureForEach, InTurns, Joined, KeepsState, Lookahead


def muon_and_adamw(model, lr=0.02):
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False))
    return torch.optim.Muon(matrices, lr), torch.optim.AdamW(rest, lr)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))


@pytest.mark.parametrize("kind", [Both, Joined])
@pytest.mark.parametrize("lr", [0.02, 0.0])  # of a warmup
def test_one_that_only_calls_others_is_those(kind, lr):
    network = model()
    inside = muon_and_adamw(network, lr)
    before = [p.detach().clone() for p in network.parameters()]
    random = torch.get_rng_state()
    assert stepping([kind(*inside)]) == list(inside)
    assert stepping([kind(Both(inside[0]), inside[1])]) == list(inside)
    assert all(map(torch.equal, network.parameters(), before))
    assert not any(each.state for each in inside)
    assert all(p.grad is None for p in network.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("kind", [Clipping, Lookahead, InTurns, ClosureForEach, KeepsState])
def test_one_that_does_more_is_refused_by_name(kind):
    optimizer = kind(*muon_and_adamw(model()))
    assert stepping([optimizer]) == [optimizer]
    with pytest.raises(ValueError, match=f"precision.*only calls the steps.*{kind.__name__}"):
        check_steps_parameters_alone(optimizer, "precision")


def test_a_rare_step_of_its_own_is_seen():
    optimizer = Lookahead(*muon_and_adamw(model()), period=60)
    assert stepping([optimizer]) == [optimizer]


def test_parameters_that_only_one_side_has_are_not_left_out():
    network = model()
    muon, adamw = muon_and_adamw(network)
    optimizer = Both(muon, adamw)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert stepping([optimizer]) == [optimizer]
    twice = Joined(muon, torch.optim.SGD(network.parameters(), 0.1))
    assert stepping([twice]) == [twice]


def test_schedulers_hooks_and_tensors_as_learning_rates_do_not_count():
    network = model()
    inside = muon_and_adamw(network)
    inside[1].param_groups[0]["lr"] = torch.tensor(0.01)
    optimizer = Both(*inside)
    torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizers[0], 0.9)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert stepping([optimizer]) == list(inside)
    assert calls == []


def test_among_fake_tensors():
    with FakeTensorMode():
        optimizer = Both(*muon_and_adamw(model()))
        assert stepping([optimizer]) == list(optimizer.optimizers)


def test_one_inside_may_know_the_one_around_it():
    inside = muon_and_adamw(model())
    optimizer = Both(*inside)
    inside[0].parent = optimizer
    assert with_held([optimizer]) == [optimizer, *inside]
    for each in stepping([optimizer]):
        if held_by(each):
            with pytest.raises(ValueError, match="only calls the steps"):
                check_steps_parameters_alone(each, "precision")
    assert optimizer_state_bytes(optimizer) > 0


def test_all_that_is_held_each_once():
    inside = muon_and_adamw(model())
    optimizer = Both(*inside)
    optimizer.again = {"first": inside[0], "more": [inside]}
    assert held_by(optimizer) == list(inside)
    assert with_held([optimizer, inside[0]]) == [optimizer, *inside]
