"""The trace against the ledger, and what it says about calls."""

import gc
import itertools
import math
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_memsave import Ledger
from lightning_memsave.measuring.step_trace import trace_step
from lightning_memsave.simulation.fake_model import fake_tensors
from tests.steps import STEPS, gpt2, mlp


def traced(step):
    step.model.zero_grad()
    return trace_step(step.model, step.run, held=step.batch.values())


def calls_of(model, run):
    return {call.name: call for call in trace_step(model, run).calls}


# ---------------------------------------------------------------------- bytes
@pytest.mark.parametrize("name", STEPS)
def test_the_peak_is_the_ledgers(name):
    step = STEPS[name]()
    trace, measured = traced(step), step.measured()
    assert trace.peak_bytes == measured.peak_bytes
    assert trace.start_bytes == measured.held_bytes


@pytest.mark.parametrize("name", STEPS)
def test_what_is_kept_is_what_is_alive_behind_forward(name):
    step = STEPS[name]()
    trace = traced(step)
    step.model.zero_grad()
    with Ledger().watching(step.model, batch=step.batch) as ledger:
        before = ledger.live_bytes
        loss = step.loss(step.model, step.batch)
        alive = ledger.live_bytes - before
    assert loss.requires_grad
    kept = sum(storage.num_bytes for storage in trace.storages if storage.is_kept)
    # `backward()` makes the gradient of the loss, four bytes, before autograd runs.
    assert kept == alive + 4
    live = trace.start_bytes + sum(change for change, _ in trace.events[: trace.backward_begins])
    assert live == trace.start_bytes + kept


@pytest.mark.parametrize("make", [mlp, gpt2])
def test_a_step_on_fake_tensors_has_the_operations_of_a_real_one(make):
    """Not what torch runs to ask a fake tensor for its device."""
    step = make()
    real = traced(step)
    step.model.zero_grad()
    with fake_tensors(step.model) as fake:
        batch = fake(step.batch)
        found = trace_step(step.model, lambda: step.loss(step.model, batch).backward(), held=batch.values())
    assert [op.name for op in found.ops] == [op.name for op in real.ops]
    assert found.peak_bytes == real.peak_bytes


def test_gradients_that_exist_are_booked_and_a_second_step_needs_no_more():
    step = mlp()
    first = traced(step)
    size = sum(p.nbytes for p in step.model.parameters())
    second = trace_step(step.model, step.run, held=step.batch.values())
    assert second.start_bytes == first.start_bytes + size
    assert sum(change for change, _ in first.events) == size
    assert sum(change for change, _ in second.events) == 0


def test_a_tensor_that_nobody_named_counts_as_there_before():
    step, other = mlp(), torch.zeros(1000)
    plain = traced(step)
    step.model.zero_grad()
    trace = trace_step(step.model, lambda: (other.view(10, 100), step.run()), held=step.batch.values())
    assert trace.start_bytes == plain.start_bytes + other.nbytes
    assert trace.peak_bytes == plain.peak_bytes + other.nbytes


def test_resize_is_an_event_of_the_same_storage():
    model, held = nn.Linear(1, 1), []

    def run():
        held.append(torch.zeros(10))
        held[0].resize_(100)

    trace = trace_step(model, run)
    assert [change for change, _ in trace.events] == [40, 360]
    assert {number for _, number in trace.events} == {2}
    assert trace.peak_bytes == 8 + 400


# ---------------------------------------------------------------------- calls
@pytest.mark.parametrize("name", STEPS)
def test_ranges_nest(name):
    trace = traced(STEPS[name]())
    assert trace.backward_begins is not None
    for call in trace.calls:
        assert 0 <= call.first_event <= call.last_event <= trace.backward_begins
        assert call.first_op <= call.last_op
        assert call.index not in call.children
        children = [trace.calls[index] for index in call.children]
        assert all(child.parent == call.index for child in children)
        assert all(call.first_op <= child.first_op <= child.last_op <= call.last_op for child in children)
        assert all(call.first_event <= child.first_event <= child.last_event <= call.last_event for child in children)
        assert all(a.last_op <= b.first_op for a, b in itertools.pairwise(children))
    assert [call.name for call in trace.calls if call.parent is None] == [""]


