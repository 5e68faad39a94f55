"""Measures against too little memory: which are taken, in which order, and when they are withdrawn."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn

from lightning_memsave import MemSave, Microbatching
from tests.loops.recovery_runs import Deterministic, limited, train
from tests.loops.test_recovery import QUIET, Net, data

pytestmark = pytest.mark.filterwarnings("ignore::lightning_memsave.core.errors.NotLosslessWarning")  # numbers are drawn


def test_what_was_switched_off_is_not_taken_up():
    module = Net()
    module.hungry.limit = 16
    slots = {"microbatch": Microbatching(size="auto", reduction="mean"), "activations": False, "checkpointing": False}
    memsave = MemSave(**slots)
    L.Trainer(**QUIET, max_epochs=1, callbacks=[memsave]).fit(module, data())
    assert memsave.report.num_oom_recovered == 1
    assert [applied.technique for applied in memsave.report.applied] == ["early_zero_grad", "microbatching"]


class EditsItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x.mul_(1.5)).tanh() + 0


def test_regions_that_the_model_refuses_are_withdrawn(lines):
    class Refuses(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*(EditsItsInput() for _ in range(3)))

        def training_step(self, batch, batch_idx):
            z = self.hungry(self.blocks(batch[0] * 1))
            return (self.last(self.norm(self.first(z))) - batch[1]).square().mean()

    module, direct, memsave = limited(Refuses), limited(Refuses, 10**9), MemSave()
    train(module, memsave)
    assert "cannot be run that way" in str(lines)
    assert memsave.report.microbatch_size == 8
    train(direct, MemSave(microbatch=8))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), direct.parameters(), strict=True))
    assert "checkpointing" not in [a.technique for a in memsave.report.applied]


class Remembers(nn.Module):
    """Its second call in a step meets what the first one left, as a decoder's cache of keys does."""

    def __init__(self):
        super().__init__()
        self.layer, self.cache = nn.Linear(16, 16), []

    def forward(self, x):
        self.cache.append(x.detach())
        return self.layer(torch.cat(self.cache, 1)[:, : 16 * len(self.cache)]).tanh()


def test_regions_that_cannot_be_repeated_are_withdrawn_whatever_the_error(lines):
    class Caches(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*(Remembers() for _ in range(3)))

        def training_step(self, batch, batch_idx):
            for block in self.blocks:
                block.cache.clear()
            z = self.hungry(self.blocks(batch[0] * 1))
            return (self.last(self.norm(self.first(z))) - batch[1]).square().mean()

    module, direct, memsave = limited(Caches), limited(Caches, 10**9), MemSave()
    train(module, memsave)
    assert "cannot be run that way" in str(lines)
    assert memsave.report.microbatch_size == 8
    train(direct, MemSave(microbatch=8))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), direct.parameters(), strict=True))


def test_an_error_of_the_users_comes_again_without_regions(lines):
    class Raises(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))

        def training_step(self, batch, batch_idx):
            z = self.blocks(batch[0] * 1)
            if len(self.hungry.tried) == 2:
                raised.append(batch_idx)
                raise KeyError("the user's")
            return self.hungry(z).square().mean()

    raised = []
    with pytest.raises(KeyError, match="the user's"):
        train(limited(Raises), MemSave())
    assert "cannot be run that way" in str(lines)
    assert raised == [0, 0]


def test_regions_that_the_user_asked_for_are_not_withdrawn():
    module = limited(Net)
    module.net = nn.Sequential(*(EditsItsInput() for _ in range(2)))
    module.training_step = lambda batch, batch_idx: module.net(batch[0] * 1).square().mean()
    with pytest.raises(ValueError, match="edits its input in place"):
        train(module, MemSave(checkpointing="blocks", microbatch="auto"))


class Blocks(Deterministic):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))

    def training_step(self, batch, batch_idx):
        return super().training_step((self.blocks(batch[0]), batch[1]), batch_idx)


