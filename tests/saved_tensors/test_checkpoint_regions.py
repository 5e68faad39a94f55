"""Regions of several calls: the same bits as without, nothing kept too long, and a clear word where that cannot be."""

from __future__ import annotations

import contextlib
import copy
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from lightning_memsave.saved_tensors import region_call
from lightning_memsave.saved_tensors.randomness import Randomness
from tests.saved_tensors.region_nets import (
    BETWEEN,
    GROUPS,
    WIDTH,
    Block,
    Kinds,
    Loop,
    assert_same_steps,
    laminar,
    names,
    samples,
    sequential,
    with_regions,
)


def only_early_layers_draw(self, i, x):
    self.blocks[i].drop.p = 0.3 if i < 2 else 0.0
    return x


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("between", BETWEEN)
def test_what_the_parent_does_between_the_calls(between, groups, p):
    plain = Loop(lambda: Block(p), between=BETWEEN[between])
    assert_same_steps(plain, with_regions(plain, GROUPS[groups]), samples())


@pytest.mark.parametrize("groups", GROUPS)
def test_only_some_blocks_draw(groups):
    plain = Loop(lambda: Block(0.5))
    for i in (0, 3):
        plain.blocks[i].drop.p = 0.0
    assert_same_steps(plain, with_regions(plain, GROUPS[groups]), samples())


class View(nn.Module):
    def forward(self, x):
        return x.view_as(x)


class OfMean(nn.Module):
    def forward(self, x):
        return x.mean(1, keepdim=True).expand_as(x)


KEEP_NOTHING = {"itself": nn.Identity, "dropout of 0": lambda: nn.Dropout(0.0), "view": View, "another": OfMean}


@pytest.mark.parametrize("order", ["NBNB", "BNNB", "NNBB", "BNBB"])
@pytest.mark.parametrize("sums", [{}, {1}, {1, 2}], ids=str)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", KEEP_NOTHING)
def test_calls_that_keep_nothing(kind, groups, sums, order):
    plain = Loop(between=lambda self, i, x: x + self.pos if i in sums else x)
    for i, each in enumerate(order):
        if each == "N":
            plain.blocks[i] = KEEP_NOTHING[kind]()
    assert_same_steps(plain, with_regions(plain, GROUPS[groups]), samples())


@dataclass
class Pair:
    y: torch.Tensor
    z: torch.Tensor
    n: int


FORMS = {
    "tuple": (lambda y, z: (y, z), lambda out: out),
    "dict": (lambda y, z: {"y": y, "z": [z], "n": 3}, lambda out: (out["y"], out["z"][0])),
    "dataclass": (lambda y, z: Pair(y, z, 3), lambda out: (out.y, out.z)),
    "ModelOutput": (
        lambda y, z: BaseModelOutput(last_hidden_state=y, hidden_states=(z,)),
        lambda out: (out.last_hidden_state, out.hidden_states[0]),
    ),
}


class Returns(nn.Module):
    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.inner, self.encoding = Block(0.1), encoding

    def forward(self, *, x, z, scale=1.0, nothing=None):
        assert nothing is None
        return FORMS[self.encoding][0](self.inner(x) * scale, z + x.sin())


class Passes(nn.Module):
    def __init__(self, encoding: str) -> None:
        super().__init__()
        self.blocks, self.encoding = nn.ModuleList([Returns(encoding) for _ in range(4)]), encoding

    def forward(self, x):
        z = x
        for block in self.blocks:
            x, z = FORMS[self.encoding][1](block(x=x, z=z, scale=0.5))
        return x + z


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("encoding", FORMS)
def test_keywords_in_and_structures_out(encoding, groups):
    plain = Passes(encoding)
    assert_same_steps(plain, with_regions(plain, GROUPS[groups]), samples())


