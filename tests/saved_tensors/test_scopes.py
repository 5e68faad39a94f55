"""Where a scope begins and ends: nesting, errors, threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from lightning_memsave.saved_tensors import refuses_hooks
from tests.saved_tensors.nets import Attention, assert_same_bits, cnn, data, exact, gradients, int8


def test_a_scope_without_grad_keeps_nothing():
    store = int8()
    with torch.no_grad(), store.scope():
        nn.Linear(8, 8)(torch.randn(4, 8))
    assert store.tally.entries == {}


def test_nested_scopes_are_one():
    store, x = exact(), torch.randn(2, 3, 8, 8)

    class Nested(nn.Sequential):
        def forward(self, y):
            first, *rest = self
            with store.scope():
                y = first(y)
            return nn.Sequential(*rest)(y)

    model = Nested(*cnn())
    model(x)
    assert_same_bits(gradients(model, x, store), gradients(nn.Sequential(*model), x))
    assert store.tally.entries["recomputed"] >= 4


def test_two_stores_nest_and_the_inner_one_keeps():
    outer, inner = int8(), int8()
    with outer.scope():
        with inner.scope():
            a = data(16, 16).sin()
        b = data(16, 16).cos()
    assert (sum(inner.tally.entries.values()), sum(outer.tally.entries.values())) == (1, 1)
    (a + b).sum().backward()


def test_an_exception_inside_leaves_the_store_usable():
    store, model, x = exact(), cnn(), torch.randn(2, 3, 8, 8)
    model(x)
    with pytest.raises(RuntimeError, match="channels"), store.scope():
        model(torch.randn(2, 4, 8, 8))
    assert store.entries() == []
    assert torch._C._len_torch_function_stack() == 0
    assert_same_bits(gradients(model, x, store), gradients(model, x))


def test_transforms_of_torch_func_refuse_and_are_told():
    with pytest.raises(RuntimeError) as caught, int8().scope():
        torch.func.grad(lambda t: t.sin().sum())(torch.randn(4))
    assert refuses_hooks(caught.value)
    assert not refuses_hooks(RuntimeError("something else"))


def test_another_thread_may_run_backward():
    model, x, store = cnn(), torch.randn(2, 3, 8, 8), exact()
    model(x)
    plain = gradients(model, x)
    with store.scope():
        loss = model(x.requires_grad_()).square().mean()

    def step():
        torch.set_num_threads(1)  # holds for one thread
        loss.backward()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
    assert all(torch.equal(p.grad, plain[name]) for name, p in model.named_parameters())


def test_threads_with_stores_of_their_own_do_not_meet():
    model, x = Attention(p=0.0), torch.randn(2, 8, 16)
    plain, found = gradients(model, x), []

    def step():
        torch.set_num_threads(1)
        with exact().scope():
            loss = model(x).square().mean()
        found.append(torch.autograd.grad(loss, list(model.parameters())))

    threads = [threading.Thread(target=step) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [name for name, _ in model.named_parameters()]
    assert len(found) == 4
    for grads in found:
        assert all(torch.equal(g, plain[name]) for name, g in zip(names, grads, strict=True))
