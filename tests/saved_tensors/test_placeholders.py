"""What takes a tensor's place in the graph, and a repetition that fills it."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_memsave.core.errors import RegionError
from lightning_memsave.saved_tensors.placeholders import Collector, Fingerprints, Holder, Stop, is_unfilled, unpack
from lightning_memsave.saved_tensors.saved_storage import Passed


class Region:
    """The plainest one: a function of one tensor, which backward runs again."""

    def __init__(self, function):
        self.function, self.holders, self.num_runs = function, [], 0
        self.fingerprints = Fingerprints([])

    def __call__(self, x):
        self.x = x
        with saved_tensors_hooks(self._pack, unpack):
            out = self._run()
        self.fingerprints.finish()
        return out

    def _run(self):
        self.num_runs += 1
        return self.function(self.x)

    def _pack(self, tensor):
        if tensor.is_leaf and tensor.requires_grad:
            return Passed(tensor)
        holder = Holder(self, tensor)
        self.fingerprints.take(holder, tensor)
        self.holders.append(weakref.ref(holder))
        return holder

    def repeat(self):
        self.collector = collector = Collector(self.holders, "`region`")
        try:
            with torch.enable_grad(), collector.scope(None):
                self._run()
        except Stop:
            pass
        collector.check()


WEIGHT = torch.nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))


def pure(x):
    return ((x @ WEIGHT).sin().exp() @ WEIGHT).square()


def test_gradients_are_those_of_plain_torch():
    x = torch.randn(3, 8, requires_grad=True)
    region = Region(pure)
    out = region(x)
    assert region.num_runs == 1
    found = torch.autograd.grad(out.sum(), [x, WEIGHT])
    assert region.num_runs == 2, "one repetition fills every place"
    assert all(map(torch.equal, found, torch.autograd.grad(pure(x).sum(), [x, WEIGHT])))


def test_a_place_is_filled_again_for_whoever_asks_again():
    x = torch.randn(3, 8, requires_grad=True)
    region = Region(pure)
    out = region(x)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)
    second = torch.autograd.grad(out.sum(), x)
    assert region.num_runs == 3
    assert torch.equal(*first, *second)


def test_a_repetition_stops_behind_the_last_place_that_waits():
    reached = []

    def function(x):
        out = (x @ WEIGHT).sin().exp().square()
        reached.append("what is kept")
        out = out + 1
        reached.append("what is not")
        return out

    x = torch.randn(3, 8, requires_grad=True)
    region = Region(function)
    out = region(x)
    reached.clear()
    out.sum().backward()
    assert region.collector.is_complete
    assert reached == []  # exp's result, which square keeps, is the last


def changing(*functions):
    """One function in forward, another in the repetition."""
    todo = iter(functions)
    return lambda x: next(todo)(x)


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (lambda x: (x[:2] @ WEIGHT).sin().exp().square(), r"kept \[3, 8\] torch.float32 in forward and \[2, 8\]"),
        (lambda x: (x.double() @ WEIGHT.double()).sin().exp().square(), "float32 in forward and .* torch.float64"),
        (lambda x: x @ WEIGHT, "kept 4 tensors in forward and 1 when it was run again"),
        (lambda x: (2 * x @ WEIGHT).sin().exp().square(), "computed other values"),
    ],
    ids=["shape", "dtype", "number", "values"],
)
def test_a_repetition_that_does_something_else_is_refused(again, message):
    x = torch.randn(3, 8, requires_grad=True) * 1
    region = Region(changing(lambda x: (x @ WEIGHT).sin().exp().square(), again))
    out = region(x)
    with pytest.raises(RegionError, match=rf"{message}.*`region`.*Leave this module out"):
        out.sum().backward()


def test_what_nobody_holds_any_longer_is_not_waited_for():
    x = torch.randn(3, 8, requires_grad=True)
    region = Region(lambda x: ((x @ WEIGHT).sin(), (x @ WEIGHT).exp().cos()))
    first, second = region(x)
    del second
    first.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x @ WEIGHT).sin().sum(), x)[0])
    assert sum(reference() is not None for reference in region.holders) < len(region.holders)


def test_a_tensor_that_was_passed_is_given_as_it_is():
    x = torch.randn(3)
    assert unpack(Passed(x)).data_ptr() == x.data_ptr()


def test_buffers_have_no_fingerprint():
    buffer, other = torch.ones(4) * 2, torch.ones(4, requires_grad=True) * 2
    fingerprints = Fingerprints([buffer])
    of_buffer, of_other = Holder(None, buffer), Holder(None, other)
    fingerprints.take(of_buffer, buffer)
    fingerprints.take(of_other, other)
    fingerprints.finish()
    assert (of_buffer.fingerprint, of_other.fingerprint) == (None, (8.0, 8.0))


def test_noise_that_is_drawn_after_it_was_kept_is_looked_at_late():
    """RReLU's in training: autograd keeps it before the kernel fills it."""
    noise, after = torch.empty(4), [torch.ones(3, requires_grad=True) * i for i in range(3)]
    assert is_unfilled(noise)
    fingerprints, holder = Fingerprints([]), Holder(None, noise)
    fingerprints.take(holder, noise)
    assert holder.fingerprint is None
    noise.data.fill_(0.5)  # as a kernel fills it, with no version
    for each in after:
        fingerprints.take(Holder(None, each), each)
    fingerprints.finish()
    assert holder.fingerprint == (2.0, 2.0)
    assert not is_unfilled(torch.zeros(3).add_(1))
    assert not is_unfilled(torch.zeros(3, dtype=torch.int64))
