"""torchmetrics over microbatches have the value of the whole batch, and their totals."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MinMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_memsave import MemSave
from lightning_memsave.loops.merged_metrics import MergedMetrics, is_mergeable
from tests.harness import assert_same_run
from tests.loops.whole_batches import Module, batches, both, unpack


class Latest(Metric):
    """Its state is no sum."""

    def __init__(self):
        super().__init__()
        self.add_state("latest", torch.zeros(()), dist_reduce_fx=None)

    def update(self, value):
        self.latest = value.sum()

    def compute(self):
        return self.latest


class KeepsAState(SumMetric):
    def reset(self):
        pass


KINDS = [CatMetric, MaxMetric, MeanMetric, MinMetric, SumMetric]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_in_parts_counts_as_one_and_comes_on_top_of_earlier_ones(kind):
    ours, plain = nn.ModuleList([kind()]), kind()
    for values in (torch.tensor([1.0, 5.0]), torch.tensor([2.0, -3.0, 7.0])):
        expected = plain(values)
        with MergedMetrics(ours, num_parts=2):
            ours[0](values[:1])
            ours[0](values[1:])
        assert torch.equal(ours[0]._forward_cache, expected)
        assert torch.equal(ours[0].compute(), plain.compute())
    assert is_mergeable(plain)


def test_states_that_do_not_merge_are_left_alone():
    assert not is_mergeable(Latest())
    assert not is_mergeable(KeepsAState())
    module = nn.ModuleList([Latest(), KeepsAState()])
    with MergedMetrics(module, num_parts=2):
        for metric in module:
            metric.update(torch.tensor([1.0, 2.0]))
            metric.update(torch.tensor([4.0]))
    assert [float(metric.compute()) for metric in module] == [4.0, 7.0]


def test_a_mean_of_scalars_weighs_parts_by_their_share_and_leaves_out_those_without():
    module = nn.ModuleList([MeanMetric()])
    module[0].update(10.0)
    with MergedMetrics(module, num_parts=3) as merged:
        for value, weight in ((1.0, 0.75), (5.0, 0.25), (float("inf"), 0.0)):
            merged.weight = weight
            module[0].update(value)
    assert module[0].compute() == (10 + 0.75 * 1 + 0.25 * 5) / 2  # the batch counts as one scalar
    module[0].update(2.0)  # behind the batch nothing is weighted
    assert module[0].compute() == (10 + 2 + 2) / 3


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("kind", [*KINDS, Latest])
def test_a_batch_that_fails_is_taken_back(kind, num_parts):
    module = nn.ModuleList([kind()])
    module[0].update(torch.tensor([1.0, 2.0]))
    before, count = module[0].compute().clone(), module[0]._update_count

    def fails():
        module[0](torch.tensor([9.0, -9.0]))
        raise RuntimeError("memory")

    with pytest.raises(RuntimeError, match="memory"), MergedMetrics(module, num_parts):
        fails()
    assert torch.equal(module[0].compute(), before)
    module[0]._computed = None  # not from a cache either
    assert torch.equal(module[0].compute(), before)
    assert module[0]._update_count == count


def test_a_metric_that_a_batch_does_not_meet_keeps_its_value():
    module = nn.ModuleList([SumMetric()])
    value = module[0](torch.tensor([3.0]))
    with MergedMetrics(module, num_parts=2):
        pass
    assert torch.equal(module[0]._forward_cache, value)
    assert module[0].compute() == 3.0


def test_composite_metrics_have_the_value_of_the_batch():
    class Composite(Module):
        def __init__(self):
            super().__init__()
            self.both = MulticlassAccuracy(3, average="micro") + 2 * MulticlassAccuracy(3, average="macro")

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            x, y = unpack(batch)
            self.both(self.net(x).argmax(1), y)
            self.log("composite", self.both, on_step=True, on_epoch=True)
            return loss

    plain, ours = both(Composite(), batches(), MemSave(microbatch=3))
    assert_same_run(plain, ours, 1e-6)  # torchmetrics computes these in float32
