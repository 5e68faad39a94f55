"""Peaks by module against the ledger's, and by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_memsave.measuring import Ledger
from lightning_memsave.measuring.module_attribution import (
    BACKWARD,
    BATCH,
    ELSEWHERE,
    BreakdownLedger,
    shared_names,
)
from lightning_memsave.simulation.fake_model import fake_copy, fakes_of
from lightning_memsave.simulation.value_propagation import FactsMode
from lightning_memsave.torch_internals.fake_tensors import FakeTensorMode
from tests.steps import STEPS, mlp


def broken_down(run, model, optimizers=(), batch=()):
    ledger = BreakdownLedger()
    with ledger.watching(model, optimizers, batch):
        run()
    return ledger.measurement, ledger.breakdown


@pytest.mark.parametrize("name", STEPS)
def test_the_measurement_is_the_plain_ledgers_and_the_breakdown_adds_up_to_it(name):
    step = STEPS[name]()
    plain = step.measured()
    step.model.zero_grad()
    measured, breakdown = broken_down(step.run, step.model, batch=step.batch)
    assert measured == plain
    peak = breakdown.allocations.peak()
    assert (peak.peak_bytes, peak.by_category) == (plain.peak_bytes, plain.by_category)
    assert sum(peak.by_module.values()) == plain.peak_bytes
    assert {name: sum(split.values()) for name, split in peak.by_place.items()} == peak.by_module
    assert breakdown.allocations.timeline() == plain.timeline
    sizes = [each.num_bytes for each in breakdown.top]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) <= plain.peak_bytes


def test_what_was_there_before_belongs_to_its_module():
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    batch = {"x": torch.randn(4, 8), "y": torch.zeros(4, dtype=torch.int64)}
    other = torch.zeros(100)
    _, breakdown = broken_down(lambda: other.view(10, 10), model, [optimizer], batch)
    assert breakdown.allocations.peak().by_module == {
        "0": 3 * 8 * 16 * 4,  # weights, gradients, momentum
        "1": (3 * 2 + 2) * 16 * 4 + 8,  # besides running statistics, and how many batches there were
        BATCH: 4 * 8 * 4 + 4 * 8,
        ELSEWHERE: 400,
    }
    kinds = {(each.module, each.category, each.shape): (each.count, each.num_bytes) for each in breakdown.top}
    assert kinds["0", "weights", (16, 8)] == (1, 512)
    assert kinds["0", "optimizer_state", (16, 8)] == (1, 512)
    assert kinds["1", "weights", (16,)] == (4, 256)
    assert kinds["1", "gradients", (16,)] == (2, 128)
    assert all(each.line == "" for each in breakdown.top)


class Twice(nn.Module):
    """Makes two tensors of its own around its child's."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return (self.inner(x * 2) + 1).exp()


def test_what_is_made_belongs_to_the_innermost_module_that_runs():
    model, x = nn.Sequential(Twice(), Twice()), torch.randn(4, 8)
    measured, breakdown = broken_down(lambda: [model(x), torch.cat([x] * 5)], model, batch=x)
    assert measured.peak_bytes == 2 * 8 * 8 * 4 + 128 + 2 * 2 * 128 + 5 * 128
    inside = {each.module: each for each in breakdown.top if each.line}
    assert {module: (each.count, each.num_bytes) for module, each in inside.items()} == {
        "*": (4, 512),  # what the product keeps, and exp, in modules that repeat each other
        ELSEWHERE: (1, 640),
    }
    assert inside["*"].shape == (4, 8)
    assert inside["*"].dtype == "float32"
    assert breakdown.allocations.peak().by_place == {
        "0": {"temporary": 2 * 128},
        "1": {"temporary": 2 * 128},
        "0.inner": {"weights": 256},
        "1.inner": {"weights": 256},
        ELSEWHERE: {"temporary": 640},
        BATCH: {"data": 128},
    }


def test_members_of_a_list_repeat_each_other_where_class_and_shapes_are_the_same():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2))
    stages = nn.ModuleList(nn.Sequential(nn.Linear(2, width)) for width in (2, 4, 4))
    parts = {
        "one": nn.Sequential(nn.Linear(2, 2)),
        "7": nn.ReLU(),
        "mlp": nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Tanh()),
    }
    model = nn.ModuleDict({"layers": layers, "stages": stages, **parts})
    assert shared_names(model) == {
        "": "",
        "layers": "layers",
        "layers.0": "layers.*",
        "layers.1": "layers.*",
        **{f"layers.{i}.{j}": f"layers.*.{j}" for i in range(2) for j in range(2)},
        "one": "one",
        "one.0": "one.0",
        "7": "7",
        "stages": "stages",
        "stages.0": "stages.0",  # of another shape
        "stages.0.0": "stages.0.0",
        **{f"stages.{i}": "stages.*" for i in (1, 2)},
        **{f"stages.{i}.0": "stages.*.0" for i in (1, 2)},
        "mlp": "mlp",
        **{f"mlp.{i}": f"mlp.{i}" for i in range(3)},  # parts of one block
    }


def test_backward_and_the_model_itself_have_names():
    step = mlp()
    _, breakdown = broken_down(lambda: (step.run(), torch.zeros(10**6)), step.model, batch=step.batch)
    places = {place for _, place in breakdown.allocations.labels}
    assert places >= {"0", "2", "4", BACKWARD, BATCH, ELSEWHERE}
    lone = nn.Linear(4, 4)
    _, breakdown = broken_down(lambda: lone(torch.zeros(2, 4)), lone)
    assert breakdown.allocations.peak().by_module["Linear"] == (16 + 4) * 4 + 2 * 4 * 4


def test_operations_are_those_of_modules_and_backward_without_views():
    model, x = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()), torch.randn(4, 8)

    def forward():
        return model(x.view(4, 8) * 2)  # outside of the model

    assert broken_down(forward, model)[1].num_operations == 2  # the product and tanh; the transpose is a view
    one, two = (broken_down(lambda n=n: [forward().sum().backward() for _ in range(n)], model) for n in (1, 2))
    model.zero_grad()
    assert one[1].num_operations > 2
    again = broken_down(lambda: forward().sum().backward(), model)[1].num_operations
    model.zero_grad()
    assert again == one[1].num_operations
    assert two[1].seconds > one[1].seconds > 0


def test_a_forward_that_raises_ends_its_modules():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("no")

    model = nn.Sequential(nn.Linear(4, 4), Fails())

    def run():
        with pytest.raises(KeyError):
            model(torch.zeros(2, 4))
        return torch.zeros(1000)

    kept = []
    _, breakdown = broken_down(lambda: kept.append(run()), model)
    assert breakdown.allocations.peak().by_module[ELSEWHERE] >= 4000
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_nothing_of_the_breakdown_changes_what_is_computed():
    step = mlp()
    step.run()
    plain = [p.grad.clone() for p in step.model.parameters()]
    step.model.zero_grad()
    broken_down(step.run, step.model, batch=step.batch)
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, step.model.parameters(), strict=True))
    assert isinstance(BreakdownLedger(), Ledger)


def test_a_fake_step_has_as_many_operations_as_the_real_one_though_torch_asks_fake_tensors_for_their_device():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    real = broken_down(lambda: model(x).sum().backward(), model, batch=x)[1]
    model.zero_grad()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copy, batch = fake_copy(model, mode), fakes_of(x, mode)
    with mode, FactsMode(), BreakdownLedger(fake=True).watching(copy, batch=batch) as ledger:
        copy(batch).sum().backward()
    assert ledger.breakdown.num_operations == real.num_operations
