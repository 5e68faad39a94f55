import gc
import itertools
import statistics
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_memsave.core.report import CATEGORIES, MemoryReport
from lightning_memsave.measuring import Ledger, Meter, allocation_peak
from lightning_memsave.measuring import meter as meter_module
from lightning_memsave.measuring.allocator import AllocatorBytes
from lightning_memsave.measuring.ledger import Measurement
from lightning_memsave.measuring.meter import stop_measuring
from tests.measuring.test_allocator import fake_device  # noqa: F401  # a fixture

CPU = torch.device("cpu")


class Run:
    """A model, and steps whose peak is known: weight + data + `elements` more float32."""

    def __init__(self, meter, device=CPU):
        self.meter, self.device = meter, device
        self.model, self.batch = nn.Linear(8, 8, bias=False), torch.zeros(4, 8)
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1)]
        self.base = 8 * 8 * 4 + 4 * 8 * 4

    def step(self, elements=100, inside=lambda: None):
        self.meter.begin(self.model, self.optimizers, self.batch, self.device)
        torch.empty(elements)
        inside()
        return self.meter.end()

    def measured_steps(self, last):
        return [number for number in range(1, last + 1) if self.step() is not None]


def test_every_must_be_positive():
    for every in (0, -1):
        with pytest.raises(ValueError, match=f"`every` must be a positive integer, got {every}"):
            Meter(every=every)


@pytest.mark.parametrize(
    ("every", "expected"),
    [(200, [2, 3]), (5, [2, 3, 5, 10]), (3, [2, 3, 6, 9, 12]), (2, [2, 3, 4, 6, 8, 10, 12]), (1, [*range(2, 13)])],
)
def test_which_steps_are_measured(every, expected):
    # Never the first: a region that is compiled in it would stay eager for the whole run.
    meter = Meter(every=every)
    assert Run(meter).measured_steps(12) == expected
    assert meter.num_steps_measured == len(expected)


def test_the_default_is_every_200():
    run = Run(Meter())
    assert run.measured_steps(401) == [2, 3, 200, 400]


def test_a_measurement_is_that_of_its_step():
    meter = Meter()
    run = Run(meter)
    assert run.step(1000) is None
    assert meter.report() == MemoryReport()
    assert run.step(10).peak_bytes == run.base + 40
    assert run.step(30).peak_bytes == run.base + 120
    assert run.step(1000) is None


def test_the_report_keeps_the_highest_peak():
    meter = Meter(every=4)
    run = Run(meter)
    for elements in (1, 10, 30, 20):
        run.step(elements)
    report = meter.report()
    assert report.peak_bytes == run.base + 120
    assert set(report.by_category) == set(CATEGORIES)
    assert report.by_category["temporary"] == 120
    assert report.by_category["weights"] == 256
    assert report.by_category["data"] == 128
    assert sum(report.by_category.values()) == report.peak_bytes
    assert report.num_steps_measured == 3
    assert report.reserved_bytes is None
    report.by_category["data"] = 0
    assert meter.report().by_category["data"] == 128  # each report is a copy


