import subprocess
import sys

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_memsave.demo.model import WideResNet
from lightning_memsave.measuring import Ledger, allocation_peak
from lightning_memsave.measuring.profiler_peak import _allocation_sizes, peak_of_changes


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(-1000, 1000)))
def test_peak_of_changes(changes):
    assert peak_of_changes(iter(changes)) == max(sum(changes[:n]) for n in range(len(changes) + 1))


def test_nothing_allocated():
    assert allocation_peak(lambda: None, 123) == 123


def test_every_allocation_and_free_is_seen_in_order():
    def step():
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(3000, dtype=torch.uint8)
        del a
        c = torch.empty(500, dtype=torch.uint8)
        del b, c

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        step()
    assert _allocation_sizes(profiler) == [1000, 3000, -1000, 500, -3000, -500]
    assert allocation_peak(step, 70) == 4070


def test_what_an_earlier_profile_saw_allocated_is_not_freed_in_a_later_one():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True):
        held = [torch.empty(5_000, dtype=torch.uint8) for _ in range(50)]  # torch keeps their addresses
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        held.clear()
        torch.empty(400, dtype=torch.uint8)
    assert _allocation_sizes(profiler) == [400, -400]


def test_workspace_inside_one_operation_is_seen():
    x = torch.randn(64, 64)

    def step():
        with torch.no_grad():
            torch.einsum("ij,kj->ik", x, x).sort()

    tracked = Ledger().watching(nn.Module(), batch=x)
    with tracked:
        step()
    assert allocation_peak(step, tracked.measurement.held_bytes) >= tracked.measurement.peak_bytes


def test_gradients_that_a_step_finds_and_frees_are_no_workspace():
    model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 300))
    x = torch.randn(7, 300)

    def step():
        model.zero_grad()
        model(x).square().mean().backward()

    step()
    with Ledger().watching(model, batch=x) as ledger:
        step()
    measured = ledger.measurement
    assert measured.held_bytes == 2 * sum(p.nbytes for p in model.parameters()) + x.nbytes
    assert 0 <= allocation_peak(step, measured.held_bytes) - measured.peak_bytes < 64, "some scalars"


def test_the_result_of_a_step_that_raises_is_the_error():
    def step():
        raise RuntimeError("from the step")

    with pytest.raises(RuntimeError, match="from the step"):
        allocation_peak(step, 0)


def test_the_profilers_names_have_not_moved():
    import torch._C._profiler as names

    assert hasattr(names, "_ExtraFields_Allocation"), "torch._C._profiler._ExtraFields_Allocation has moved"
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        kept = torch.empty(777, dtype=torch.uint8)
    assert hasattr(profiler.profiler, "kineto_results"), "profile.profiler.kineto_results has moved"
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    pending, events = list(tree), []
    while pending:
        events.append(pending.pop())
        assert hasattr(events[-1], "children"), "the profiler's events have no `children`"
        pending.extend(events[-1].children)
    found = [e for e in events if isinstance(e.extra_fields, names._ExtraFields_Allocation)]
    assert (kept.data_ptr(), 777) in [(e.extra_fields.ptr, e.extra_fields.alloc_size) for e in found]
    assert {e.extra_fields.device.type for e in found} == {"cpu"}
    assert all(e.start_time_ns > 0 for e in found)


def test_wide_resnet_to_the_byte():
    """The demo model: tracked and allocated, and what the tracked bytes are."""
    model = WideResNet(28, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.randn(100, 3, 32, 32), torch.randint(10, (100,))

    def step():
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with Ledger().watching(model, [optimizer], (images, labels)) as ledger:
        step()
    allocated = allocation_peak(step, ledger.measurement.held_bytes)
    measured = ledger.measurement
    assert measured.peak_bytes == 399_667_176
    assert sum(measured.by_category.values()) == measured.peak_bytes
    assert measured.by_category["activations"] / measured.peak_bytes == pytest.approx(0.951, abs=0.001)
    parameters, buffers = [sum(t.nbytes for t in ts) for ts in (list(model.parameters()), list(model.buffers()))]
    assert measured.by_category["weights"] == parameters + buffers
    assert measured.by_category["optimizer_state"] == parameters
    assert measured.by_category["data"] == images.nbytes + labels.nbytes
    assert measured.held_bytes == 2 * parameters + buffers + images.nbytes + labels.nbytes
    assert allocated == 400_257_000
    assert 0 <= allocated - measured.peak_bytes <= 0.002 * allocated


def test_no_line_is_written_of_starts_and_ends():
    code = (
        "import os, torch\n"
        "from lightning_memsave.measuring.profiler_peak import AllocationProfile\n"
        "with AllocationProfile() as profiled:\n"
        "    torch.zeros(1000)\n"
        "print(profiled.peak_bytes, 'KINETO_LOG_LEVEL' in os.environ)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "rofiler" not in done.stderr
    assert done.stdout == "4000 False\n"
