"""Recovery by default, and microbatches that grow back."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave, Microbatching
from lightning_memsave.core.errors import NotLosslessWarning
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.loops import recovery
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError
from lightning_memsave.loops.recovery import RecoveryPolicy
from lightning_memsave.measuring.ledger import Measurement
from tests.loops.recovery_runs import Deterministic, limited, train
from tests.loops.test_recovery import QUIET, Net

pytestmark = pytest.mark.filterwarnings("ignore::lightning_memsave.core.errors.NotLosslessWarning")  # numbers are drawn


def assert_close(first, second):
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


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
        with pytest.raises(
            OutOfMemoryUnrecoverableError,
            match=r'added to gradients of earlier batches.*microbatch="auto"`, without a budget',
        ):
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
def test_microbatches_grow_back_and_failures_of_that_become_rare(monkeypatch):
    # The question how gradients depend on the batch fails here as well, and is then left out.
    monkeypatch.setattr("lightning_memsave.loops.loss_reduction._Evaluation.gradients_of", lambda self, subject: [])
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
    grower = RecoveryPolicy(Microbatching(growth_interval=1, headroom_fraction=0.1))
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


@pytest.mark.parametrize(("weights", "expected"), [(900, 4.0), (1100, None)])
def test_nothing_is_cut_for_a_limit_below_what_the_model_takes_itself(weights, expected):
    recovery = RecoveryPolicy(Microbatching(max_bytes=1000))
    by_category = {**dict.fromkeys(CATEGORIES, 0), "weights": weights, "activations": 500}
    step = Measurement(peak_bytes=weights + 500, by_category=by_category)
    assert recovery.measured(None, torch.zeros(8, 2), step) == (expected is not None)
    assert recovery.size_for(torch.zeros(8, 2)) == expected


def test_growth_respects_the_limit_in_bytes():
    grower = RecoveryPolicy(Microbatching(max_bytes=1000, growth_interval=1))
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