class HandsOn(Passes):
    """Whole outputs are handed to the next block."""

    class Block(nn.Module):
        def __init__(self, encoding: str) -> None:
            super().__init__()
            self.inner, self.encoding = Block(0.1), encoding

        def forward(self, out):
            y, z = FORMS[self.encoding][1](out)
            return FORMS[self.encoding][0](self.inner(y), z + y.sin())

    def __init__(self, encoding: str) -> None:
        super().__init__(encoding)
        self.blocks = nn.ModuleList([self.Block(encoding) for _ in range(4)])

    def forward(self, x):
        out = FORMS[self.encoding][0](x, x)
        for block in self.blocks:
            out = block(out)
        return FORMS[self.encoding][1](out)[0]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("encoding", FORMS)
def test_structures_in_and_out(encoding, groups):
    plain = HandsOn(encoding)
    assert_same_steps(plain, with_regions(plain, GROUPS[groups]), samples())


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("groups", ["012345", "012", "0 1 2 345", "01 23", "012345 01 23 45 2", "12345 234 34 3"])
def test_sequential(groups, autocast, requires_grad):
    """Groups that begin with a first layer whose input has no gradient too, and activations alone."""
    plain = sequential()
    ours = with_regions(plain, [list(group) for group in groups.split()])
    assert_same_steps(plain, ours, samples(requires_grad), autocast=autocast)


@pytest.mark.parametrize("num_frozen", [1, 3])
def test_frozen_first_layers(num_frozen):
    plain = sequential()
    plain[:num_frozen].requires_grad_(False)
    for groups in (["012345"], ["012", "345"], ["012345", "012", "34"]):
        assert_same_steps(copy.deepcopy(plain), with_regions(plain, [list(g) for g in groups]), samples(False))


