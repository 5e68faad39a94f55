"""What a batch starts with comes back; what cannot come back is final, with a reason."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict, deque

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave, Microbatching
from lightning_memsave.loops.batch_snapshot import BatchStart
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError
from tests.loops.recovery_runs import Deterministic, OnDicts, limited, train
from tests.loops.test_recovery import Net

pytestmark = pytest.mark.filterwarnings("ignore::lightning_memsave.core.errors.NotLosslessWarning")  # numbers are drawn


def test_a_batch_whose_containers_were_changed_is_put_back():
    def run(limit, **slots):
        batches = [{"x": torch.full((8, 4), float(i)), "labels": torch.ones(8, 1), "more": []} for i in range(3)]
        module = limited(OnDicts, limit)
        memsave = MemSave(microbatch=Microbatching(reduction="mean", **slots))
        train(module, memsave, DataLoader(batches, batch_size=None))
        return module, memsave

    recovered, memsave = run(4)
    direct, _ = run(10**9, size=4)
    assert memsave.report.microbatch_size == 4
    assert all(torch.equal(a, b) for a, b in zip(recovered.parameters(), direct.parameters(), strict=True))


class Keeps(OnDicts):
    """Containers of containers, and others than lists and dictionaries."""

    def __init__(self):
        super().__init__()
        self.outs, self.pairs = {"train": [], "val": [[]]}, ([], 1)
        self.by_size, self.last, self.seen = defaultdict(list), deque(maxlen=2), Counter()
        self.total, self._private, self._count = np.float64(0.0), [], 0

    def training_step(self, batch, batch_idx):
        size = len(batch["x"])
        self.outs["train"].append(size)
        self.outs["val"][0].append(size)
        self.pairs[0].append(size)
        self.by_size[size].append(batch_idx)
        self.last.append(size)
        self.seen[size] += 1
        self.total += size
        self._private.append(size)
        self._count += 1
        return super().training_step(batch, batch_idx)


def test_what_a_module_keeps_is_put_back_at_every_depth():
    batches = [{"x": torch.full((8, 4), float(i)), "labels": torch.ones(8, 1), "more": []} for i in range(3)]
    module, plain = limited(Keeps, 4), limited(Keeps, 10**9)
    train(
        module, MemSave(), DataLoader(copy.deepcopy(batches), batch_size=None)
    )  # asks for the reduction, and recovers
    train(plain, MemSave(microbatch=Microbatching(size=4, reduction="mean")), DataLoader(batches, batch_size=None))
    for name in ("outs", "pairs", "by_size", "last", "seen", "total", "_private", "_count"):
        assert getattr(module, name) == getattr(plain, name)
    assert module.seen == {4: 6}
    assert module.last.maxlen == 2


def test_a_large_container_among_others_is_watched_and_the_others_come_back():
    module = Keeps()
    module.stats = {"count": 3, "history": [0.0] * 5000, "mean": torch.zeros(2)}
    start = BatchStart(module, set())
    module.stats["count"] += 1
    assert start.why_final() is None
    start.restore()
    assert module.stats["count"] == 3
    module.stats["history"].append(1.0)
    assert "changes `stats`, which is too large" in start.why_final()
    module.stats["history"].pop()
    assert start.why_final() is None
    module.stats["mean"].add_(1)
    assert "edits a tensor of `stats` in place" in start.why_final()


def test_a_batch_whose_tensors_were_edited_is_not_run_again():
    class Edits(OnDicts):
        def training_step(self, batch, batch_idx):
            return self.hungry(self.layer(batch[0].mul_(2))).square().mean()

    with pytest.raises(OutOfMemoryUnrecoverableError, match="edits a tensor of the batch in place"):
        train(limited(Edits, 4), MemSave(), DataLoader(TensorDataset(torch.randn(8, 4)), 8))


def test_large_containers_are_not_copied_but_changes_are_final():
    class Collects(Net):
        def __init__(self):
            super().__init__()
            self.index = list(range(5000))

        def training_step(self, batch, batch_idx):
            self.index.append(batch_idx)
            return super().training_step(batch, batch_idx)

    module = Collects()
    rehearsal, start = BatchStart(module, set(), most_entries=math.inf), BatchStart(module, set())
    module.index.append(0)
    assert "too large to be copied" in start.why_final()
    start.restore()
    assert len(module.index) == 5001
    rehearsal.restore()
    assert len(module.index) == 5000
    with pytest.raises(torch.OutOfMemoryError, match="changes `index`, which is too large"):
        train(limited(Collects), MemSave())


def test_gradients_of_a_failed_try_are_taken_back_or_make_it_final():
    """Under accumulation, without a copy: of a parameter that earlier batches have not met, they are taken back."""
    module = limited(Net)
    met, unmet = list(module.parameters())[:2]
    met.grad = torch.ones_like(met)
    start = BatchStart(module, set(), "watched")
    unmet.grad = torch.ones_like(unmet)
    assert start.why_final() is None
    start.restore()
    assert unmet.grad is None
    assert torch.equal(met.grad, torch.ones_like(met))
    met.grad = met.grad + 1  # as under `create_graph=True`
    assert "added to gradients of earlier batches" in start.why_final()


def test_buffers_that_change_for_the_first_time_in_a_failed_try_make_it_final():
    class Late(Deterministic):
        def __init__(self):
            super().__init__()
            self.register_buffer("bank", torch.zeros(2**19))  # too large to be cloned unasked

        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                self.bank.add_(1)
            return super().training_step(batch, batch_idx) if batch_idx != 1 else self.hungry.fail(1)

    with pytest.raises(OutOfMemoryUnrecoverableError, match="changed the buffer bank for the first time"):
        train(limited(Late, 10**9), MemSave())
