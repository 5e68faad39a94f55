"""Recovery where it meets the rest of a run: defaults, growth, evaluation, scalers, batches and models of odd kinds."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import BinaryAUROC

from lightning_memsave import MemSave, Microbatching
from lightning_memsave.core.errors import NotLosslessWarning
from lightning_memsave.memory.ledger import Measurement
from lightning_memsave.strategies import mixin, recovery
from lightning_memsave.strategies.out_of_memory import OutOfMeasuresError
from lightning_memsave.strategies.recovery import Recovery
from tests.strategies.test_recovery import QUIET, Hungry, Net, assert_same_run, data, fit, logged


def limited(make=Net, limit=8, where="forward"):
    torch.manual_seed(0)
    module = make()
    module.hungry.limit, module.hungry.where = limit, where
    return module


def train(module, memsave, loader=None, **options):
    torch.manual_seed(1)
    trainer = L.Trainer(**{**QUIET, "max_epochs": 1, **options}, callbacks=[memsave] if memsave else [])
    trainer.fit(module, loader or data())
    return trainer


def assert_close(first, second):
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class Deterministic(Net):
    def training_step(self, batch, batch_idx):
        loss = (self.last(self.hungry(self.norm(self.first(batch[0])))) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss


@pytest.fixture
def lines(monkeypatch):
    """What is told to people."""
    told = []
    monkeypatch.setattr(mixin, "rank_zero_info", told.append)
    monkeypatch.setattr(recovery, "_tell", told.append)
    return told


# ---------------------------------------------------------------------------------------------- by default
def test_the_one_line_recovers():
    module, plain, memsave = limited(Deterministic), limited(Deterministic, 10**9), MemSave()
    train(module, memsave)
    train(plain, None)
    assert memsave.report.microbatch_size == 8
    assert memsave.report.loss_class == "exact"
    assert_close(module, plain)


def test_what_only_a_change_can_save_is_saved_with_a_warning():
    module = limited(lambda: Net(0.5))
    memsave = MemSave(microbatch=Microbatching(reduction="mean"))
    with pytest.warns(NotLosslessWarning, match=r"drop \(Dropout"):
        train(module, memsave)
    assert memsave.report.loss_class == "changed"


def test_as_a_default_it_steps_aside_where_it_cannot_work(lines):
    class Manual(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers().zero_grad()
            self.manual_backward(self.last(self.first(batch[0])).square().mean())
            self.optimizers().step()

    memsave = MemSave()
    train(Manual(), memsave)
    assert "out-of-memory recovery cannot be combined with manual optimization" in str(lines)
    assert memsave.report.num_oom_recovered is None
    with pytest.raises(ValueError, match="manual optimization"):
        train(Manual(), MemSave(microbatch="auto"))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_as_a_default_it_keeps_no_copy_of_accumulated_gradients(where):
    """So a failure in forward is recovered, one that has added to them is not."""

    class Second(Deterministic):
        def training_step(self, batch, batch_idx):
            self.hungry.limit = 8 if batch_idx % 2 else 10**9  # in the second batch of each window
            return super().training_step(batch, batch_idx)

    module, plain, memsave = limited(Second, where=where), limited(Deterministic, 10**9), MemSave()
    if where == "backward":  # the last layer has its gradient before the hook fails
        with pytest.raises(OutOfMeasuresError, match=r'added to gradients of earlier batches.*microbatch="auto"'):
            train(module, memsave, accumulate_grad_batches=2)
        return
    train(module, memsave, accumulate_grad_batches=2)
    train(plain, None, accumulate_grad_batches=2)
    assert memsave.report.num_oom_recovered == 4
    assert_close(module, plain)


def test_a_second_fit_begins_with_what_the_first_one_learned():
    memsave = MemSave(microbatch=Microbatching(reduction="mean"))
    train(limited(), memsave)
    assert memsave.report.num_oom_recovered == 4
    module = limited()
    train(module, memsave)
    assert module.hungry.tried == []
    assert memsave.report.num_oom_recovered == 0


# ---------------------------------------------------------------------------------------------- growth
def test_microbatches_grow_back_and_failures_of_that_become_rare():
    loader = DataLoader(TensorDataset(torch.randn(400, 16), torch.randn(400, 1)), 8)
    module = limited(limit=2)
    memsave = MemSave(
        microbatch=Microbatching(reduction="mean", growth_interval=4), activations=False, checkpointing=False
    )
    train(module, memsave, loader)
    # Two halvings in the first batch; then 4 after 4 batches, and again 8, 16, 32 batches after each failure.
    assert module.hungry.tried == [8, 4, 4, 4, 4]
    assert memsave.report.num_oom_recovered == 5
    module = limited(limit=2)
    module.on_train_batch_start = lambda batch, batch_idx: setattr(module.hungry, "limit", 2 if batch_idx < 3 else 99)
    memsave = MemSave(
        microbatch=Microbatching(reduction="mean", growth_interval=4), activations=False, checkpointing=False
    )
    train(module, memsave, loader)
    assert module.hungry.tried == [8, 4]
    assert memsave.report.microbatch_size == 8  # whole batches again


def test_growth_leaves_head_room(monkeypatch):
    now = {"peak": 0}
    monkeypatch.setattr(recovery, "total_bytes", lambda device: 1000)
    monkeypatch.setattr(
        recovery, "read_peak", lambda device: type("Bytes", (), {"allocated_bytes": now["peak"], "reserved_bytes": 0})
    )
    grower = Recovery(Microbatching(growth_interval=1, headroom_fraction=0.1))
    grower.limit_elements = 4.0
    batch, device = torch.zeros(8, 2), torch.device("cpu")
    now["peak"] = 501  # 100 before the step and 401 in it: 902 with twice as much
    grower.succeed(batch, 4, device, held_bytes=100)
    assert grower.limit_elements == 4
    now["peak"] = 500
    grower.succeed(batch, 4, device, held_bytes=100)
    assert grower.limit_elements == 8


def test_a_limit_in_bytes_holds_without_an_error_of_the_device():
    def train_with(max_bytes):
        memsave = MemSave(
            microbatch=Microbatching(reduction="mean", max_bytes=max_bytes), activations=False, checkpointing=False
        )
        peaks = []

        class Peaks(L.Callback):
            def on_train_batch_end(self, *args):
                if memsave._meter.tracked is not None:
                    peaks.append(memsave._meter.tracked.peak_bytes)

        torch.manual_seed(1)
        loader = DataLoader(TensorDataset(torch.randn(640, 16), torch.randn(640, 1)), 64)
        L.Trainer(**QUIET, max_epochs=1, callbacks=[memsave, Peaks()]).fit(limited(limit=10**9), loader)
        return peaks, memsave

    free, _ = train_with("1GiB")
    assert len(free) == 2
    limit = int(0.6 * free[0])
    peaks, memsave = train_with(limit)
    assert peaks[0] == free[0] > limit
    assert peaks[-1] <= limit  # measured again until it holds
    assert memsave.report.microbatch_size < 64


def test_growth_respects_the_limit_in_bytes():
    grower = Recovery(Microbatching(max_bytes=1000, growth_interval=1))
    grower.limit_elements = 4.0
    batch, device = torch.zeros(8, 2), torch.device("cpu")
    grower.succeed(batch, 4, device, None)
    assert grower.limit_elements == 4  # nothing has been measured
    categories = dict.fromkeys(("weights", "gradients", "optimizer_state", "activations", "temporary", "data"), 0)
    for activations, expected in ((401, 4), (400, 8)):
        step = Measurement(
            peak_bytes=200 + activations, by_category={**categories, "weights": 200, "activations": activations}
        )
        assert not grower.measured(None, batch, step)
        grower.succeed(batch, 4, device, None)
        assert grower.limit_elements == expected


# ---------------------------------------------------------------------------------------------- evaluation
PARTS = pytest.mark.filterwarnings("ignore:Memory ran out in evaluation")


class Evaluated(Net):
    def __init__(self):
        super().__init__()
        self.auroc, self.calls, self.outputs = BinaryAUROC(), [], []

    def forward(self, x):
        if len(x) > self.hungry.limit and not torch.is_grad_enabled():
            self.hungry.fail(len(x))
        return self.last(self.norm(self.first(x)))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("before", x.mean(), on_step=True, on_epoch=True)
        predicted = self(x)
        self.calls.append(len(x))
        self.auroc(predicted[:, 0], (y[:, 0] > 0).long())
        loss = (predicted - y).square().mean()
        self.log_dict({"val_loss": loss, "auroc": self.auroc, "random": torch.rand(()) * 0 + x.sum() * 0})
        return {"loss": loss, "predicted": predicted}

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append((outputs["loss"], outputs["predicted"]))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


@PARTS
@pytest.mark.parametrize("what", ["validate", "test"])
def test_evaluation_recovers_with_the_same_figures(what):
    plain, module, memsave = limited(Evaluated, 10**9), limited(Evaluated, 10), MemSave()
    expected = getattr(L.Trainer(**QUIET), what)(plain, data(), verbose=False)
    found = getattr(L.Trainer(**QUIET, callbacks=[memsave]), what)(module, data(), verbose=False)
    assert found[0].keys() == expected[0].keys()
    for name, value in expected[0].items():
        assert found[0][name] == pytest.approx(value, rel=1e-5, abs=1e-7)
    assert module.calls == [8] * 12
    assert plain.calls == [32] * 3
    assert memsave.report.num_oom_recovered == 2
    for one, other in zip(module.outputs, plain.outputs, strict=True):
        torch.testing.assert_close(one, other)


@PARTS
def test_prediction_recovers():
    plain, module, memsave = limited(Evaluated, 10**9), limited(Evaluated, 5), MemSave()
    expected = L.Trainer(**QUIET).predict(plain, data())
    found = L.Trainer(**QUIET, callbacks=[memsave]).predict(module, data())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    assert memsave.report.num_oom_recovered == 3


@PARTS
def test_validation_within_a_fit_recovers_and_leaves_accumulated_gradients_alone():
    class Both(Evaluated):
        def training_step(self, batch, batch_idx):
            return (self.last(self.norm(self.first(batch[0]))) - batch[1]).square().mean()

    def run(limit, callbacks):
        module = limited(Both, limit)
        torch.manual_seed(1)
        trainer = L.Trainer(**QUIET, max_epochs=1, callbacks=callbacks, accumulate_grad_batches=2, val_check_interval=1)
        trainer.fit(module, data(), data())
        return module

    memsave = MemSave()
    plain, ours = run(10**9, []), run(10, [memsave])
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))
    assert memsave.report.num_oom_recovered == 2
    assert memsave.report.microbatch_size is None  # training was never cut


@PARTS
def test_evaluation_that_cannot_be_cut_says_so():
    module = limited(Evaluated, 0)
    with pytest.raises(OutOfMeasuresError, match=r"a batch of validate, which cannot be cut: it has one sample"):
        L.Trainer(**QUIET, callbacks=[MemSave()]).validate(module, data(), verbose=False)
    module.validation_step = lambda batch, batch_idx: (_ for _ in ()).throw(ValueError("mine"))
    with pytest.raises(ValueError, match="mine"):
        L.Trainer(**QUIET, callbacks=[MemSave()]).validate(module, data(), verbose=False)


def test_that_evaluation_is_cut_is_told_once():
    trainer = L.Trainer(**QUIET, callbacks=[MemSave()])
    with pytest.warns(UserWarning, match="run in parts. Right are: torchmetrics") as told:
        trainer.validate(limited(Evaluated, 10), data(), verbose=False)
    assert len([w for w in told if "in parts" in str(w.message)]) == 1


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


def test_a_batch_whose_tensors_were_edited_is_not_run_again():
    class Edits(OnDicts):
        def training_step(self, batch, batch_idx):
            return self.hungry(self.layer(batch[0].mul_(2))).square().mean()

    with pytest.raises(OutOfMeasuresError, match="edits a tensor of the batch in place"):
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

    with pytest.raises(OutOfMeasuresError, match="changed the buffer bank for the first time"):
        train(limited(Late, 10**9), MemSave())
