"""What a step leaves outside of its module while it runs on fake tensors."""

import functools

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_memsave.simulation.global_state_guard import outside_kept

SEEN: list[str] = []


class Table:
    def __init__(self, size):
        self.parts = {"angles": [torch.arange(size)]}


@functools.lru_cache
def table(size):
    return Table(size)


@functools.lru_cache
def settings(name):
    return object()


@functools.lru_cache
def scaled(size):
    factor = torch.ones(size)
    return lambda x: x * factor


class Net(nn.Module):
    scale = 1.0

    def forward(self, x):
        SEEN.append("forward")
        settings("net")
        type(self).scale = 2.0
        return scaled(x.numel())(x) + table(x.numel()).parts["angles"][0]


def test_only_caches_with_fake_tensors_are_emptied():
    net, mode = Net(), FakeTensorMode()
    kept = settings("net")
    table.cache_clear()
    scaled.cache_clear()
    with outside_kept(net), mode:
        net(torch.zeros(3))
        other = settings("another")
    assert table.cache_info().currsize == scaled.cache_info().currsize == 0
    assert settings("net") is kept
    assert settings("another") is other
    assert type(net(torch.zeros(3))) is torch.Tensor


def test_classes_and_files_get_back_what_they_had():
    Net.scale = 1.0
    SEEN.clear()
    net = Net()
    with outside_kept(net):
        net(torch.zeros(3))
        Net.another = 1
    assert (Net.scale, SEEN, hasattr(Net, "another")) == (1.0, [], False)
    assert "__builtins__" in globals()


@functools.lru_cache
def vocabulary():
    return [str(number) for number in range(200_000)]


def test_a_large_cache_of_the_users_own_stays_where_a_step_does_not_touch_it():
    with outside_kept(Net()):
        pass
    before = vocabulary()  # filled between two predictions
    with outside_kept(Net()):
        pass
    assert vocabulary() is before
    vocabulary.cache_clear()