class Takes(L.Callback):
    """Calls `take` with the session before the first batch, and notes what is returned."""

    def __init__(self, take):
        self.take, self.found = take, None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.found = self.take(trainer, trainer.strategy.memsave)


def taken(take, **slots):
    callback, module, memsave = Takes(take), limited(Blocks, 10**9), MemSave(**slots)
    torch.manual_seed(1)
    trainer = L.Trainer(**QUIET, max_epochs=1, callbacks=[memsave, callback])
    trainer.fit(module, data())
    return callback.found, module, memsave


def all_of_them(trainer, session):
    found = []
    while (what := session.fallbacks.take_next(trainer)) is not None:
        found.append(what)
    return found, session.fallbacks.num_needed


ORDER = [
    "activations recomputed where that is cheap",
    "checkpointing of",
    "checkpointing of the best groups of calls",
    "the inputs of checkpointed regions outside of the device's memory",
]


@pytest.mark.parametrize(
    ("slots", "places"),
    [
        ({}, [0, 1, 2]),  # and no inputs, as regions are planned when the batch is run again
        ({"activations": "exact"}, [1, 2]),
        ({"activations": False}, [1, 2]),
        ({"checkpointing": False}, [0]),
        ({"checkpointing": "blocks"}, [0, 3]),
        ({"activations": False, "checkpointing": False}, []),
    ],
    ids=str,
)
def test_measures_come_in_the_order_of_their_cost_and_leave_what_was_set(slots, places):
    (found, num_needed), module, _ = taken(all_of_them, **slots)
    assert len(found) == len(places)
    assert all(what.startswith(ORDER[place]) for what, place in zip(found, places, strict=True))
    assert num_needed == len(ORDER), "those that are skipped count as well: their places are what is learned"
    plain = limited(Blocks, 10**9)
    train(plain, MemSave())
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


def test_what_an_earlier_run_has_needed_is_taken_at_once():
    def learned(trainer, session):
        session.fallbacks.num_learned = 2
        first, again = (session.fallbacks.take_learned(trainer) for _ in range(2))
        return first, again, session.fallbacks.num_needed

    found, _, memsave = taken(learned)
    assert found == (True, False, 2)
    techniques = [applied.technique for applied in memsave.report.applied]
    assert {"activation_compression", "checkpointing"} <= set(techniques)


def test_nothing_was_learned_and_nothing_is_taken():
    found, _, memsave = taken(lambda trainer, session: session.fallbacks.take_learned(trainer))
    assert found is False
    assert [applied.technique for applied in memsave.report.applied] == ["early_zero_grad"]


@pytest.mark.parametrize(
    ("slots", "expected"), [({}, [False, True, False]), ({"checkpointing": "blocks"}, [False] * 3)]
)
def test_only_regions_of_a_measure_are_withdrawn(slots, expected):
    def withdraws(trainer, session):
        found = [session.fallbacks.withdraw(trainer)]
        for _ in range(2):
            session.fallbacks.take_next(trainer)
        found += [session.fallbacks.withdraw(trainer) for _ in range(2)]
        return found, session.scopes.regions is not None

    (found, has_regions), _, _ = taken(withdraws, **slots)
    assert found == expected
    assert has_regions is bool(slots)


def test_a_resumed_run_does_not_take_regions_that_were_refused(lines):
    class Refuses(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*(EditsItsInput() for _ in range(3)))

        def training_step(self, batch, batch_idx):
            z = self.hungry(self.blocks(batch[0] * 1))
            return (self.last(self.norm(self.first(z))) - batch[1]).square().mean()

    memsave = MemSave()
    train(limited(Refuses), memsave)
    assert memsave.state_dict()["regions_refused"]
    lines.clear()
    train(limited(Refuses), memsave)  # a second fit begins with what the first one has learned
    assert "cannot be checkpointed" not in str(lines)
    assert memsave.report.microbatch_size == 8
