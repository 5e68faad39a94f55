"""Scopes of a step: regions come and go, inputs are kept elsewhere, and nothing is planned too early."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memsave import Checkpointing
from lightning_memsave.core.report import Applied
from lightning_memsave.loops.step_scopes import StepScopes
from lightning_memsave.techniques.checkpointing import apply_checkpointing, input_store

CALLS = Counter()
"""How often each block was called; no attribute, which a region would put back."""


class Counts(nn.Sequential):
    def forward(self, x):
        CALLS[self] += 1
        return super().forward(x)


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(Counts(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def gradients(module, scopes):
    loss = scopes.run(L.Trainer(accelerator="cpu", logger=False), lambda: module(torch.ones(4, 8)).sum(), ())
    module.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in module.parameters()]


def calls(module):
    return [CALLS[block] for block in module]


def test_with_nothing_open_a_step_is_the_step():
    scopes = StepScopes()
    assert scopes.run(None, lambda: "what the step returns", ()) == "what the step returns"
    assert scopes.applied == []
    assert not scopes.undo_regions()
    scopes.close()


@pytest.mark.parametrize("offload", [False, True])
def test_regions_are_run_again_in_backward_until_they_are_undone(offload):
    module, scopes = net(), StepScopes()
    expected = gradients(module, scopes)
    scopes.regions = apply_checkpointing(module, Checkpointing(modules="*"))
    scopes.region_inputs = input_store() if offload else None
    before = calls(module)
    assert all(map(torch.equal, expected, gradients(module, scopes)))
    assert calls(module) == [n + 2 for n in before]
    assert [applied.technique for applied in scopes.applied] == ["checkpointing"]
    assert scopes.undo_regions()
    assert all(map(torch.equal, expected, gradients(module, scopes)))
    assert calls(module) == [n + 3 for n in before]
    assert len(scopes.applied) == 1, "it stays on record"


def test_an_error_of_the_step_comes_through_and_closes_what_was_open():
    def fails():
        raise KeyError("the user's")

    module, scopes = net(), StepScopes()
    scopes.region_inputs = input_store()
    scopes.regions = apply_checkpointing(module, Checkpointing(modules="*"))
    expected = gradients(module, scopes)
    with pytest.raises(KeyError, match="the user's"):
        scopes.run(None, fails, ())
    assert all(map(torch.equal, expected, gradients(module, scopes)))
    scopes.close()
    assert not any("forward" in vars(block) for block in module)


class Plans:
    """Regions that are chosen when a batch comes."""

    def __init__(self):
        self.is_due, self.is_worth_telling, self.applied, self.asked = True, False, None, []

    def plan(self, trainer, args, scope):
        self.asked.append((args, scope))
        self.is_due, self.applied = False, Applied(technique="checkpointing", summary="planned")


def test_regions_are_planned_before_the_first_step_that_is_no_rehearsal():
    scopes, order = StepScopes(), []
    scopes.planned = planned = Plans()

    def step():
        order.append(len(planned.asked))

    scopes.is_rehearsing = True
    scopes.run(None, step, ("batch", 0))
    scopes.is_rehearsing = False
    for batch_idx in (0, 1):
        scopes.run(None, step, ("batch", batch_idx))
    assert order == [0, 1, 1]
    assert planned.asked == [(("batch", 0), None)]


def test_what_was_planned_is_told_once_it_is_worth_it_and_undone_with_the_others():
    scopes, undone = StepScopes(), []
    scopes.planned = planned = Plans()
    planned.plan(None, (), None)
    planned.applied.restore = lambda: undone.append("planned")
    assert scopes.applied == []
    planned.is_worth_telling = True
    assert scopes.applied == [planned.applied]
    store = Applied(technique="activation_compression", summary="recomputed")
    closed = []
    scopes.activations = SimpleNamespace(applied=store, close=lambda: closed.append(True))
    assert scopes.applied == [planned.applied, store]
    scopes.close()
    assert (undone, closed) == (["planned"], [True])
