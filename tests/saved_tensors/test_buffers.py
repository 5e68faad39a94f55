"""Buffers that change later than in a module's first call: read as they were, changed once, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_memsave.core.errors import RegionError
from tests.saved_tensors.region_nets import (
    GROUPS,
    WIDTH,
    Block,
    Impure,
    Loop,
    assert_same_steps,
    names,
    samples,
    with_regions,
)

LARGE = 2**14 // 4 // WIDTH + 1  # rows of a buffer that is too large to be cloned


def edited(self, x):
    self.average.mul_(0.9).add_(0.1 * x.detach().mean(0))


def edited_and_equal(self, x):
    self.average.copy_(self.average.clone())


def replaced(self, x):
    self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)


class Late(nn.Module):
    """Reads a buffer, and changes it once that is switched on."""

    does, is_on, rows = edited, False, 1

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(0.3)
        self.register_buffer("average", torch.ones(self.rows, WIDTH))

    def forward(self, x):
        if self.is_on:
            type(self).does(self, x)
        return self.block(x) * self.average.mean(0)


class Replaced(Late):
    does = replaced


class Large(Late):
    rows = LARGE


class LargeReplaced(Large):
    does = replaced


class LargeEqual(Large):
    does = edited_and_equal


def switch(is_on: bool, *models: nn.Module) -> None:
    for model in models:
        for block in model.blocks:
            block.is_on = is_on


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", [Late, Replaced, LargeReplaced])
def test_a_buffer_that_changes_from_the_third_step_on(kind, groups):
    plain = Loop(kind)
    ours = with_regions(plain, GROUPS[groups])
    for is_on in (False, True, False):
        switch(is_on, plain, ours)
        assert_same_steps(plain, ours, samples())


class OfLong(Late):
    """Changes it where there are more than five samples."""

    def forward(self, x):
        self.is_on = len(x) > 5
        y = super().forward(x)
        self.is_on = False
        return y


def test_a_buffer_that_changes_in_a_later_call_of_the_first_step():
    plain = Loop(OfLong, between=lambda self, i, x: torch.cat([x, x[:1]]) if i == 2 else x)
    plain.blocks = nn.ModuleList([*plain.blocks[:2], *plain.blocks[:2]])  # each is called twice
    assert_same_steps(plain, with_regions(plain, [names(1), names(2, 1)]), samples(), num_steps=3)


@pytest.mark.parametrize("kind", [Large, LargeEqual])
def test_a_large_buffer_that_changes_from_the_first_call_on(kind):
    plain = Loop(kind)
    ours = with_regions(plain, [names(2), names(4, 2)])
    switch(True, plain, ours)
    assert_same_steps(plain, ours, samples(), num_steps=3)


@pytest.mark.parametrize("groups", GROUPS)
def test_a_large_buffer_that_is_edited_for_the_first_time_later_raises(groups):
    ours = with_regions(Loop(Large), GROUPS[groups])
    ours(samples()).sum().backward()
    switch(True, ours)
    with pytest.raises(RegionError, match=r"buffer `.*average` .* \(16416 bytes\) .* Leave this module out"):
        ours(samples()).sum().backward()


def test_a_small_buffer_that_somebody_else_edits_before_backward_is_read_as_it_was():
    plain, x = Loop(Late), samples()
    ours, gradients = with_regions(plain, [names(4)]), []
    for _ in range(2):  # the first call is the one that finds out what changes
        gradients.clear()
        for model, edit in ((plain, False), (ours, True)):
            torch.manual_seed(1)
            loss = model(x).square().sum()
            if edit:
                model.blocks[1].average.mul_(3)
            used = [p for name, p in model.named_parameters() if name != "pos"]
            gradients.append(torch.autograd.grad(loss, [x, *used]))
            if edit:
                model.blocks[1].average.div_(3)
        assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("edit", [lambda block: block.average.mul_(3), lambda block: delattr(block, "average")])
def test_what_somebody_else_does_to_a_large_buffer_before_backward_does_not_matter(edit):
    """Where the calls do not read it: nothing raises, and gradients are those of plain torch."""
    plain, x, results = Loop(lambda: Impure(lambda self, x: self.linear(x)), n=2), samples(), []
    plain.blocks[1].register_buffer("average", torch.ones(LARGE, WIDTH))
    for model in (plain, with_regions(plain, [names(2)])):
        for _ in range(2):
            loss = model(x).square().sum()
            edit(model.blocks[1])
            (gradient,) = torch.autograd.grad(loss, [x])
            model.blocks[1].register_buffer("average", torch.ones(LARGE, WIDTH))
        results.append(gradient)
    assert torch.equal(*results)


def test_clones_are_shared_by_all_calls_until_a_buffer_changes():
    ours = with_regions(Loop(Late), [names(1)])
    ours(samples()).sum().backward()
    block = ours.blocks[0]
    spares = block._checkpoint_region.spares
    first = spares.of(".average", block.average, block.average._version)
    ours(samples()).sum().backward()
    assert spares.of(".average", block.average, block.average._version) is first
    with torch.no_grad():
        block.average.fill_(2)
    ours(samples()).sum().backward()
    clone = spares.of(".average", block.average, block.average._version)
    assert torch.equal(clone, torch.full((1, WIDTH), 2.0))


def test_copies_and_pickles_have_no_clones():
    ours = with_regions(Loop(Late), [names(4)])
    ours(samples()).sum().backward()
    again = copy.deepcopy(ours)
    assert not any(block._checkpoint_region.spares._clones for block in again.blocks)
    with torch.no_grad():
        ours.blocks[0].average.fill_(2)
    switch(True, ours, again)
    plain = copy.deepcopy(again)
    plain.blocks = nn.ModuleList(map(without_regions, plain.blocks))
    assert_same_steps(plain, again, samples())


def without_regions(block):
    new = Late()
    new.load_state_dict(block.state_dict())
    new.is_on = block.is_on
    return new
