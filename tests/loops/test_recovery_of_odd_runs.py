"""Recovery with scalers, and with batches and models of odd kinds; and what it leaves as it is without."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from lightning_memsave import Ledger, MemSave, Microbatching, MicrobatchWarning
from tests.loops.recovery_runs import Deterministic, OnDicts, limited, train
from tests.loops.test_recovery import QUIET, Net, assert_same_run, data, fit, logged

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


class OfPackedSequences(L.LightningModule):
    """Outputs are as long as the longest sequence of a batch, and targets as the batch is padded."""

    def __init__(self):
        super().__init__()
        self.layers, self.head, self.most = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1), 6

    def training_step(self, batch, batch_idx):
        x, y, lengths = batch
        if (_failures and batch_idx == _failures[0]) or (batch_idx == 2 and len(x) > self.most):
            raise torch.OutOfMemoryError(f"CUDA out of memory: {_failures[:1] and _failures.pop(0)}")
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out = pad_packed_sequence(self.layers(packed)[0], batch_first=True)[0]
        return (self.head(out)[..., 0] - y).square().mean(1).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


_failures: list[int] = []  # batches in which memory runs out, outside of what recovery puts back


def padded():
    all_lengths = [torch.full((6,), 5), torch.full((6,), 5), torch.tensor([5, 3, 3, 2, 4, 3]), torch.full((6,), 5)]
    generator = torch.Generator().manual_seed(0)
    draw = [(torch.randn(6, 5, 4, generator=generator), torch.randn(6, 5, generator=generator)) for _ in all_lengths]
    return DataLoader([(*pair, lengths) for pair, lengths in zip(draw, all_lengths, strict=True)], batch_size=None)


@pytest.mark.parametrize(
    ("settings", "failures"),
    [
        ({}, [0, 0, 0]),
        ({"microbatch": Microbatching(goal="smallest")}, []),
    ],
)
def test_a_batch_of_which_a_part_fails_is_run_whole_and_so_are_later_ones(settings, failures):
    _failures[:] = []
    torch.manual_seed(0)
    module = OfPackedSequences()
    plain, ours, memsave = copy.deepcopy(module), copy.deepcopy(module), MemSave(**settings)
    train(plain, None, padded())
    _failures[:] = failures
    with pytest.warns(MicrobatchWarning, match=r"run whole as long as they fit: .* part of batch 2: RuntimeError"):
        train(ours, memsave, padded())
    assert not _failures
    assert memsave.report.loss_class == "exact"
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_later_batch_that_does_not_fit_whole_is_cut_again():
    _failures[:] = [0, 0, 0, 3]
    torch.manual_seed(0)
    module = OfPackedSequences()
    plain, ours, memsave = copy.deepcopy(module), copy.deepcopy(module), MemSave()
    with pytest.warns(MicrobatchWarning, match="part of batch 2"):
        train(ours, memsave, padded())
    assert not _failures
    train(plain, None, padded())
    assert (memsave.report.loss_class, memsave.report.microbatch_size) == ("exact", 3)
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_where_the_whole_does_not_fit_either_the_error_tells_of_the_part():
    _failures[:], module = [0] * 3, OfPackedSequences()
    module.most = 5
    says = r"cannot be cut .*the step fails on a part of batch 2: RuntimeError"
    with (
        pytest.warns(MicrobatchWarning, match="part of batch 2"),
        pytest.raises(torch.OutOfMemoryError, match=says),
    ):
        train(module, MemSave(), padded())


def test_an_error_in_microbatches_that_were_asked_for_tells_of_them():
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        train(OfPackedSequences(), MemSave(microbatch=2), padded())
    assert "run in 3 microbatches" in caught.value.__notes__[-1]
    assert "split_fn" in caught.value.__notes__[-1]


class OfSparseGradients(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.table, self.layer, self.most = nn.Embedding(2000, 16, sparse=True), nn.Linear(16, 1), 6

    def training_step(self, batch, batch_idx):
        if len(batch) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.layer(self.table(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_sparse_gradients_are_no_obstacle():
    torch.manual_seed(0)
    plain, memsave = OfSparseGradients(), MemSave(summary=False)
    ours = copy.deepcopy(plain)
    ours.most = 3
    loader = DataLoader(torch.randint(2000, (18, 5)), 6)
    train(plain, None, loader, max_epochs=2)
    train(ours, memsave, loader, max_epochs=2)
    assert (memsave.report.microbatch_size, memsave.report.loss_class) == (3, "exact")
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Mistaken(Net):
    """A mistake of the user's, in a batch that is cut."""

    kind = KeyError

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            _calls.append(len(batch[0]))
            raise self.kind("mistake")
        return super().training_step(batch, batch_idx)


_calls: list[int] = []


def test_a_mistake_of_the_users_is_raised_when_the_whole_batch_has_shown_it():
    _calls.clear()
    module = limited(Mistaken, 8)
    module.kind = ValueError
    with pytest.warns(MicrobatchWarning, match="ValueError"), pytest.raises(ValueError, match="mistake"):
        train(module, MemSave())
    assert len(_calls) == 2
    assert _calls[0] < _calls[1]


def test_an_error_that_has_nothing_to_do_with_shapes_is_raised_at_once():
    _calls.clear()
    with pytest.raises(KeyError, match="mistake"):
        train(limited(Mistaken, 8), MemSave())
    assert len(_calls) == 1


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
