"""What a module in regions remembers from call to call."""

from __future__ import annotations

import random

import torch
from torch import nn

from lightning_memsave.saved_tensors.region_members import Group, Member, Membership


def test_the_first_calls_and_then_ever_rarer_ones_are_checked():
    member = Member("block", [], None)
    checked = []
    for number in range(70):
        member.num_calls = number
        if member.is_checked:
            checked.append(number)
    assert checked == [0, 1, 2, 3, 4, 8, 16, 32, 64]


class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x


def test_the_forward_that_computes_is_that_of_the_class():
    module, member = Doubling(), Member("", [], None)
    module.forward = lambda x: 1 / 0  # as the one that is bound for regions
    assert member.forward_of(module)(torch.ones(2)).tolist() == [2.0, 2.0]


def test_a_forward_that_somebody_else_had_bound_goes_before_it():
    module, member = Doubling(), Member("", [], lambda x: 3 * x)
    assert member.forward_of(module)(torch.ones(2)).tolist() == [3.0, 3.0]


def test_generators_inside_are_looked_for_in_calls_that_are_checked():
    module, member = nn.Sequential(Doubling(), nn.Linear(1, 1)), Member("", [], None)
    module[0].rng = random.Random(0)
    assert member.generators(module) == [module[0].rng]
    module[1].rng, member.num_calls = random.Random(1), 5
    assert member.generators(module) == [module[0].rng]
    member.num_calls = 8
    assert {id(each) for each in member.generators(module)} == {id(module[0].rng), id(module[1].rng)}


def test_two_groups_of_the_same_size_are_two():
    first, second = Group(2), Group(2)
    member = Member("block", [Membership(first, 0), Membership(second, 1)], None)
    assert [membership.group for membership in member.memberships] == [first, second]
    assert first != second
