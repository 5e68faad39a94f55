"""Rules that held so far: when they are asked for again, and what that costs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lightning_memsave.loops.loss_rules import LossRules
from lightning_memsave.techniques.microbatching.reduction import LabelCount as Count
from lightning_memsave.techniques.microbatching.reduction import ReductionRule
from tests.loops.loss_runs import Base, applied, batches, compare


class FromAStep(Base):
    def loss(self, z, y):
        return F.cross_entropy(z, y) + (z.std(0).mean() if self.global_step >= 3 else 0)


class FromABatch(Base):
    def loss(self, z, y):
        return F.cross_entropy(z, y) + (z.std(0).mean() if self.batch_idx >= 3 else 0)


class FromAnEpoch(Base):
    def loss(self, z, y):
        return F.cross_entropy(z, y) + (z.std(0).mean() if self.current_epoch >= 1 else 0)


@pytest.mark.parametrize("kind", [FromAStep, FromABatch, FromAnEpoch])
def test_a_loss_that_stops_to_be_a_mean_is_noticed(kind):
    report, _, messages = compare(kind(), batches(8), max_epochs=2)
    assert applied(report).loss_class == "changed"
    assert "neither the mean nor the sum" in applied(report).reasons[0]
    assert "batches ran whole" in applied(report).summary
    assert messages


def test_rules_that_disagree_on_a_batch_are_asked_about():
    rules, parts = LossRules(), [({"labels": torch.tensor([[1, 2]])}, 1), ({"labels": torch.tensor([[1, -100]])}, 1)]
    rules.known = (ReductionRule("mean"), ReductionRule("mean", Count()))
    assert rules.weights(parts) is None
    full = [({"labels": torch.ones(n, 2, dtype=torch.long)}, n) for n in (2, 1)]
    assert rules.weights(full) == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize(("seconds", "says"), [(1.0, True), (0.0, False)])
def test_what_asking_costs_is_told_once(monkeypatch, seconds, says):
    clock = iter(range(100))
    monkeypatch.setattr("lightning_memsave.loops.loss_rules.time.perf_counter", lambda: float(next(clock)))
    rules = LossRules()
    rules.is_due((torch.zeros(2),), 0)
    rules.seconds = seconds
    text = rules.cost_of_first_epoch()
    assert (text is not None) == says
    assert text is None or "took 1.0 s, 100% of the first epoch" in text
    assert rules.cost_of_first_epoch() is None
