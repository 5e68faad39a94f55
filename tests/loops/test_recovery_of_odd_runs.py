"""Recovery with scalers, and with batches and models of odd kinds; and what it leaves as it is without."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict, deque

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from lightning_memsave import Ledger, MemSave, Microbatching, MicrobatchWarning
from lightning_memsave.loops.batch_snapshot import BatchStart
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError
from tests.loops.recovery_runs import Deterministic, limited, train
from tests.loops.test_recovery import QUIET, Hungry, Net, assert_same_run, data, fit, logged

pytestmark = pytest.mark.filterwarnings("ignore::lightning_memsave.core.errors.NotLosslessWarning")  # numbers are drawn


# ---------------------------------------------------------------------------------------------- precision
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_recovered_run_with_a_grad_scaler_has_the_bits_of_one_with_that_size(where, accumulate):
    def run(size, limit):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2))
        options = {"plugins": [plugin], "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
        return fit(size, limit, where, **options), plugin.scaler.state_dict()

    (recovered, scale), (direct, expected_scale) = run("auto", 8), run(8, 10**9)
    assert_same_run(recovered, direct)
    assert scale == expected_scale
    assert recovered[1].report.num_oom_recovered == 4


# ---------------------------------------------------------------------------------------------- odd batches and models
class OnDicts(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.hungry = nn.Linear(4, 1), Hungry()

    def training_step(self, batch, batch_idx):
        labels = batch.pop("labels")  # as transformers' examples do
        batch["more"].append(1)
        return (self.hungry(self.layer(batch["x"])) - labels).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


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


class OfGraphs(OnDicts):
    """A batch whose samples nothing tells but a function."""

    def training_step(self, batch, batch_idx):
        return (self.hungry(self.layer(batch["x"])) * batch["weights"]).square().mean()


class EvaluatedOfGraphs(OfGraphs):
    def validation_step(self, batch, batch_idx):
        if len(batch["x"]) > self.hungry.limit:
            self.hungry.fail(len(batch["x"]))
        self.log("loss", self.training_step(batch, batch_idx), batch_size=len(batch["x"]))


def by_graph(batch, size):
    return [{"x": part, "weights": batch["weights"]} for part in batch["x"].split(size)]


def test_a_split_fn_is_used_when_memory_runs_out():
    batches = [{"x": torch.full((8, 4), float(i)), "weights": torch.ones(3)} for i in range(3)]
    microbatch = Microbatching(split_fn=by_graph, weight_fn=lambda part: len(part["x"]), reduction="mean")
    module, memsave = limited(OfGraphs, 4), MemSave(microbatch=microbatch)
    loader = DataLoader(batches, batch_size=None)
    train(module, memsave, loader)
    assert memsave.report.microbatch_size == 4
    module, trainer = limited(EvaluatedOfGraphs, 4), L.Trainer(**QUIET, callbacks=[MemSave(microbatch=microbatch)])
    with pytest.warns(MicrobatchWarning, match="in evaluation"):
        trainer.validate(module, loader, verbose=False)


def test_a_batch_whose_tensors_were_edited_is_not_run_again():
    class Edits(OnDicts):
        def training_step(self, batch, batch_idx):
            return self.hungry(self.layer(batch[0].mul_(2))).square().mean()

    with pytest.raises(OutOfMemoryUnrecoverableError, match="edits a tensor of the batch in place"):
        train(limited(Edits, 4), MemSave(), DataLoader(TensorDataset(torch.randn(8, 4)), 8))


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
    assert "cannot be checkpointed that way" in str(lines)
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
    assert "cannot be checkpointed that way" in str(lines)
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
    assert "cannot be checkpointed that way" in str(lines)
    assert raised == [0, 0]


def test_a_step_that_only_fails_under_the_ledger_is_run_again_without_it():
    class FailsWhenMeasured(Deterministic):
        def training_step(self, batch, batch_idx):
            if any(isinstance(mode, Ledger) for mode in _get_current_dispatch_mode_stack()):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().training_step(batch, batch_idx)

    module, plain, memsave = limited(FailsWhenMeasured, 10**9), limited(Deterministic, 10**9), MemSave()
    train(module, memsave)
    train(plain, MemSave())
    assert memsave.report.num_oom_recovered == 2  # steps 2 and 3
    assert memsave.report.num_steps_measured == 2
    assert memsave.report.microbatch_size is None
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


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


def test_regions_that_the_user_asked_for_are_not_withdrawn():
    module = limited(Net)
    module.net = nn.Sequential(*(EditsItsInput() for _ in range(2)))
    module.training_step = lambda batch, batch_idx: module.net(batch[0] * 1).square().mean()
    with pytest.raises(ValueError, match="edits its input in place"):
        train(module, MemSave(checkpointing="blocks", microbatch="auto"))


def test_memory_that_is_there_again_at_the_last_try_is_used():
    class Recovers(OnDicts):
        def training_step(self, batch, batch_idx):
            self.hungry.limit = 0 if len(self.hungry.tried) < 1 else 10**9
            return self.hungry(self.layer(batch[0])).square().mean()

    module, memsave = limited(Recovers, 0), MemSave(activations=False, checkpointing=False)
    expected = copy.deepcopy(module)
    train(module, memsave, DataLoader(TensorDataset(torch.randn(1, 4, generator=torch.Generator().manual_seed(1))), 1))
    assert module.hungry.tried == [1]
    assert not torch.equal(module.layer.weight, expected.layer.weight)


# ---------------------------------------------------------------------------------------------- as without
class Odd(Net):
    """Does in its steps what plain Lightning allows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("adjacency", torch.eye(4).to_sparse())
        self.lazy, self.running, self.read, self.logged = nn.LazyLinear(1), SumMetric(), [], []
        self.hidden, self.average = (torch.zeros(1),), torch.zeros(())

    def training_step(self, batch, batch_idx):
        x = self.hungry(self.last(self.norm(self.first(batch[0]))))
        loss = (x - batch[1]).square().mean() + 0 * self.lazy(batch[0]).sum()
        self.log("twice", loss)
        self.log("twice", loss * 2)
        self.logged.append(float(self.trainer.callback_metrics["twice"]))
        self.running.update(1.0)
        self.read.append(float(self.running.compute()))
        self.hidden, self.average = (self.hidden[0] + 1,), self.average * 0.5 + 1
        return loss


