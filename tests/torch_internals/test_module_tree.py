"""The modules inside of a module are those that torch yields, in torch's order."""

from __future__ import annotations

import random

import pytest
from torch import nn

from lightning_memsave.torch_internals.module_tree import modules_by_name


def random_tree(depth: int, made: list[nn.Module], draw: random.Random) -> nn.Module:
    """Return a module with children, some of which are in other places of the tree as well, or are none."""
    module = nn.Module()
    for number in range(draw.randrange(4) if depth else 0):
        chance = draw.random()
        if chance < 0.2:
            module.register_module(f"child{number}", None)
        elif chance < 0.5 and made:
            module.add_module(f"child{number}", draw.choice(made))
        else:
            module.add_module(f"child{number}", random_tree(depth - 1, made, draw))
    made.append(module)
    return module


@pytest.mark.parametrize("seed", range(30))
def test_it_finds_what_torch_finds(seed):
    root = random_tree(4, [], random.Random(seed))
    assert modules_by_name(root) == list(root.named_modules())


def test_a_module_that_holds_itself_is_found_once():
    root = nn.Sequential(nn.Linear(1, 1))
    root[0].add_module("back", root)
    assert modules_by_name(root) == list(root.named_modules())


def test_changes_are_seen_at_once():
    """Nothing is remembered between two calls: a child may come and go in any way."""
    root = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    modules_by_name(root)
    root._modules["1"] = nn.Tanh()
    del root[0]
    assert modules_by_name(root) == list(root.named_modules())
