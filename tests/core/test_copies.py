"""Copies of modules to which methods are bound."""

import functools
import types

import torch
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