@pytest.mark.parametrize("name", STEPS)
def test_records_fit_together(name):
    trace = traced(STEPS[name]())
    for number, storage in enumerate(trace.storages):
        changes = [(at, change) for at, (change, whose) in enumerate(trace.events) if whose == number]
        if storage.born >= 0:
            assert changes[0] == (storage.born, storage.num_bytes)
            assert 0 <= storage.op < len(trace.ops)
            assert trace.ops[storage.op].event > storage.born
        if storage.died is not None:
            assert changes[-1] == (storage.died, -storage.num_bytes)
            assert storage.last_forward_use <= storage.died
        if storage.is_kept:
            assert storage.born < trace.backward_begins
            assert storage.died is None or storage.died >= trace.backward_begins
    assert all(math.isfinite(op.seconds) and op.seconds >= 0 for op in trace.ops)
    assert all(a.event <= b.event for a, b in zip(trace.ops, trace.ops[1:], strict=False))


def test_inputs_and_outputs_are_the_same_storages():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Flatten(), nn.Linear(4, 4))
    calls = calls_of(model, lambda: model(torch.zeros(2, 4)).sum().backward())
    assert calls["1"].inputs == calls["0"].outputs
    assert calls["2"].inputs == calls["2"].outputs == calls["1"].outputs  # a view of what it was given
    assert calls[""].outputs == calls["3"].outputs


def test_keyword_inputs_are_seen():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, *, state):
            return self.linear(state["x"])

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), Inner()

        def forward(self, x):
            return self.inner(state={"x": self.first(x)})

    model = Outer()
    calls = calls_of(model, lambda: model(torch.zeros(2, 4)).sum().backward())
    assert len(calls["inner"].inputs) == 1
    assert calls["inner"].inputs == calls["first"].outputs == calls["inner.linear"].inputs


def test_a_module_called_twice_has_two_records():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    trace = trace_step(model, lambda: model(model(torch.zeros(2, 4))).sum().backward())
    assert [call.name for call in trace.calls] == ["", "0", "1"] * 2
    assert [call.index for call in trace.calls if call.parent is None] == [0, 3]


def test_backward_reaches_calls_in_reverse():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    trace = trace_step(model, lambda: model(torch.zeros(2, 4)).sum().backward())
    reached = [call.backward_event for call in trace.calls if call.name]
    assert reached == sorted(set(reached), reverse=True)
    assert reached[-1] >= trace.backward_begins


def test_requires_grad_is_whether_backward_comes_by():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    calls = calls_of(model, lambda: model(torch.zeros(2, 4)).sum().backward())
    assert [calls[name].requires_grad for name in ("0", "1", "2")] == [False, True, True]
    assert calls["0"].backward_event is None

    with torch.no_grad():
        assert not calls_of(model, lambda: model(torch.zeros(2, 4)))["2"].requires_grad


def test_a_call_whose_result_is_thrown_away_is_never_reached():
    class Wasteful(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            self.unused(x)
            return self.used(x)

    model = Wasteful()
    calls = calls_of(model, lambda: model(torch.zeros(2, 4)).sum().backward())
    assert calls["unused"].requires_grad
    assert calls["unused"].backward_event is None


class Edits(nn.Module):
    def forward(self, x, more=()):
        for tensor in more:
            tensor.add_(1)
        return x * 2


def test_edits_of_inputs_are_found_also_in_containers():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.ReLU())
    calls = calls_of(model, lambda: model(torch.zeros(2, 4)).sum().backward())
    assert [name for name, call in calls.items() if call.edits_input] == ["1"]

    outer = nn.Sequential(Edits())
    x = torch.zeros(2, 4)
    assert calls_of(outer, lambda: outer[0](x, more=[x.clone()]))["0"].edits_input
    assert not calls_of(outer, lambda: outer[0](x, more=[]))["0"].edits_input


