"""Copies of modules to which methods are bound."""

import functools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_memsave.torch_internals.model_copies import copied


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


def by_method(module):
    before = module.forward
    return types.MethodType(lambda self, x: before(x), module)


def by_partial(module):
    return functools.partial(lambda body, x: 2 * module.body(x), module.body)


def by_list(module):
    parts = [module.body, 2]
    return lambda x: parts[1] * parts[0](x)


def by_itself(module):
    def forward(x, depth=0):
        return 2 * module.body(x) if depth else forward(x, 1)

    return forward


@pytest.mark.parametrize("wrap", [by_method, by_partial, by_list, by_itself])
def test_and_so_do_methods_partials_containers_and_functions_that_know_themselves(wrap):
    test_functions_that_know_a_module_know_its_copy(wrap)


def by_container(module):
    registry = {"body": module.body, "calls": [0]}
    registry["all"] = registry  # holds itself

    def count(body, args):
        registry["calls"][0] += 1
        assert registry["body"] is body

    module.body.register_forward_pre_hook(count)
    return lambda x: 2 * registry["all"]["body"](x) if registry["calls"] else None


def test_containers_that_two_functions_hold_are_one_for_the_copy():
    test_functions_that_know_a_module_know_its_copy(by_container)


def test_functions_that_share_a_variable_share_the_copys():
    model = nn.Linear(2, 2)
    calls, seen = 0, []

    def read(module, args):
        seen.append(calls)

    def count(module, args, out):
        nonlocal calls
        calls += module is model

    model.register_forward_pre_hook(read)
    model.register_forward_hook(count)
    twin = copied(model)
    for _ in range(3):
        twin(torch.ones(1, 2))
    assert seen == [0, 1, 2]
    assert calls == 0
    model(torch.ones(1, 2))
    assert calls == 1


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_attributes_that_autograd_has_computed_are_copied_without_their_graph():
    model = torch.nn.utils.weight_norm(nn.Linear(2, 2))
    model.hidden = [model(torch.ones(1, 2))]
    twin = copied(model)
    assert torch.equal(twin.weight, model.weight)
    assert twin.weight.is_leaf
    assert torch.equal(twin.hidden[0], model.hidden[0])
    twin(torch.ones(1, 2)).sum().backward()
    assert twin.weight_g.grad is not None
    assert model.weight_g.grad is None


def test_parameters_of_torchscript_are_leaves_in_the_copy():
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    twin = copied(model)
    assert [(p.is_leaf, p.requires_grad) for p in twin.parameters()] == [
        (True, p.requires_grad) for p in model.parameters()
    ]
    twin(torch.ones(1, 2)).sum().backward()
    assert model[0].weight.grad is None
    assert twin[0].weight.grad is not None
