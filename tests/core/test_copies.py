"""Copies of modules to which methods are bound."""

import functools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.core.copies import copied


def configured(module, optimizer):
    return optimizer


def test_an_optimizer_that_is_bound_belongs_to_the_copy():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.5)
    model.configure_optimizers = types.MethodType(functools.partial(configured, optimizer=optimizer), model)
    twin = copied(model)
    found = twin.configure_optimizers()
    assert found is not optimizer
    assert found.param_groups[0]["params"][0] is twin.weight
    assert found.param_groups[0]["lr"] == 0.5
    assert model.configure_optimizers() is optimizer


class Doubling(nn.Module):
    """Whose `forward` is replaced, and whose hook is a closure."""

    def __init__(self, wrap):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.seen = []
        self.forward = wrap(self)
        self.body.register_forward_hook(lambda module, args, out: self.seen.append(out))

    def forward(self, x):
        return 2 * self.body(x)


def by_default(module):
    return lambda x, *, module=module: 2 * module.body(x)


def by_closure(module):
    before = module.forward

    @functools.wraps(before)
    def forward(x):
        return before(x)

    return forward


def twice_wrapped(module):
    inner = by_closure(module)
    return lambda x: inner(x)


@pytest.mark.parametrize(
    "wrap", [by_default, by_closure, twice_wrapped, lambda m: torch.compile(m.forward, backend="eager")]
)
def test_functions_that_know_a_module_know_its_copy(wrap):
    model = Doubling(wrap)
    twin = copied(model)
    twin(torch.ones(1, 2)).sum().backward()
    assert model.body.weight.grad is None
    assert not model.seen
    assert torch.equal(twin.body.weight.grad, torch.full((2, 2), 2.0))
    assert len(twin.seen) == 1
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.body.weight.grad, torch.full((2, 2), 2.0))
    assert (len(model.seen), len(twin.seen)) == (1, 1)


def test_functions_that_know_nothing_of_it_stay():
    model = nn.Linear(2, 2)
    model.activation = F.relu
    assert copied(model).activation is F.relu