class Outer(nn.Module):
    """A region module with groups inside."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Loop(lambda: Block(0.2)) for _ in range(3)])
        self.back = nn.ModuleList([nn.Linear(3, WIDTH) for _ in range(3)])

    def forward(self, x):
        for part, back in zip(self.parts, self.back, strict=True):
            x = back(part(x + 1)).relu()
        return x


def test_groups_inside_of_region_modules_three_deep():
    plain = Outer()
    inside = [[f"parts.{i}.{name}" for name in group] for i in range(3) for group in laminar(0, 4)]
    pairs = [[f"parts.{i}", f"back.{i}"] for i in range(3)]
    whole = [name for pair in pairs for name in pair]
    ours = with_regions(plain, [whole, *pairs, ["parts.0"], *inside])
    assert_same_steps(plain, ours, samples())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(0.2) for _ in range(4)])
        self.blocks[2].up = self.blocks[0].up  # and weights that are shared

    def forward(self, x):
        for _ in range(2):
            for block in (*self.blocks, self.blocks[1], self.blocks[0]):
                x = block(x)
        return x


@pytest.mark.parametrize("groups", GROUPS)
def test_modules_called_again_and_shared(groups):
    plain = Twice()
    assert_same_steps(plain, with_regions(plain, GROUPS[groups]), samples())


class Drops(Loop):
    """LayerDrop, and an early exit."""

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            if i == self.exit_after:
                break
            if torch.rand(()) > 0.5 or not self.training:
                x = block(x)
        return self.head(x)


@pytest.mark.parametrize("exit_after", [1, 3, 9])
@pytest.mark.parametrize("groups", GROUPS)
def test_skipped_blocks_and_early_exit(groups, exit_after):
    plain = Drops(lambda: Block(0.2), n=4)
    plain.exit_after = exit_after
    ours = with_regions(plain, GROUPS[groups])
    for _ in range(4):
        plain.exit_after = ours.exit_after = random.Random(exit_after).randint(1, 5)
        assert_same_steps(plain, ours, samples(), num_steps=1)


KINDS = [Kinds.BatchNorm, Kinds.Average, Kinds.Spectral, Kinds.Recurrent, Kinds.NoGrad, Kinds.Counter]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_buffers_and_kinds_of_blocks(kind, groups):
    plain = Loop(kind)
    ours = with_regions(plain, GROUPS[groups])
    assert_same_steps(plain, ours, samples())
    assert_same_steps(plain.eval(), ours.eval(), samples(), num_steps=1)
    assert_same_steps(plain.train(), ours.train(), samples(), num_steps=1)


def test_buffers_that_change_in_training_only_when_evaluation_came_first():
    plain = Loop(Kinds.Spectral).eval()
    ours = with_regions(plain, [names(4)])
    for training in (False, True, True):
        assert_same_steps(plain.train(training), ours.train(training), samples(), num_steps=1)


@settings(max_examples=40, print_blob=False)
@given(st.data())
def test_random_chains_and_random_groups(data):
    num_blocks = data.draw(st.integers(1, 9))

    def random_groups(first, end):
        if end - first < 1 or not data.draw(st.booleans()):
            return []
        a = data.draw(st.integers(first, end - 1))
        b = data.draw(st.integers(a + 1, end))
        cut = data.draw(st.integers(a, b))
        inner = random_groups(a, cut) + random_groups(cut, b)
        return [names(b, a), *(group for group in inner if group != names(b, a))]

    groups = random_groups(0, num_blocks) or [["blocks.0"]]
    every_kind = st.sampled_from(["block", "draws", *KINDS, *KEEP_NOTHING.values()])
    kinds = data.draw(st.lists(every_kind, min_size=num_blocks, max_size=num_blocks))
    does = data.draw(st.lists(st.sampled_from(sorted(BETWEEN)), min_size=num_blocks, max_size=num_blocks))
    torch.manual_seed(data.draw(st.integers(0, 99)))

    def between(self, i, x):
        does_nothing = does[i] in ("skip", "a call without gradients") or (does[i].startswith("in-place") and i == 0)
        if does[i].startswith("in-place") and not isinstance(self.blocks[i - 1], Block):
            does_nothing = True  # plain torch needs what others return
        return x if does_nothing else BETWEEN[does[i]](self, i, x)

    plain = Loop(n=0, between=between)
    made = [Block() if kind == "block" else Block(0.3) if kind == "draws" else kind() for kind in kinds]
    plain.blocks = nn.ModuleList(made)
    x = samples(data.draw(st.booleans()))
    assert_same_steps(plain, with_regions(plain, groups, offload=data.draw(st.booleans())), x)


@pytest.mark.parametrize("broken", ["randomness", "buffers", "autocast"])
def test_each_thing_that_is_put_back_is_needed(broken, monkeypatch):
    nothing = lambda self, *_: contextlib.nullcontext()  # noqa: E731
    target, name = {
        "randomness": (Randomness, "restore"),
        "buffers": (region_call.Buffers, "again"),
        "autocast": (region_call.Surroundings, "again"),
    }[broken]
    monkeypatch.setattr(target, name, nothing)
    plain = Loop(lambda: nn.Sequential(Kinds.BatchNorm(), Block(0.3)), between=BETWEEN["dropout"])
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same_steps(plain, with_regions(plain, [names(4)]), samples(), autocast=broken == "autocast")


class Twofold(nn.Module):
    """Takes one tensor as three arguments and asks whether they are one, as torch's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, query, key, value):
        return (self.one(query) if query is key is value else self.other(key)).relu()


class Attending(nn.Module):
    """Calls blocks with one tensor three times."""

    def __init__(self, make) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            out = block(x, x, x)
            x = x + (out[0] if isinstance(out, tuple) else out)
        return x


@pytest.mark.parametrize("groups", [[["blocks.0"], ["blocks.1"], ["blocks.2"]], [["blocks.0", "blocks.1"]], [names(3)]])
@pytest.mark.parametrize("make", [Twofold, lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True)])
def test_one_tensor_that_is_given_several_times_is_one_again(make, groups):
    plain = Attending(make)
    assert_same_steps(plain, with_regions(plain, groups), samples().unsqueeze(0))


class Interleaved(nn.Module):
    """Keeps every other element, as rotary positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.layer(x)
        even, odd = y[..., ::2], y[..., 1::2]
        return torch.stack([even * odd, odd.sin() * even], -1).flatten(-2)


@pytest.mark.parametrize("groups", [[names(1)], [names(3)]])
def test_strided_views_are_compared_as_well(groups):
    plain = Loop(Interleaved)
    assert_same_steps(plain, with_regions(plain, groups), samples())