def test_steps_of_odd_kinds_are_as_in_plain_lightning():
    ours, plain = limited(Odd, 10**9), limited(Odd, 10**9)
    for module, callbacks in ((ours, [MemSave()]), (plain, [])):
        torch.manual_seed(1)
        module.trainer_ = L.Trainer(**QUIET, max_epochs=2, callbacks=callbacks)
        module.trainer_.fit(module, data())
    assert ours.read == plain.read == [1, 2, 3, 4, 5, 6]
    assert ours.logged == plain.logged
    assert logged(ours.trainer_) == logged(plain.trainer_)
    assert torch.equal(ours.last.weight, plain.last.weight)


def test_a_failed_try_leaves_no_trace_in_attributes_logs_and_metrics():
    class FailsOnce(Odd):
        def training_step(self, batch, batch_idx):
            self.fresh = getattr(self, "fresh", 0) + 1
            self.running.update(1.0)
            self.log("early", torch.tensor(float(batch_idx)))
            if batch_idx == 1 and not self.hungry.tried:
                self.hidden, self.average = (torch.ones(9),), self.average + 5
                self.hungry.fail(len(batch[0]))
            return super().training_step(batch, batch_idx)

    ours, plain = limited(FailsOnce), limited(FailsOnce)
    plain.hungry.tried, ours.hungry.limit, plain.hungry.limit = [0], 10**9, 10**9
    memsave = MemSave(checkpointing=False)  # the next try is the same, recomputed
    trainers = [train(ours, memsave), train(plain, None)]
    assert memsave.report.num_oom_recovered == 1
    assert ours.read == plain.read
    assert ours.average == plain.average
    assert torch.equal(ours.hidden[0], plain.hidden[0])
    assert ours.fresh == plain.fresh
    assert logged(trainers[0])["early"] == logged(trainers[1])["early"]


def test_a_hook_before_gradients_are_zeroed_runs_for_a_recovered_batch_too():
    class Reads(L.Callback):
        def __init__(self):
            self.seen = []

        def on_before_zero_grad(self, trainer, pl_module, optimizer):
            self.seen.append((trainer.global_step, pl_module.last.weight.grad is not None))

    class FailsOnce(Deterministic):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1 and not self.hungry.tried:
                self.hungry.fail(len(batch[0]))
            return super().training_step(batch, batch_idx)

    ours, plain, hooks = limited(FailsOnce, 10**9), limited(FailsOnce, 10**9), [Reads(), Reads()]
    plain.hungry.tried = [0]
    torch.manual_seed(1)
    for module, hook, callbacks in ((ours, hooks[0], [MemSave()]), (plain, hooks[1], [])):
        L.Trainer(**QUIET, max_epochs=1, callbacks=[*callbacks, hook]).fit(module, data())
    assert hooks[0].seen == hooks[1].seen


def test_the_batch_size_finder_finds_what_fits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = limited(Deterministic, 16)
    module.batch_size = 2
    dataset = data().dataset
    module.train_dataloader = lambda: DataLoader(dataset, module.batch_size)
    trainer = L.Trainer(**QUIET, max_epochs=1, callbacks=[MemSave()])
    assert L.pytorch.tuner.Tuner(trainer).scale_batch_size(module, max_trials=6, init_val=2) == 16


def test_asking_what_the_loss_is_leaves_large_buffers_alone():
    class Queue(Deterministic):
        def __init__(self):
            super().__init__()
            self.register_buffer("queue", torch.zeros(2**19))

        def training_step(self, batch, batch_idx):
            self.queue.add_(len(batch[0]))
            return super().training_step(batch, batch_idx)

    module = limited(Queue, 10**9)
    train(module, MemSave(microbatch=8))  # the probe evaluates three more batches
    assert module.queue.unique().item() == len(data().dataset)


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
