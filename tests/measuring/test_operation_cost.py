"""Modelled seconds and workspace of single operations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memsave.measuring import operation_cost
from lightning_memsave.measuring.operation_cost import NOMINAL, cost_of, measure_speed
from lightning_memsave.measuring.step_trace import trace_step
from lightning_memsave.simulation.fake_model import fake_tensors

OVERHEAD = 5e-6


class Costs(TorchDispatchMode):
    """Seconds and workspace of each operation, by name."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs, outputs = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in ((args, kwargs), out)
        )
        self.found[str(func.overloadpacket)] = cost_of(func, args, kwargs or {}, out, inputs, outputs)
        return out


def costs(run):
    with Costs() as mode:
        run()
    return mode.found


def test_time_is_the_larger_of_arithmetic_and_traffic():
    speed = measure_speed("cpu")
    for rows, inner, columns in ((1, 4000, 1), (300, 300, 300)):
        a, b = torch.ones(rows, inner), torch.ones(inner, columns)
        (seconds, workspace) = costs(lambda a=a, b=b: a @ b)["aten.mm"]
        flops = 2 * rows * inner * columns
        moved = 4 * (rows * inner + inner * columns + rows * columns)
        assert seconds == pytest.approx(max(flops / speed.flops, moved / speed.bytes) + OVERHEAD)
        assert workspace == 0


def test_elementwise_operations_cost_what_they_read_and_write():
    x, y = torch.ones(1000, 1000), torch.ones(1000, 1, dtype=torch.float64)
    (seconds, _) = costs(lambda: x * y)["aten.mul"]
    assert seconds == pytest.approx((x.nbytes + y.nbytes + 8_000_000) / measure_speed("cpu").bytes + OVERHEAD)


def test_views_are_free():
    x = torch.ones(1000, 1000)
    found = costs(lambda: (x.t(), x[3:], x.view(-1), x.expand(5, 1000, 1000)))
    assert len(found) == 4
    assert set(found.values()) == {(0.0, 0)}


def test_kernels_of_convolutions_take_multiples_of_their_largest_input():
    model, x = nn.Conv2d(3, 5, 3), torch.randn(2, 3, 16, 16, requires_grad=True)
    found = costs(lambda: model(x).sum().backward())
    gradient = 2 * 5 * 14 * 14 * 4  # of the output, larger than the input
    assert found["aten.convolution"][1] == x.nbytes
    assert found["aten.convolution_backward"][1] == 2 * max(gradient, x.nbytes) == 2 * gradient
    assert found["aten.sum"][1] == 0


def test_no_workspace_is_known_of_other_devices():
    model, x = nn.Conv2d(3, 5, 3, device="meta"), torch.empty(2, 3, 16, 16, device="meta")
    seconds, workspace = costs(lambda: model(x))["aten.convolution"]
    assert workspace == 0
    assert OVERHEAD < seconds < math.inf


def test_sparse_tensors_cost_their_values_and_indices():
    x = torch.eye(100).to_sparse()
    (seconds, _) = costs(lambda: x.to_dense())["aten._to_dense"]
    assert seconds == pytest.approx((100 * 4 + 2 * 100 * 8 + 40_000) / measure_speed("cpu").bytes + OVERHEAD)


def test_speeds_are_measured_once_and_outside_of_modes():
    operation_cost._speeds.clear()
    model = nn.Linear(4, 4)
    trace = trace_step(model, lambda: model(torch.zeros(2, 4)).sum().backward())
    speed = measure_speed("cpu")
    assert measure_speed("cpu") is speed
    assert 0 < speed.bytes < math.inf
    assert 0 < speed.flops < math.inf
    assert max(storage.num_bytes for storage in trace.storages) < 2**20  # not the matrices of the measurement


def test_a_device_without_room_has_the_speed_of_a_data_sheet_until_the_next_trace(monkeypatch):
    def has_no_room(device_type):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(operation_cost, "_speeds", {})
    model = nn.Linear(4, 4)
    with monkeypatch.context() as patch, fake_tensors(model) as fake, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(operation_cost, "_measure_speed", has_no_room)
        x = fake(torch.zeros(2, 4))
        assert trace_step(model, lambda: model(x).sum().backward()).ops
        assert measure_speed("cpu") is NOMINAL
    assert measure_speed("cpu") is NOMINAL
    trace_step(model, lambda: model(torch.zeros(2, 4)))
    assert measure_speed("cpu") is not NOMINAL


def test_a_device_that_computes_nothing_has_it_as_well(monkeypatch):
    monkeypatch.setattr(operation_cost, "_speeds", {})
    assert measure_speed("meta") is NOMINAL
    assert torch.cuda.is_available() or measure_speed("cuda") is NOMINAL


def test_speeds_are_those_of_float32(monkeypatch):
    monkeypatch.setattr(operation_cost, "_speeds", {})
    seen = []
    monkeypatch.setattr(operation_cost, "_best_seconds", lambda run, device_type: seen.append(run().dtype) or 1.0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        measure_speed("cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    assert seen == [torch.float32, torch.float32]


def test_a_larger_product_takes_longer_and_a_view_takes_no_time():
    def seconds(size):
        model, x = nn.Linear(size, size, bias=False), torch.zeros(size, size)
        ops = trace_step(model, lambda: model(x)).ops
        assert {op.seconds for op in ops if op.name == "aten.t"} == {0.0}
        return sum(op.seconds for op in ops)

    assert seconds(32) < seconds(256) < seconds(512)