def test_a_cache_that_is_passed_along_is_edited():
    step = gpt2()
    calls = calls_of(step.model, step.run)
    edits = [name for name, call in calls.items() if call.edits_input]
    assert edits == [f"transformer.h.{i}{inner}" for i in range(2) for inner in ("", ".attn")]
    step = gpt2(use_cache=False)
    assert not any(call.edits_input for call in calls_of(step.model, step.run).values())


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.shapes = nn.Linear(4, 4), [None]

    def forward(self, x):
        self.shapes.append(x.shape)
        return self.linear(x)


class Caches(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.mask = nn.Linear(4, 4), None

    def forward(self, x):
        if self.mask is None:
            self.mask = torch.ones(4)
        return self.linear(x) * self.mask


def test_a_side_effect_is_of_the_module_and_all_around_it():
    model = nn.Sequential(nn.Sequential(Counts(), nn.Tanh()), nn.Linear(4, 4))
    calls = calls_of(model, lambda: model(torch.zeros(2, 4)).sum().backward())
    assert {name for name, call in calls.items() if call.side_effect} == {"", "0", "0.0"}
    assert calls["0.0"].side_effect == "0.0.shapes"


def test_a_cache_that_is_filled_once_is_no_side_effect():
    model = nn.Sequential(Caches(), Caches())
    for _ in range(2):
        calls = calls_of(model, lambda: model(torch.zeros(2, 4)).sum().backward())
        assert not any(call.side_effect for call in calls.values())


# ---------------------------------------------------------------------- afterwards
def test_nothing_of_the_step_lives_on_and_the_model_is_as_before():
    step = mlp()
    seen = []
    handle = step.model[1].register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out)))
    before = {name: set(vars(m)) for name, m in step.model.named_modules()}
    hooks = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in step.model.named_modules()}
    trace = traced(step)
    assert [reference() for reference in seen] == [None]
    assert {name: set(vars(m)) for name, m in step.model.named_modules()} == before
    assert hooks == {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in step.model.named_modules()}
    assert _get_current_dispatch_mode_stack() == []
    num_events = len(trace.events)
    handle.remove()
    model, batch = weakref.ref(step.model), weakref.ref(step.batch["x"])
    del step
    gc.collect()
    assert model() is None
    assert batch() is None
    assert len(trace.events) == num_events  # what died since is nobody's business


def test_an_exception_in_the_step_leaves_nothing_behind():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))
    with pytest.raises(RuntimeError, match="shapes"):
        trace_step(model, lambda: model(torch.zeros(2, 4)))
    assert _get_current_dispatch_mode_stack() == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    fine = nn.Sequential(nn.Linear(4, 4))
    assert len(trace_step(fine, lambda: fine(torch.zeros(2, 4)).sum().backward()).calls) == 2


def test_a_trace_does_not_change_what_is_computed():
    step = mlp()
    step.model.zero_grad()
    step.run()
    plain = [p.grad for p in step.model.parameters()]
    state = torch.get_rng_state()
    traced(step)
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, step.model.parameters(), strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("traced_first", [False, True])
def test_a_compiled_module_is_traced_eagerly_and_compiled_afterwards(traced_first):
    torch._dynamo.reset()
    counter, runs = CompileCounter(), []

    def counting(graph, inputs):
        compiled = counter(graph, inputs)

        def run(*args):
            runs.append(1)
            return compiled(*args)

        return run

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.zeros(2, 4)
    model[0] = torch.compile(model[0], backend=counting)
    if not traced_first:
        model(x).sum().backward()
        assert len(runs) == 1
    trace_step(model, lambda: model(x).sum().backward())
    assert len(runs) == (0 if traced_first else 1)
    for _ in range(2):
        model(x).sum().backward()
    assert counter.frame_count == 1
    assert len(runs) == (2 if traced_first else 3)
    torch._dynamo.reset()
