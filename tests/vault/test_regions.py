"""Regions of several calls: the same bits as without, nothing kept too long, and a clear word where that cannot be."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import random
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from lightning_memsave import (
    ActivationCompression,
    Checkpointing,
    Ledger,
    apply_activation_compression,
    apply_checkpointing,
)
from lightning_memsave.vault import regions
from lightning_memsave.vault.holders import RegionError
from lightning_memsave.vault.offload import File
from lightning_memsave.vault.state import Randomness

WIDTH = 8


class Block(nn.Module):
    def __init__(self, p: float = 0.0, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.act, self.drop = nn.ReLU(inplace=True), nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Saver(nn.Module):
    """Keeps two tensors of the size of its input, and returns a third: what a region saves is easily counted."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return self.b(self.a(x).tanh())  # keeps x, tanh(...)


class Loop(nn.Module):
    """Blocks in a ModuleList; `between` is what the parent does before each call."""

    def __init__(self, make=Block, n: int = 4, between=lambda self, i, x: x) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make() for _ in range(n)])
        self.pos, self.head = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, 3)
        self.between = between

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(self.between(self, i, x))
        return self.head(x)


def names(n: int, first: int = 0) -> list[str]:
    return [f"blocks.{i}" for i in range(first, n)]


def laminar(first: int, end: int) -> list[list[str]]:
    """Groups inside of groups, each half of the one around."""
    middle, inner = (first + end) // 2, []
    if end - first > 1:
        inner = laminar(first, middle) + laminar(middle, end)
    return [names(end, first), *inner]


def with_regions(plain: nn.Module, groups, offload: bool = False) -> nn.Module:
    ours = copy.deepcopy(plain)
    apply_checkpointing(ours, Checkpointing(regions=groups, offload=offload))
    return ours


