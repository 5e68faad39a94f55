"""Logs over microbatches are those of the whole batch: against hand-computed numbers, and against plain Lightning."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torchmetrics import SumMetric

from lightning_memsave import MemSave
from lightning_memsave.loops.deferred_logs import DeferredLogs, KeptLogs
from tests.harness import assert_same_run
from tests.loops.whole_batches import EXACT, Module, batches, both, unpack


def logged(parts, losses=None, reduction="mean", num_accumulated=1):
    """What is logged at last, by name: for each part `(samples, weight, {name: (value, options)})`."""
    found = {}

    def log(results, fx, name, value, **options):
        found.setdefault(name, []).append((value, options, results.batch, results.batch_size))

    results = SimpleNamespace(batch="nothing", batch_size=9)
    logs = DeferredLogs(results, log)
    with logs:
        for samples, weight, named in parts:
            logs.begin("a part", samples, weight)
            for name, (value, options) in named.items():
                results.log("training_step", name, value, **options)
    assert not hasattr(results, "log"), "Lightning's own is there again"
    assert not found, "nothing is logged before the batch is over"
    logs.flush("the batch", losses or [None] * len(parts), reduction, num_accumulated)
    assert all(batch == "the batch" and size is None for calls in found.values() for *_, batch, size in calls)
    return {name: [(value, options) for value, options, *_ in calls] for name, calls in found.items()}


def one(value, **options):
    return {"name": (torch.tensor(value), options)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, 1.75), ({"reduce_fx": "sum"}, 5.0), ({"reduce_fx": "min"}, 1.0), ({"reduce_fx": torch.max}, 4.0)],
)
def test_values_are_reduced_as_they_would_be_over_samples(options, expected):
    ((value, _),) = logged([(3, 0.75, one(1.0, **options)), (1, 0.25, one(4.0, **options))])["name"]
    assert value == expected


def test_sizes_of_parts_add_up_and_a_size_that_was_written_down_stays():
    ((value, options),) = logged([(3, 0, one(1.0, batch_size=30)), (1, 0, one(4.0, batch_size=10))])["name"]
    assert (value, options["batch_size"]) == (1.75, 40)
    ((value, options),) = logged([(3, 0, one(1.0, batch_size=64)), (1, 0, one(4.0, batch_size=64))])["name"]
    assert (value, options["batch_size"]) == (1.75, 64)


def test_a_value_that_is_the_loss_is_that_of_the_batch():
    parts = [(3, 0.5, one(1.0, reduce_fx="max")), (1, 0.5, one(4.0, reduce_fx="max"))]
    losses = [torch.tensor(0.5), torch.tensor(2.0)]  # divided by two accumulated batches
    assert logged(parts, losses, "mean", 2)["name"][0][0] == 2.5  # by weights, not by samples
    assert logged(parts, losses, "sum", 2)["name"][0][0] == 5.0
    assert logged(parts, losses, "sum", 1)["name"][0][0] == 4.0  # is not the loss then


@pytest.mark.gpu
def test_a_loss_that_is_logged_from_another_device_is_that_of_the_batch():
    parts = [(3, 0.5, one(1.0, reduce_fx="max")), (1, 0.5, one(4.0, reduce_fx="max"))]
    losses = [torch.tensor(1.0, device="cuda"), torch.tensor(4.0, device="cuda")]
    assert logged(parts, losses)["name"][0][0] == 2.5


def test_a_part_without_a_share_does_not_count_even_where_its_loss_is_no_number():
    parts = [(3, 1.0, one(1.5)), (1, 0.0, one(math.nan))]
    assert logged(parts, [torch.tensor(1.5), torch.tensor(math.nan)])["name"][0][0] == 1.5


def test_numbers_of_16_bits_are_averaged_in_32():
    ((value, _),) = logged([(1, 0, one(1.0)), (1, 0, {"name": (torch.tensor(1.0, dtype=torch.bfloat16), {})})])["name"]
    assert value.dtype == torch.float32
    parts = [(1, 0, {"name": (torch.tensor(1 + i / 128, dtype=torch.bfloat16), {})}) for i in range(2)]
    assert logged(parts)["name"][0][0] == 1 + 1 / 256  # no number of bfloat16


def test_metrics_names_of_some_parts_and_batches_of_one_part_are_logged_as_they_are():
    metric = SumMetric()
    parts = [(2, 0, {"metric": (metric, {}), "once": (torch.tensor(7.0), {})}), (2, 0, {"metric": (metric, {})})]
    found = logged(parts)
    assert found["metric"] == [(metric, {})]
    assert found["once"] == [(7.0, {})]
    twice = DeferredLogs(SimpleNamespace(), lambda results, fx, name, value: seen.append(value))
    seen = []
    with twice:
        twice.begin("all", 2, 1.0)
        for value in (1.0, 2.0):
            twice._results.log("training_step", "name", value)
    twice.flush("all", [None], "mean")
    assert seen == [1.0, 2.0]


def test_logs_of_a_batch_that_fails_are_taken_back():
    results = _ResultCollection(training=True)
    results.batch_size = 2

    def log(name, value):
        results.log("training_step", name, torch.tensor(value), on_step=True, on_epoch=True, batch_size=2)

    log("loss", 1.0)
    with KeptLogs(results):
        log("loss", 3.0)
    before = {key: (float(item.value), float(item.cumulated_batch_size)) for key, item in results.items()}

    def fails():
        log("loss", 100.0)
        log("new", 1.0)
        raise RuntimeError("memory")

    with pytest.raises(RuntimeError, match="memory"), KeptLogs(results):
        fails()
    after = {key: (float(item.value), float(item.cumulated_batch_size)) for key, item in results.items()}
    assert after == before == {"training_step.loss": (8.0, 4.0)}


@pytest.mark.parametrize("factor", [2, 7, 11])  # x / 7 * 7 is not x for each of them
def test_a_summed_loss_is_known_in_the_logs_under_accumulation(factor):
    plain, ours = both(
        Module(reduction="sum"), batches(sizes=(10, 9, 8, 7)), MemSave(microbatch=3), accumulate_grad_batches=factor
    )
    assert_same_run(plain, ours, EXACT)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("reduce_fx", ["max", "min", "sum"])
def test_a_logged_loss_is_the_whole_batchs_however_it_is_reduced_over_batches(reduce_fx, reduction):
    class Extremes(Module):
        def training_step(self, batch, batch_idx):
            x, y = unpack(batch)
            loss = F.cross_entropy(self.net(x), y, reduction=reduction)
            self.log("reduced", loss, on_step=True, on_epoch=True, reduce_fx=reduce_fx)
            return loss

    plain, ours = both(Extremes(), batches(), MemSave(microbatch=3))
    assert_same_run(plain, ours, EXACT)
