"""Compiled modules are found, called within something, and given back."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from lightning_memsave.torch_internals.compiled_regions import (
    compiled_functions,
    compiled_regions,
    num_compiled_graphs,
    shield,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh()


def model(counter):
    """Three blocks: eager, compiled in place, compiled and wrapped."""
    net = nn.Sequential(Block(), Block(), torch.compile(Block(), backend=counter))
    net[1].compile(backend=counter)
    return net


@pytest.fixture
def counter():
    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


def test_both_ways_to_compile_are_found(counter):
    net = model(counter)
    assert [name for name, _ in compiled_regions(net)] == ["1", "2"]
    assert [module for _, module in compiled_regions(net)] == [net[1], net[2]]
    assert list(compiled_regions(nn.Sequential(Block()))) == []
    whole = torch.compile(Block(), backend=counter)
    assert [name for name, _ in compiled_regions(whole)] == [""]
    assert counter.frame_count == 0


@torch.compile(backend="eager")
def in_this_file(x):
    return x


def test_compiled_functions_are_found_by_name(counter):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside, self.twice = model(counter), torch.compile(lambda x: 2 * x, backend=counter)
            self.inside[0].forward = torch.compile(self.inside[0].forward, backend=counter)

        @torch.compile(backend="eager")
        def method(self, x):
            return x

        @torch.compiler.disable
        def not_compiled(self, x):
            return x

    assert sorted(compiled_functions(Net())) == ["in_this_file", "inside.0.forward", "method", "twice"]
    assert compiled_functions(nn.Linear(2, 2)) == []


def test_each_call_of_a_compiled_module_is_within_and_the_result_is_the_same(counter):
    net, x, seen = model(counter), torch.randn(3, 4), []
    with torch.no_grad():
        expected = net(x)
    assert counter.frame_count >= 1

    @contextlib.contextmanager
    def unseen(name):
        seen.append(("begin", name))
        yield
        seen.append(("end", name))

    undo = shield(net, unseen)
    num_frames = counter.frame_count
    with torch.no_grad():
        assert torch.equal(net(x), expected)
        assert seen == [("begin", "1"), ("end", "1"), ("begin", "2"), ("end", "2")]
        for each in undo:
            each()
        assert torch.equal(net(x), expected)
    assert len(seen) == 4
    assert counter.frame_count == num_frames  # and nothing was compiled again


def test_a_module_is_as_before(counter):
    net = model(counter)
    before = [vars(module).copy() for module in net.modules()]
    keys = list(net.state_dict())
    undo = shield(net, lambda name: contextlib.nullcontext())
    assert list(net.state_dict()) == keys
    for each in undo:
        each()
    after = [vars(module) for module in net.modules()]
    assert [attributes.keys() for attributes in after] == [attributes.keys() for attributes in before]
    assert all(a[name] is b[name] for a, b in zip(after, before, strict=True) for name in a)


def test_an_error_inside_leaves_what_is_around_it(counter):
    net, ended = model(counter), []

    @contextlib.contextmanager
    def unseen(name):
        try:
            yield
        finally:
            ended.append(name)

    shield(net, unseen)
    with pytest.raises((RuntimeError, TypeError)):
        net[1](torch.zeros(3, 5))
    assert ended == ["1"]


def test_graphs_are_counted_as_they_are_compiled(counter):
    before = num_compiled_graphs()
    function = torch.compile(lambda x: x.sin() + 1, backend=counter, dynamic=False)
    assert num_compiled_graphs() == before
    function(torch.zeros(3))
    function(torch.zeros(3))
    assert num_compiled_graphs() == before + 1
    function(torch.zeros(4))
    assert num_compiled_graphs() == before + 2