def outcome(model, x, backward=lambda loss: loss.backward(), autocast: bool = False):
    """Loss, input gradient, gradients, buffers, and the generator's next number after one step."""
    torch.manual_seed(1)
    model.zero_grad()
    x = x.detach().clone().requires_grad_(x.requires_grad)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    backward(loss)
    found = {"loss": loss.detach(), "x": x.grad, "next number": torch.rand(1)}
    return found | {n: p.grad for n, p in model.named_parameters()} | {n: b.clone() for n, b in model.named_buffers()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, a in first.items():
        b = second[name]
        assert (a is None) == (b is None), name
        assert a is None or torch.equal(a, b), name


def assert_same_steps(plain, ours, x, num_steps: int = 2, **options):
    """Steps of SGD: parameters and buffers as well."""
    for _ in range(num_steps):
        assert_same(outcome(plain, x, **options), outcome(ours, x, **options))
        for model in (plain, ours):
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.1 * p.grad


def count_repetitions(monkeypatch) -> list[regions.Region]:
    found, repeat = [], regions.Region.repeat
    monkeypatch.setattr(regions.Region, "repeat", lambda self: found.append(self) or repeat(self))
    return found


def samples(requires_grad: bool = True):
    return torch.randn(5, WIDTH, requires_grad=requires_grad)


# ------------------------------------------------------------------------------- the same bits
def edit(self, i, x):
    return x.add_(1) if i else x


def skips(self, i, x):
    """The first block's output again, before the third."""
    if i == 1:
        self.__dict__["skip"] = x
    return x + self.__dict__.pop("skip") if i == 2 else x


def only_early_layers_draw(self, i, x):
    self.blocks[i].drop.p = 0.3 if i < 2 else 0.0
    return x


BETWEEN = {
    "nothing": lambda self, i, x: x,
    "a position is added": lambda self, i, x: x + self.pos,
    "mask": lambda self, i, x: x * (torch.arange(WIDTH) % (i + 2) > 0),
    "views": lambda self, i, x: x.view(-1, 1, WIDTH).transpose(0, 1)[0],
    "a reversed view": lambda self, i, x: x.flip(-1).t().contiguous().t(),
    "in-place edit": edit,
    "in-place edit of a view": lambda self, i, x: (x[:2].mul_(2), x)[1] if i else x,
    "skip": skips,
    "dropout": lambda self, i, x: nn.functional.dropout(x, 0.2, self.training),
    "dropout before the third": lambda self, i, x: nn.functional.dropout(x, 0.2, self.training) if i == 2 else x,
    "a number that is thrown away": lambda self, i, x: (torch.rand(1), x)[1] if i == 2 else x,
    "detached before the third": lambda self, i, x: x.detach() if i == 2 else x,
    "a call without gradients": lambda self, i, x: (torch.no_grad()(self.blocks[i])(x), x)[1],
}
GROUPS = {
    "one": [names(4)],
    "two": [names(2), names(4, 2)],
    "a pair inside": [names(3, 1)],
    "three deep": laminar(0, 4),
    "uneven": [names(4), names(4, 1), names(4, 2), ["blocks.3"]],
}


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
    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner, self.form = Block(0.1), form

    def forward(self, *, x, z, scale=1.0, nothing=None):
        assert nothing is None
        return FORMS[self.form][0](self.inner(x) * scale, z + x.sin())


class Passes(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.blocks, self.form = nn.ModuleList([Returns(form) for _ in range(4)]), form

    def forward(self, x):
        z = x
        for block in self.blocks:
            x, z = FORMS[self.form][1](block(x=x, z=z, scale=0.5))
        return x + z


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("form", FORMS)
def test_keywords_in_and_structures_out(form, groups):
    plain = Passes(form)
    assert_same_steps(plain, with_regions(plain, GROUPS[groups]), samples())


class HandsOn(Passes):
    """Whole outputs are handed to the next block."""

    class Block(nn.Module):
        def __init__(self, form: str) -> None:
            super().__init__()
            self.inner, self.form = Block(0.1), form

        def forward(self, out):
            y, z = FORMS[self.form][1](out)
            return FORMS[self.form][0](self.inner(y), z + y.sin())

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self.blocks = nn.ModuleList([self.Block(form) for _ in range(4)])

    def forward(self, x):
        out = FORMS[self.form][0](x, x)
        for block in self.blocks:
            out = block(out)
        return FORMS[self.form][1](out)[0]


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("form", FORMS)
def test_structures_in_and_out(form, groups):
    plain = HandsOn(form)
    assert_same_steps(plain, with_regions(plain, GROUPS[groups]), samples())


def sequential(p: float = 0.2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Block(p), Block(p), nn.Tanh(), nn.Linear(8, 4))


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


class Kinds:
    """Blocks with something to look after."""

    class BatchNorm(nn.Sequential):
        def __init__(self, momentum=0.1):
            super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU(inplace=True))

    class Average(BatchNorm):
        def __init__(self):
            super().__init__(momentum=None)

    class Spectral(nn.Sequential):
        def __init__(self):
            super().__init__(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)

        def forward(self, x):
            return self.rnn(x[:, None].expand(-1, 3, -1))[0].sum(1)

    class NoGrad(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            with torch.no_grad():
                scale = self.a(x).abs().mean()
            return (self.b(x) if x.sum() > 0 else self.b(self.a(x).relu_())) * scale

    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Block(0.1)
            self.register_buffer("num_calls", torch.zeros(()))

        def forward(self, x):
            self.num_calls = self.num_calls + 1
            return self.inner(x) / self.num_calls


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
    kinds = data.draw(st.lists(st.sampled_from(["block", "draws", *KINDS]), min_size=num_blocks, max_size=num_blocks))
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


# ------------------------------------------------------------------------------- ways of going backward
def twice(loss):
    loss.backward(retain_graph=True)
    loss.backward()


def thrice_in_parts(loss):
    (loss * 2).backward(retain_graph=True)
    (loss * 3).backward(retain_graph=True)
    loss.backward()


def in_a_thread(loss):
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def in_autocast(loss):
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()


@pytest.mark.parametrize("backward", [twice, thrice_in_parts, in_a_thread, in_autocast], ids=lambda f: f.__name__)
@pytest.mark.parametrize("groups", GROUPS)
def test_ways_of_going_backward(groups, backward):
    plain = Loop(lambda: Block(0.2), between=BETWEEN["dropout"])
    assert_same_steps(plain, with_regions(plain, GROUPS[groups]), samples(), backward=backward)


@pytest.mark.parametrize("groups", GROUPS)
def test_double_backward(groups):
    plain = Loop(Saver_8, between=BETWEEN["a position is added"])
    ours, results = with_regions(plain, GROUPS[groups]), []
    x = samples()
    for model in (plain, ours):
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        loss = first.square().sum()
        loss.backward()
        results.append([first.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        x.grad = None
    assert all(map(torch.equal, *results))
    assert len(results[0]) == len(results[1]) > 4


def Saver_8():  # noqa: N802  # a class of its own would be the same
    return Saver(WIDTH)


@pytest.mark.parametrize("groups", GROUPS)
def test_gradients_of_some_inputs_then_the_others(groups):
    plain = Loop(lambda: Block(0.2))
    ours, results, x = with_regions(plain, GROUPS[groups]), [], samples()
    for model in (plain, ours):
        torch.manual_seed(3)
        loss = model(x).square().sum()
        some = [model.blocks[2].up.weight, model.head.weight]
        first = torch.autograd.grad(loss, some, retain_graph=True)
        second = torch.autograd.grad(loss, [x, *model.blocks.parameters()])
        results.append([*first, *second])
    assert all(map(torch.equal, *results))


class BackwardInside(Loop):
    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == 1:
                (self.inner,) = torch.autograd.grad(x.square().sum(), self.blocks[0].up.weight, retain_graph=True)
        return self.head(x) + self.inner.sum()


@pytest.mark.parametrize("groups", GROUPS)
def test_backward_inside_of_the_forward(groups):
    plain = BackwardInside(lambda: Block(0.2))
    assert_same_steps(plain, with_regions(plain, GROUPS[groups]), samples())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("groups", GROUPS)
def test_two_forwards_before_two_backwards(groups, order):
    plain = Loop(Kinds.BatchNorm, between=BETWEEN["dropout"])
    ours, results, xs = with_regions(plain, GROUPS[groups]), [], [samples(), samples()]
    for model in (plain, ours):
        torch.manual_seed(3)
        losses = [model(x).square().sum() for x in xs]
        for number in order:
            losses[number].backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None] + list(model.buffers()))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("groups", GROUPS)
def test_a_forward_in_the_middle_of_a_forward(groups):
    """What another pass opened is not gone on with as if it were this one's."""

    def between(self, i, x):
        if i == 2 and not self.__dict__.get("is_inside"):
            self.__dict__["is_inside"] = True
            x = x + self(x * 2).sum()
            del self.__dict__["is_inside"]
        return x

    plain = Loop(lambda: Block(0.2), between=between)
    assert_same_steps(plain, with_regions(plain, GROUPS[groups]), samples())


@pytest.mark.parametrize("groups", GROUPS)
def test_a_clean_step_after_an_exception_in_a_group(groups):
    def between(self, i, x):
        if self.__dict__.get("fails_at") == i:
            raise KeyError(i)
        return x

    plain = Loop(lambda: Block(0.2), between=between)
    ours = with_regions(plain, GROUPS[groups])
    for i in range(4):
        for model in (plain, ours):
            model.__dict__["fails_at"] = i
            with pytest.raises(KeyError):
                model(samples())
            model.__dict__["fails_at"] = None
        assert_same_steps(plain, ours, samples(), num_steps=1)


def test_a_clean_step_after_an_exception_in_backward():
    plain = Loop(lambda: Block(0.2))
    ours = with_regions(plain, laminar(0, 4))

    def fails(gradient):
        raise KeyError

    handle = ours.blocks[1].register_forward_hook(lambda module, args, y: y.register_hook(fails) and None)
    with pytest.raises(KeyError):
        ours(samples()).sum().backward()
    handle.remove()
    assert_same_steps(plain, ours, samples())


# ------------------------------------------------------------------------------- copies, compiled code
@pytest.mark.parametrize("groups", GROUPS)
def test_a_deepcopy_has_its_own_weights_and_its_groups(groups, monkeypatch):
    plain = Loop(lambda: Block(0.2))
    ours = with_regions(plain, GROUPS[groups])
    first = copy.deepcopy(ours)
    second = copy.deepcopy(first)
    with torch.no_grad():
        for p in [*ours.parameters(), *first.parameters()]:
            p.zero_()
    repetitions = count_repetitions(monkeypatch)
    assert_same(outcome(plain, x := samples()), outcome(second, x))
    number = len(repetitions)
    assert_same(outcome(with_regions(plain, GROUPS[groups]), x), outcome(second, x))
    assert len(repetitions) == 3 * number > 0, "the groups of a copy are the same"


def test_a_pickle_forgets_the_regions_and_may_have_new_ones():
    ours = with_regions(sequential(), [["0", "1", "2"]])
    twin = pickle.loads(pickle.dumps(ours))
    assert_same(outcome(ours, x := samples()), outcome(twin, x))
    twin.zero_grad()
    apply_checkpointing(twin, Checkpointing(regions=[["2", "3"]])).undo()
    apply_checkpointing(twin, Checkpointing(regions=[["1", "2", "3"]]))
    assert_same(outcome(ours, x), outcome(twin, x))


def test_an_average_of_the_model_computes_with_its_own_weights():
    ours = with_regions(Loop(), [names(4)])
    average = torch.optim.swa_utils.AveragedModel(ours, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    x, first = samples(), ours(samples())
    before = average(x)
    with torch.no_grad():
        for p in ours.parameters():
            p.zero_()
    assert torch.equal(average(x), before)
    average.update_parameters(ours)
    assert not torch.equal(average(x), before)
    average(x).sum().backward()
    assert average.module.blocks[0].up.weight.grad is not None
    assert first.shape == before.shape


@pytest.mark.filterwarnings("ignore")  # Dynamo's own
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("groups", ["one", "three deep"])
def test_compiled_blocks(groups, p):
    plain = Loop(lambda: Block(p), between=BETWEEN["mask"])
    ours = copy.deepcopy(plain)
    for model in (plain, ours):
        for block in model.blocks:
            block.compile(backend="aot_eager")
    apply_checkpointing(ours, Checkpointing(regions=GROUPS[groups]))
    assert_same_steps(plain, ours, samples())


# ------------------------------------------------------------------------------- what is refused
class Impure(nn.Module):
    def __init__(self, does) -> None:
        super().__init__()
        self.linear, self.does, self.number = nn.Linear(8, 8), does, 0
        self.cache, self.table, self.history = None, {}, []

    def forward(self, x):
        return self.does(self, x)


def draws_from_python(self, x):
    for _ in range(GENERATOR.randint(1, 50)):
        x = self.linear(x).tanh()
    return x


def draws_a_shape(self, x):
    return self.linear(x).repeat(GENERATOR.randint(1, 10**6) % 977 + 1, 1).tanh()


GENERATOR = random.Random(5)


def train(model):
    for _ in range(5):
        model(samples()).sum().backward()


@pytest.mark.parametrize("does", [draws_from_python, draws_a_shape])
def test_a_region_that_does_something_else_raises_with_advice(does):
    model = nn.Sequential(nn.Linear(8, 8), Impure(does))
    apply_checkpointing(model, Checkpointing(regions=[["0", "1"]]))
    with pytest.raises(RegionError, match=r"checkpointed region kept .* run again. It must do the same twice"):
        train(model)


@pytest.mark.parametrize("which", ["0.weight", "1.up.weight"])
def test_a_parameter_changed_between_forward_and_backward_raises(which):
    """Plain torch raises where a gradient is computed from the parameter; here all that are computed with are."""
    for regions_of_it in ([["0", "1"]], [["0"], ["1"]], [["0", "1"], ["0"], ["1"]]):
        model = nn.Sequential(nn.Linear(8, 8), Block())
        apply_checkpointing(model, Checkpointing(regions=regions_of_it))
        loss = model(samples(False)).square().sum()
        with torch.no_grad():
            model.get_parameter(which).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_input_changed_between_forward_and_backward_raises():
    for requires_grad in (True, False):
        model = with_regions(sequential(), [["0", "1"], ["2", "3"]])
        x = samples(requires_grad)
        loss = model(x).sum()
        x.data = x.data.clone()  # no change in place, as far as anybody counts
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_weights_that_were_lent_for_the_forward_are_those_of_the_repetition():
    plain, x = sequential(0.0), samples()
    ours, results = with_regions(plain, [["0", "1", "2"], ["3"]]), []
    lent = {name: torch.randn_like(p, requires_grad=True) for name, p in plain.named_parameters()}
    for model in (plain, ours):
        loss = torch.func.functional_call(model, lent, x).square().sum()
        results.append(torch.autograd.grad(loss, [x, *lent.values()]))
    assert all(map(torch.equal, *results))


def counts(self, x):
    self.number += 1
    return self.linear(x)


def grows(self, x):
    self.history.append(1)
    return self.linear(x)


def edits(self, x):
    return self.linear(x.mul_(2))


def edits_a_view(self, x):
    x[0] = 0
    return self.linear(x)


@pytest.mark.parametrize(("does", "message"), [
    (counts, "changes an attribute that is no buffer.*number"),
    (grows, "changes an attribute that is no buffer.*history"),
    (edits, "edits its input in place"),
    (edits_a_view, "edits its input in place"),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
@pytest.mark.parametrize("groups", [[["0", "1"]], [["1"]], [["0", "1"], ["1"]]])
def test_a_module_that_does_not_bear_a_second_run_is_refused(does, message, groups):
    model = nn.Sequential(nn.Linear(8, 8), Impure(does))
    apply_checkpointing(model, Checkpointing(regions=groups))
    with pytest.raises(ValueError, match=message):
        train(model)


def fills_an_attribute(self, x):
    if self.cache is None:
        self.cache = torch.arange(8.0)
    return self.linear(x) * self.cache


def fills_a_table(self, x):
    if x.shape not in self.table:
        self.table[x.shape] = torch.arange(8.0)
    return self.linear(x) * self.table[x.shape]


@pytest.mark.parametrize("does", [fills_an_attribute, fills_a_table])
def test_a_cache_that_is_filled_once_is_no_change(does):
    plain = nn.Sequential(nn.Linear(8, 8), Impure(does))
    assert_same_steps(plain, with_regions(plain, [["0", "1"]]), samples(), num_steps=3)


# ------------------------------------------------------------------------------- what is kept
class _Alive:
    """Weak references to every tensor that the blocks were given, and to their modules' outputs."""

    def __init__(self, model) -> None:
        self.references = []
        for block in model.blocks:
            block.register_forward_hook(self._note)

    def _note(self, module, args, output):
        self.references += [weakref.ref(tensor.untyped_storage()) for tensor in (*args, output)]

    def count(self) -> int:
        return sum(reference() is not None for reference in self.references)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("between", ["nothing", "a position is added", "in-place edit", "dropout"])
@pytest.mark.parametrize("groups", GROUPS)
def test_nothing_lives_longer_than_the_graph(groups, between, offload, monkeypatch):
    made, init = [], regions.Region.__init__
    monkeypatch.setattr(regions.Region, "__init__", lambda self, *a: made.append(weakref.ref(self)) or init(self, *a))
    model = with_regions(Loop(lambda: Block(0.1), between=BETWEEN[between]), GROUPS[groups], offload)

    def step(follow):
        loss = model(samples()).sum()
        assert sum(reference() is not None for reference in made) > 0
        follow(loss)

    def fails(loss):
        loss.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()

    ways = {
        "backward": lambda loss: loss.backward(),
        "no backward": lambda loss: None,
        "part": lambda loss: torch.autograd.grad(loss, model.blocks[2].up.weight),
        "twice": twice,
        "an exception": fails,
    }
    gc.disable()
    try:
        for name, way in ways.items():
            step(way)
            assert [reference for reference in made if reference() is not None] == [], name
    finally:
        gc.enable()


def kept_bytes(model, x) -> tuple[int, int]:
    """Of the graph: after the forward pass, and the peak of a step."""
    model(x).sum().backward()
    with Ledger().watching(model, [], x) as ledger:
        before = ledger.live_bytes
        y = model(x)
        kept = ledger.live_bytes - before - y.nbytes
        loss = y.sum()
        del y
        loss.backward()
    return kept, ledger.measurement.by_category["activations"]


def chain(n: int) -> nn.Module:
    return nn.Sequential(*(Saver() for _ in range(n)))


@pytest.mark.parametrize(("num_blocks", "size"), [(8, 1), (8, 2), (8, 4), (12, 4), (12, 6), (12, 12), (7, 3)])
def test_kept_bytes_are_what_arithmetic_says(num_blocks, size):
    x = torch.randn(256, 64)
    model = chain(num_blocks)
    assert kept_bytes(model, x)[0] == (2 * num_blocks - 1) * x.nbytes, "x is the caller's"
    order = [str(i) for i in range(num_blocks)]
    groups = [order[i : i + size] for i in range(0, num_blocks, size)]
    kept, _ = kept_bytes(with_regions(model, groups), x)
    assert kept == (len(groups) - 1) * x.nbytes


def test_groups_inside_of_groups_have_a_logarithmic_peak():
    x, peaks = torch.randn(2048, 64), {}
    for depth in (2, 3, 4):
        n = 2**depth
        groups = [[name.removeprefix("blocks.") for name in group] for group in laminar(0, n)]
        kept, peak = kept_bytes(with_regions(chain(n), groups), x)
        assert kept == 0
        peaks[depth] = peak // x.nbytes
    assert peaks[4] - peaks[3] == peaks[3] - peaks[2] <= 1, peaks


def test_the_work_is_one_forward_more_for_groups_and_one_per_level_for_nested_ones(monkeypatch):
    calls = []
    for groups, expected in ((GROUPS["one"], 4), (GROUPS["two"], 4), (GROUPS["three deep"], 12)):
        model = with_regions(Loop(), groups)
        for block in model.blocks:
            block.norm.register_forward_hook(lambda *_: calls.append(1))
        loss = model(samples()).sum()
        calls.clear()
        loss.backward()
        assert len(calls) <= expected


def test_what_follows_the_last_kept_tensor_is_not_computed_again():
    calls = []
    model = nn.Sequential(Block(), Impure(lambda self, x: calls.append(1) or x + 1))
    apply_checkpointing(model, Checkpointing(regions=[["0", "1"]]))
    for _ in range(3):
        model(samples()).sum().backward()
    assert calls == [1, 1, 1]


def test_a_skipped_call_ends_a_region(monkeypatch):
    plain = Loop()
    ours, repetitions = with_regions(plain, [names(4)]), count_repetitions(monkeypatch)
    for skipped, expected in ((None, 1), (0, 1), (1, 2), (2, 2), (3, 1)):
        x = samples()
        for i, block in enumerate(ours.blocks):
            x = x if i == skipped else block(x)
        repetitions.clear()
        x.sum().backward()
        assert len(repetitions) == expected, skipped


def test_a_graph_that_is_retained_holds_no_more_than_before():
    model, x = with_regions(chain(4), [["0", "1"], ["2", "3"]]), torch.randn(256, 64)
    model(x).sum().backward()
    with Ledger().watching(model, [], x) as ledger:
        loss = model(x).sum()
        before = ledger.live_bytes
        loss.backward(retain_graph=True)
        assert ledger.live_bytes == before
        loss.backward()


def test_generator_state_is_kept_only_where_numbers_are_drawn(monkeypatch):
    states, init = [], Randomness.__init__

    def noting(self, devices):
        init(self, devices)
        states.append(weakref.ref(self))

    monkeypatch.setattr(Randomness, "__init__", noting)

    def num_kept(p, groups, between=lambda self, i, x: x):
        model = with_regions(Loop(lambda: Block(p), between=between), groups)
        states.clear()
        loss = model(samples()).sum()
        kept = {id(state._cpu) for reference in states if (state := reference()) is not None}
        loss.backward()
        return len(kept)

    assert num_kept(0.0, [names(4)]) == 0
    assert num_kept(0.0, laminar(0, 4)) == 0
    assert num_kept(0.0, [names(4)], BETWEEN["dropout"]) == 0
    assert 1 <= num_kept(0.3, [names(4)]) <= 2  # where the group starts, and where it goes on while it may
    assert 4 <= num_kept(0.3, [names(4)], BETWEEN["dropout"]) <= 5


# ------------------------------------------------------------------------------- vault, offload
class Wide(Loop):
    def __init__(self) -> None:
        super().__init__(lambda: Block(0.1, 64), n=4)
        self.head = nn.Linear(64, 3)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("codecs", [("exact",), ("exact", "offload")])
def test_exact_vault_has_the_same_bits(groups, codecs):
    plain, x = Wide(), torch.randn(128, 64, requires_grad=True)
    ours = with_regions(plain, GROUPS[groups])
    apply_activation_compression(ours, ActivationCompression(codecs=codecs, min_numel=16))
    assert_same_steps(plain, ours, x)


class Gelus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("groups", ["one", "two", "three deep"])
def test_a_lossy_vault_is_unbiased_and_lowers_the_peak_of_the_repetition(groups):
    plain, x = Gelus(), torch.randn(256, 64)
    region, lossy = with_regions(plain, GROUPS[groups]), with_regions(plain, GROUPS[groups])
    apply_activation_compression(lossy, ActivationCompression(codecs=("int4",), min_numel=16))
    expected = gradients(plain, x)
    found = torch.stack([gradients(lossy, x) for _ in range(30)])
    assert (found[0] != found[1]).any()
    one, mean = (found[0] - expected).norm(), (found.mean(0) - expected).norm()
    assert 0 < mean < 2.0 * one / 30**0.5
    if groups != "three deep":  # there one block at a time is whole, and it is the largest
        assert kept_bytes(lossy, x)[1] < 0.8 * kept_bytes(region, x)[1]


@pytest.mark.parametrize("groups", ["one", "two", "three deep"])
def test_codecs_of_modules_hold_inside_repeated_regions(groups):
    plain, x = Gelus(), torch.randn(256, 64)
    expected = gradients(plain, x)
    for pattern, noisy in (
        ("*", ()),
        ("blocks.*", ()),
        ("nothing", range(4)),
        ("blocks.[01]*", (2, 3)),
        ("blocks.[23]", (0, 1)),
    ):
        ours = with_regions(plain, GROUPS[groups])
        modules = {} if pattern == "nothing" else {pattern: "exact"}
        apply_activation_compression(ours, ActivationCompression(codecs=("int4",), modules=modules, min_numel=16))
        found = gradients(ours, x)
        ours_by_block = found.view(4, -1)
        is_noisy = [bool((a != b).any()) for a, b in zip(ours_by_block, expected.view(4, -1), strict=True)]
        # noise of later blocks flows into earlier ones
        assert is_noisy == [bool(noisy) and i <= max(noisy) for i in range(4)], pattern


@pytest.mark.parametrize("groups", GROUPS)
def test_offloaded_inputs_have_the_same_bits_and_take_no_memory(groups, monkeypatch):
    plain, x = Loop(lambda: Block(0.1, 64), between=BETWEEN["nothing"]), torch.randn(512, 64, requires_grad=True)
    plain.head = nn.Linear(64, 3)
    ours, stays = with_regions(plain, GROUPS[groups], offload=True), with_regions(plain, GROUPS[groups])
    assert_same_steps(copy.deepcopy(plain), ours, x)
    written, write = [], File.write
    monkeypatch.setattr(File, "write", lambda self, tensor: written.append(tensor.nbytes) or write(self, tensor))
    kept, without = kept_bytes(ours, x)[0], kept_bytes(stays, x)[0]
    expected = sum(group[0] != "blocks.0" for group in GROUPS[groups][:2]) if groups in ("two", "a pair inside") else 0
    assert without - kept == expected * x.nbytes
    assert written == [x.nbytes] * (2 * expected), "in each of two steps; inner regions write nothing"


def test_the_file_of_offloaded_inputs_is_closed_with_the_model(monkeypatch):
    files, init = [], File.__init__

    def noting(self, folder):
        init(self, folder)
        files.append((weakref.ref(self), self._file))

    monkeypatch.setattr(File, "__init__", noting)
    model = nn.Sequential(*(Block(0.1, 64) for _ in range(5)))
    applied = apply_checkpointing(model, Checkpointing(regions=[["1", "2"], ["3", "4"]], offload=True))
    x = torch.randn(512, 64)
    gc.disable()
    try:
        for _ in range(2):
            model(x).sum().backward()
        assert len(files) == 1
        assert len(next(iter(files[0][0]()._free.values()))) == 2, "both places were given back"
        applied.undo()
        del applied
    finally:
        gc.enable()
    gc.collect()
    assert files[0][1].closed


# ------------------------------------------------------------------------------- these tests can fail
@pytest.mark.parametrize("broken", ["randomness", "buffers", "autocast"])
def test_each_thing_that_is_put_back_is_needed(broken, monkeypatch):
    nothing = lambda self, *_: contextlib.nullcontext()  # noqa: E731
    target, name = {
        "randomness": (Randomness, "restore"),
        "buffers": (regions.Buffers, "again"),
        "autocast": (regions.Surroundings, "again"),
    }[broken]
    monkeypatch.setattr(target, name, nothing)
    plain = Loop(lambda: nn.Sequential(Kinds.BatchNorm(), Block(0.3)), between=BETWEEN["dropout"])
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same_steps(plain, with_regions(plain, [names(4)]), samples(), autocast=broken == "autocast")