def test_batches_between_two_updates_are_one_step():
    model, measured = torch.nn.Linear(2, 2), []
    meter = Meter(every=5)
    for batch in range(24):  # two batches for each update
        meter.begin(model, [], (), torch.device("cpu"), num_updates=batch // 2)
        measured += [batch // 2 + 1] if meter.end() is not None else []
    assert measured == [2, 2, 3, 3, 5, 5, 10, 10]


def test_what_is_measured_next_is_a_whole_step_with_the_batches_that_it_accumulates():
    model, meter, measured = nn.Linear(2, 2), Meter(every=100), []
    for batch in range(30):
        meter.begin(model, [], (), torch.device("cpu"), num_updates=batch // 3)
        meter.end()
        measured += [batch] if meter.tracked is not None else []
        if batch == 19:
            meter.measure_next()
    assert measured == [3, 4, 5, 6, 7, 8, 20, 21, 22, 23]


def test_a_loop_that_hides_its_optimizers_is_measured_batch_by_batch_in_the_end():
    model, meter, measured = torch.nn.Linear(2, 2), Meter(), []
    for batch in range(1, 262):
        meter.begin(model, [], (), torch.device("cpu"), num_updates=0)
        measured += [batch] if meter.end() is not None else []
    assert measured == [258, 259]


def speed(meter):
    meter.end_step()
    report = meter.report()
    return report.step_seconds, report.samples_per_second


def test_a_batch_without_an_end_leaves_no_ledger_behind():
    model, meter = torch.nn.Linear(2, 2), Meter(every=1)
    for _ in range(3):
        meter.begin(model, [], (), torch.device("cpu"))
    assert len(_get_current_dispatch_mode_stack()) == 1
    meter.abandon()
    assert _get_current_dispatch_mode_stack() == []
    fresh = Meter()
    assert fresh.end() is None
    assert speed(fresh) == (None, None)


def test_abandon_leaves_the_ledger_and_is_safe_at_any_time():
    meter = Meter()
    assert meter.abandon() is None
    run = Run(meter)
    run.step()
    meter.begin(run.model, run.optimizers, run.batch, CPU)
    assert len(_get_current_dispatch_mode_stack()) == 1
    assert meter.abandon().peak_bytes == run.base
    assert _get_current_dispatch_mode_stack() == []
    assert meter.abandon() is None
    assert meter.end() is None
    assert meter.num_steps_measured == 0
    assert run.step().peak_bytes == run.base + 400


def test_an_exception_in_a_measured_step():
    meter = Meter()
    run = Run(meter)
    run.step()

    def fail():
        run.model(torch.zeros(2, 9))

    with pytest.raises(RuntimeError, match="shapes"):
        run.step(inside=fail)
    meter.abandon()
    assert _get_current_dispatch_mode_stack() == []
    assert not run.model.weight._post_accumulate_grad_hooks


def test_the_meter_keeps_neither_model_nor_batch():
    meter = Meter()
    run = Run(meter)
    run.step()
    run.step()
    references = [weakref.ref(run.model), weakref.ref(run.batch), weakref.ref(run.optimizers[0])]
    del run
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_step_seconds_are_of_the_unmeasured_steps(monkeypatch):
    clock = iter(range(10**6))
    durations = iter([100, 100, 100, 5, 9, 6, 100, 4])  # the first, and the measured 2, 3 and 7, are slow
    now = [0.0]

    def perf_counter():
        now[0] += next(durations) if next(clock) % 2 else 0
        return now[0]

    monkeypatch.setattr(meter_module, "time", SimpleNamespace(perf_counter=perf_counter))
    meter = Meter(every=7)
    run = Run(meter)
    assert speed(meter) == (None, None)
    for _ in range(3):
        run.step()
    assert speed(meter) == (None, None)
    for _ in range(3):
        run.step()
    assert speed(meter) == (6, None)
    for _ in range(2):
        run.step()
    assert speed(meter) == (statistics.median([5, 9, 6, 4]), None)  # of the run, not of its last epoch


# ---------------------------------------------------------------------- where the allocator counts
@pytest.fixture
def on_device(monkeypatch, fake_device):  # noqa: F811
    monkeypatch.setattr(meter_module, "Ledger", lambda device: Ledger("cpu"))
    run = Run(Meter(every=200), torch.device("cuda", 0))
    fake_device.allocate(run.base)

    def step(elements=100, workspace=0):
        def inside():
            fake_device.allocate(4 * elements + workspace)
            fake_device.allocate(-4 * elements - workspace)

        return run.step(elements, inside)

    return SimpleNamespace(run=run, meter=run.meter, step=step, device=fake_device)


def test_the_remainder_of_the_allocator_is_temporary(on_device):
    on_device.step()
    measured = on_device.step(100, workspace=1000)
    assert measured.peak_bytes == on_device.run.base + 400 + 1000
    assert measured.by_category["temporary"] == 400 + 1000
    assert measured.by_category["weights"] == 256
    assert sum(measured.by_category.values()) == measured.peak_bytes
    report = on_device.meter.report()
    assert report.peak_bytes == measured.peak_bytes
    assert dict(report.by_category) == measured.by_category
    assert report.reserved_bytes == 2**21


def test_the_allocator_measures_every_step_after_the_first_tracked(on_device):
    assert on_device.step() is None
    peaks = [on_device.step(100, workspace).peak_bytes for workspace in (8, 16, 32, 4000)]
    assert peaks == [on_device.run.base + 400 + workspace for workspace in (8, 16, 32, 4000)]
    assert on_device.meter.report().peak_bytes == peaks[-1]
    assert on_device.meter.num_steps_measured == 4
    assert len(on_device.device.resets) == 5


def test_reserved_bytes_are_the_highest(on_device):
    on_device.step()
    on_device.step(100, workspace=5 * 2**20)
    on_device.device.reserved = 2**21
    on_device.step()
    assert on_device.meter.report().reserved_bytes == 6 * 2**20


def test_a_smaller_step_has_no_negative_category(on_device):
    run, device = on_device.run, on_device.device

    def step(elements):
        def inside():
            activation = run.model(torch.zeros(elements, 8))
            device.allocate(64 * elements)
            activation.sum().backward()
            device.allocate(-64 * elements)

        return run.step(0, inside)

    for _ in range(3):
        step(5000)
    smaller = step(10)  # as the last batch of an epoch; not tracked
    if smaller is not None:
        assert smaller.peak_bytes == run.base + 640
        assert sum(smaller.by_category.values()) == smaller.peak_bytes
        assert min(smaller.by_category.values()) >= 0


# ---------------------------------------------------------------------- torch.compile
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("first_measured", [False, True])
def test_a_compiled_region_is_compiled_once_and_used_in_every_unmeasured_step(backend, first_measured):
    torch._dynamo.reset()
    counter, runs, measured = CompileCounter(), [], []

    def counting(graph, inputs):
        counter(graph, inputs)
        compiled = torch._dynamo.lookup_backend(backend)(graph, inputs)

        def run(*args):
            runs.append(len(measured) + 1)
            return compiled(*args)

        return run

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0] = torch.compile(model[0], backend=counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter, x = Meter(every=200), torch.randn(4, 16)
    if first_measured:  # a run may also meet its first compiled region under the ledger
        with Ledger().watching(model, [optimizer], x):
            model(x)
        assert runs == []
    for _ in range(5):
        meter.begin(model, [optimizer], x, CPU)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        measured.append(meter.end())
        assert counter.frame_count == 1
    assert [m is not None for m in measured] == [False, True, True, False, False]
    assert measured[1].by_category["activations"] > 0
    assert set(runs) >= {1, 4, 5}
    torch._dynamo.reset()


def test_the_compilers_stance_is_restored():
    assert hasattr(torch.compiler, "set_stance"), "torch.compiler.set_stance has moved"
    from torch._dynamo import eval_frame

    before = eval_frame._stance
    run = Run(Meter())
    run.step()
    seen = []
    run.step(inside=lambda: seen.append(eval_frame._stance.stance))
    assert seen == ["force_eager"]
    assert eval_frame._stance == before


# ---------------------------------------------------------------------- accumulated batches, and workspace
def accumulated(run, num_steps, num_batches, inside=lambda is_last: None):
    """Steps of several batches, as Lightning counts them."""
    for step in range(num_steps):
        for batch in range(num_batches):
            run.meter.begin(run.model, run.optimizers, run.batch, CPU, num_updates=step, num_samples=4)
            torch.empty(100)
            inside(batch == num_batches - 1)
            run.meter.end()


def test_a_steps_time_is_that_of_all_its_batches(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(meter_module.time, "perf_counter", lambda: next(now))  # a second between two looks at it
    meter = Meter()
    accumulated(Run(meter), num_steps=6, num_batches=4)
    assert meter.num_steps_measured == 2
    assert speed(meter) == (4, 4.0)


def test_a_step_that_was_left_in_the_middle_has_no_time(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(meter_module.time, "perf_counter", lambda: next(now))
    meter = Meter()
    run = Run(meter)
    accumulated(run, num_steps=5, num_batches=4)
    assert meter.report().step_seconds is None  # the one before the last is the first that counts
    meter.begin(run.model, run.optimizers, run.batch, CPU, num_updates=5, num_samples=4)
    meter.end()
    meter.end_step(num_updates=5)
    assert meter.report().step_seconds == 4
    meter.end_step(num_updates=6)
    assert meter.report().step_seconds == statistics.median([4, 4, 1])


def hidden(num_elements):
    """Memory that no operation returns, as workspace is."""
    with torch.utils._python_dispatch._disable_current_modes():
        torch.empty(num_elements)


def test_workspace_beside_what_is_met_in_the_step():
    outside = torch.zeros(1000)

    def inside():
        outside.view(10, 100)
        hidden(512)

    run = Run(Meter(workspace=True))
    for _ in range(5):
        run.step(100, inside)
    report = run.meter.report()
    assert report.peak_bytes == run.base + 4000 + 400
    assert report.workspace_bytes == 4 * (512 - 100)


def test_workspace_is_that_of_the_batch_that_was_measured():
    """Of the last one, which updates."""
    run = Run(Meter(workspace=True))
    accumulated(run, num_steps=5, num_batches=3, inside=lambda is_last: hidden(512 if is_last else 2048))
    assert run.meter.report().workspace_bytes == 4 * (512 - 100)


def test_workspace_needs_a_step_between_measured_ones():
    with pytest.raises(ValueError, match="`every` must be 2 or more with `workspace=True`, got 1"):
        Meter(1, workspace=True)


# ---------------------------------------------------------------------------------------------- compiled code
def test_compiled_code_is_measured_by_events_of_the_allocator():
    """As `allocation_peak` sees it, gradients of the step before that end in this one included."""
    torch.compiler.reset()

    class Inner(nn.Module):  # of torch's own containers, nothing is compiled
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return F.dropout(self.last(self.first(x).tanh()))

    inner = Inner()
    inner.compile(backend="aot_eager")
    model, x = nn.Sequential(inner), torch.randn(32, 64)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    meter = Meter()
    for _ in range(3):
        meter.begin(model, [optimizer], x, CPU)
        step()
        meter.end()
    report = meter.report()
    assert report.num_steps_measured == 2
    held = x.nbytes + 3 * sum(p.nbytes for p in model.parameters())
    assert report.peak_bytes == allocation_peak(step, held)
    assert report.by_category["activations"] == report.peak_bytes - held
    assert sum(report.by_category.values()) == report.peak_bytes


def test_a_compiled_function_is_seen_when_it_is_compiled_in_the_run():
    torch.compiler.reset()
    counter = CompileCounter()
    function, ran = torch.compile(lambda x: x.sin(), backend=counter), []
    meter, model, x = Meter(), nn.Linear(8, 8), torch.randn(2, 8)
    for _ in range(3):
        meter.begin(model, [], x, CPU)
        ran.append(_get_current_dispatch_mode_stack())
        function(model(x).detach())
        meter.end()
    assert ran == [[], [], []]
    assert meter.report().num_steps_measured == 2


def test_compiled_code_is_not_measured_while_somebody_else_profiles():
    inner = nn.Linear(8, 8)
    inner.compile(backend=CompileCounter())
    meter, model, x = Meter(), nn.Sequential(inner), torch.randn(2, 8)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        for _ in range(3):
            meter.begin(model, [], x, CPU)
            model(x)
            assert meter.end() is None


# ---------------------------------------------------------------------------------------------- accelerators
def test_compiled_code_is_measured_by_the_allocator_where_it_counts(monkeypatch):
    """Under the ledger it would run eagerly, and take what eager code takes."""
    peak = AllocatorBytes(allocated_bytes=5000, reserved_bytes=9000)
    monkeypatch.setattr(meter_module.allocator, "counts_peaks", lambda device: True)
    monkeypatch.setattr(meter_module.allocator, "reset_peak", lambda device: None)
    monkeypatch.setattr(meter_module.allocator, "read_peak", lambda device: peak)
    compiled = torch.compile(nn.Linear(8, 8), backend=CompileCounter())
    for model, flag in ((compiled, False), (nn.Linear(8, 8), True)):
        meter = Meter()
        for step in range(1, 4):
            meter.begin(model, [], torch.zeros(4), CPU, is_compiled=flag)
            assert _get_current_dispatch_mode_stack() == []
            assert (meter.end() is None) is (step == 1)
        assert meter.report().peak_bytes == 5000
        assert meter.report().by_category == {
            **dict.fromkeys(CATEGORIES, 0),
            "weights": 288,
            "data": 16,
            "activations": 5000 - 304,
        }
    meter = Meter()
    run = Run(meter)
    assert run.step() is None
    assert run.step(30).by_category["temporary"] == 5000 - run.base


def test_time_on_a_device_is_between_marks_in_its_own_work(monkeypatch):
    log = []

    class Event:
        def __init__(self, device, enable_timing):
            assert enable_timing
            self.name = f"event {len(log)}"
            log.append(self.name)

        def record(self):
            log.append(f"record {self.name}")

        def synchronize(self):
            log.append(f"wait for {self.name}")

        def elapsed_time(self, end):
            return 1500.0  # milliseconds

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    stop = meter_module._stopwatch(torch.device("cuda", 0))
    read = stop()
    assert log == ["event 0", "event 1", "record event 0", "record event 1"]
    assert read() == 1.5
    assert log[-1] == "wait for event 1"


def test_measuring_can_be_stopped_from_elsewhere():
    meter = Meter(every=1)
    run = Run(meter)
    run.step()
    assert not stop_measuring()
    meter.begin(run.model, run.optimizers, run.batch, CPU)
    held = torch.zeros(1000)
    assert stop_measuring()
    assert _get_current_dispatch_mode_stack() == []
    assert not stop_measuring()
    assert meter.end().peak_bytes == run.base + held.nbytes  # as every process must report its steps
    assert meter.tracked is not None
    assert speed(meter) == (None, None)


def test_a_try_that_took_more_than_the_step_has_no_negative_category():
    seen = Measurement(peak_bytes=100, by_category={**dict.fromkeys(CATEGORIES, 0), "weights": 40, "temporary": 60})
    found = meter_module._with_allocator(seen, AllocatorBytes(allocated_bytes=70, reserved_bytes=0), "activations")
    assert found.by_category == {**dict.fromkeys(CATEGORIES, 0), "weights": 40, "temporary": 30}
