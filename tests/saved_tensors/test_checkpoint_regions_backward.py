"""Regions in every way of going backward, in copies of a model and in compiled blocks."""

from __future__ import annotations

import copy
import gc
import pickle
import threading

import pytest
import torch
from torch import nn

from lightning_memsave import (
    Checkpointing,
    OptimizerState,
    apply_checkpointing,
    apply_optimizer_state,
)
from lightning_memsave.saved_tensors import checkpoint_regions
from tests.saved_tensors.region_nets import (
    BETWEEN,
    GROUPS,
    WIDTH,
    Block,
    Kinds,
    Loop,
    Saver,
    assert_same,
    assert_same_steps,
    count_repetitions,
    laminar,
    names,
    outcome,
    samples,
    sequential,
    twice,
    with_regions,
)


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


class Added(nn.Module):
    """Its bias has a gradient before anything kept is needed, and what is kept hangs on the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        y = self.up(x)
        return y * (y + self.bias).detach() + self.bias


@pytest.mark.parametrize("order", ["ABAB", "AAAA", "BBAA"])
@pytest.mark.parametrize("groups", GROUPS)
def test_parameters_that_are_stepped_in_backward(groups, order):
    plain = Loop()
    for i, each in enumerate(order):
        if each == "A":
            plain.blocks[i] = Added()
    ours = with_regions(plain, GROUPS[groups])
    optimizers = [torch.optim.AdamW(model.parameters(), 0.1) for model in (plain, ours)]
    release = OptimizerState(first_moment="32bit", gradients="release")
    applied = apply_optimizer_state(optimizers[1], release, ours)
    for _ in range(3):
        x = samples()
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            torch.manual_seed(1)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    applied.undo()
    assert_same(plain.state_dict(), ours.state_dict())


def test_each_region_is_repeated_once_though_parameters_step(monkeypatch):
    plain = Loop()
    ours = with_regions(plain, laminar(0, 4))
    repeated = count_repetitions(monkeypatch)
    ours(samples()).sum().backward()
    expected = len(repeated)
    optimizer = torch.optim.SGD(ours.parameters(), 0.1)
    apply_optimizer_state(optimizer, OptimizerState(first_moment="32bit", gradients="release"), ours)
    repeated.clear()
    ours(samples()).sum().backward()
    assert len(repeated) == expected


class ReturnsItsOwn(nn.Module):
    """Hands out a buffer and a parameter, which outlive every step."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("mask", torch.ones(WIDTH))

    def forward(self, x):
        return self.mask, self.pos, x * 2


class Masked(Loop):
    def forward(self, x):
        mask, pos, x = self.blocks[0](x)
        return self.head(self.blocks[2](self.blocks[1](x * mask + pos)))


def test_what_outlives_the_step_holds_no_region():
    plain = Masked()
    plain.blocks[0] = ReturnsItsOwn()
    ours = with_regions(plain, laminar(0, 3))
    alive = []
    for _ in range(3):
        ours(samples()).sum().backward()
        gc.collect()
        alive.append(sum(type(each) is checkpoint_regions.Region for each in gc.get_objects()))
    assert alive[0] == alive[1] == alive[2]
