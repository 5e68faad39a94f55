"""What regions keep, how long, and what work they repeat: counted."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from lightning_memsave import (
    Checkpointing,
    Ledger,
    apply_checkpointing,
)
from lightning_memsave.saved_tensors import checkpoint_regions
from lightning_memsave.saved_tensors.randomness import Randomness
from tests.saved_tensors.region_nets import (
    BETWEEN,
    GROUPS,
    Block,
    Impure,
    Loop,
    Saver,
    count_repetitions,
    kept_bytes,
    laminar,
    names,
    samples,
    twice,
    with_regions,
)


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
    made, init = [], checkpoint_regions.Region.__init__
    monkeypatch.setattr(
        checkpoint_regions.Region, "__init__", lambda self, *a: made.append(weakref.ref(self)) or init(self, *a)
    )
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

    def noting(self, *args):
        init(self, *args)
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
