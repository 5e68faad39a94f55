"""`MemoryMonitor` when something goes wrong: growth, and memory that runs out."""

from __future__ import annotations

import gc
import logging
import pickle
import time

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_memsave import MemoryGrowthWarning, MemoryMonitor, MemSave, MicrobatchWarning, OptimizerState
from lightning_memsave.callbacks import monitor as monitor_module
from lightning_memsave.core.units import format_bytes
from lightning_memsave.reporting import messages as texts

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")


class Model(BoringModel):
    """Keeps outputs when told to, and runs out of memory at a batch."""

    def __init__(self, keeps=False, fails_at=None, error=None):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Tanh(), torch.nn.Linear(48, 2))
        self.kept, self.keeps, self.fails_at, self.error = [], keeps, fails_at, error

    def training_step(self, batch, batch_idx):
        y = self.layer(batch)
        if self.keeps:
            self.kept.append(y)
        if batch_idx == self.fails_at:
            raise self.error
        return y.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 160), batch_size=16)


def fit(model, *callbacks, **options):
    trainer = L.Trainer(
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, "limit_val_batches": 0, **options},
    )
    trainer.fit(model)
    return trainer


def test_growth_is_warned_of_once_with_the_line():
    with pytest.warns(MemoryGrowthWarning) as caught:
        fit(Model(keeps=True), MemoryMonitor(every=1))
    (text,) = [str(each.message) for each in caught if each.category is MemoryGrowthWarning]
    line = Model.training_step.__code__.co_firstlineno + 1
    assert f"4 x float32 [16, 2], 512 B, made at callbacks/test_monitor.py:{line} training_step" in text
    assert "0 B -> 128 B -> 256 B -> 384 B" in text


def test_an_ordinary_run_is_not_warned_of(recwarn):
    fit(Model(), MemoryMonitor(every=1))
    assert not [each for each in recwarn if each.category is MemoryGrowthWarning]


def test_two_monitors_warn_once():
    with pytest.warns(MemoryGrowthWarning) as caught:
        fit(Model(keeps=True), MemoryMonitor(every=1), MemoryMonitor(every=1))
    assert len([each for each in caught if each.category is MemoryGrowthWarning]) == 1


@pytest.fixture
def messages(monkeypatch):
    """What the run's log says; Lightning's loggers do not propagate to pytest's."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("lightning.pytorch.memsave")
    log.addHandler(handler)
    yield said
    log.removeHandler(handler)


def test_the_explanation_of_out_of_memory_is_a_page_at_most(messages):
    with pytest.raises(MemoryError):
        fit(Model(fails_at=5, error=MemoryError("none left")), MemoryMonitor())
    (text,) = messages
    assert len(text.splitlines()) <= 45


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 20 GiB\nmore"),
        (RuntimeError, "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
        (MemoryError, "none left"),
    ],
)
@pytest.mark.parametrize("fails_at", [0, 2, 5])  # before anything is measured; while it is measured; after
def test_out_of_memory_is_explained(messages, monkeypatch, kind, message, fails_at):
    monkeypatch.setattr(texts, "_MAX_LINES", 10**6)  # other tests' modules hold tensors, too
    gc.collect()
    with pytest.raises(kind):
        fit(Model(fails_at=fails_at, error=kind(message)), MemoryMonitor())
    (text,) = messages
    lines = text.splitlines()
    assert lines[0] == f"memsave: out of memory. {kind.__name__}: {message.splitlines()[0]}"
    assert lines[1].startswith("Alive now: ")
    assert f"{format_bytes(32 * 48 * 4):>10}  weights, layer.*: 1 x float32 [48, 32]" in text
    assert f"{format_bytes(16 * 32 * 4):>10}  data, batch: 1 x float32 [16, 32]" in text
    assert (
        f"{format_bytes(16 * 48 * 4):>10}  activations, kept by AddmmBackward0 in layer.*: 1 x float32 [16, 48]" in text
    )
    assert ("optimizer state, AdamW: 2 x float32 [48, 32]" in text) == (fails_at > 0)
    assert ("Highest measured step" in text) == (fails_at > 0)
    assert '`microbatch="auto"`' in text


def test_what_is_on_already_is_not_advised(messages):
    state = OptimizerState(min_size=1000)
    with pytest.raises(torch.OutOfMemoryError):
        fit(Model(fails_at=5, error=torch.OutOfMemoryError("none")), MemSave(microbatch=4, optimizer_state=state))
    (text,) = messages
    assert '`activations="exact"`' in text
    assert '`checkpointing="sqrt"`' in text
    assert "`microbatch=" not in text
    assert "`optimizer_state=" not in text


def test_what_would_be_refused_is_not_advised(messages):
    released = OptimizerState(first_moment="32bit", gradients="release")
    with pytest.raises(torch.OutOfMemoryError):
        fit(Model(fails_at=5, error=torch.OutOfMemoryError("none")), MemSave(optimizer_state=released))
    (text,) = messages
    assert '`activations="exact"`' in text
    assert "`microbatch=" not in text, "release is not cut"
    assert 'gradients="release"' not in text


def test_a_recovery_that_gives_up_is_explained_once(messages):
    """Of two monitors, one speaks; the advice of the recovery is in its first line."""
    error = torch.OutOfMemoryError("none")

    class Hungry(Model):
        def training_step(self, batch, batch_idx):
            raise error

    with pytest.raises(torch.OutOfMemoryError):
        fit(Hungry(), MemSave(microbatch="auto"), MemoryMonitor())
    (text,) = messages
    assert "Memory runs out at one sample per microbatch" in text


def test_other_errors_are_not_explained(messages):
    with pytest.raises(RuntimeError, match="shape"):
        fit(Model(fails_at=2, error=RuntimeError("shape mismatch")), MemoryMonitor())
    assert messages == []


def test_no_memory_for_the_explanation_leaves_the_error_as_it_was(messages, monkeypatch):
    def no_memory(*arguments):
        raise MemoryError("nothing at all")

    monkeypatch.setattr(monitor_module, "alive", no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="the true one"):
        fit(Model(fails_at=2, error=torch.OutOfMemoryError("the true one")), MemoryMonitor())
    assert messages == ["memsave: out of memory, and looking where it went failed as well: nothing at all"]


def test_nothing_is_looked_at_while_all_is_well(monkeypatch):
    monkeypatch.setattr(monitor_module, "alive", lambda *arguments: pytest.fail("looked"))
    monitor = MemoryMonitor()
    fit(Model(), monitor)
    assert monitor._batch is None, "a batch is not kept longer than its step"


def test_samples_per_second_are_the_batchs(monkeypatch):
    monitor = MemoryMonitor()

    class Slow(Model):
        def training_step(self, batch, batch_idx):
            time.sleep(0.02)
            return super().training_step(batch, batch_idx)

    fit(Slow(), monitor)
    report = monitor.report
    assert 0 < report.samples_per_second <= 16 / 0.02
    assert report.samples_per_second == pytest.approx(16 / report.step_seconds, rel=0.5)
    assert report.metrics()["memsave/samples_per_second"] == report.samples_per_second


def test_batches_of_no_size_have_no_rate():
    class Ragged(Model):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[0], batch_idx)  # the second is as long as it likes

        def train_dataloader(self):
            return DataLoader([(torch.randn(4, 32), torch.randn(5))] * 6, batch_size=None)

    monitor = MemoryMonitor()
    fit(Ragged(), monitor)
    assert monitor.report.samples_per_second is None
    assert monitor.report.step_seconds > 0


def test_lines_are_the_models_and_not_the_call_of_fit():
    class Wide(Model):  # the peak is in its backward, not in the optimizer
        def train_dataloader(self):
            return DataLoader(RandomDataset(32, 1600), batch_size=400)

    monitor = MemoryMonitor(every=1)
    fit(Wide(), monitor)
    lines = set(monitor._meter.highest.by_line) - {"the backward pass, the optimizer, or a library"}
    assert lines
    assert {line.split()[-1] for line in lines} == {"training_step"}


def test_over_ranks_the_factor_is_that_of_the_one_that_needs_the_most():
    reductions = {}

    class Logs(Model):
        def log(self, name, value, **options):
            reductions[name] = options.get("reduce_fx")

    baseline = MemoryMonitor()
    fit(Model(), baseline)
    fit(Logs(), MemoryMonitor().compare_to(baseline.report))
    peaks = {"memsave/peak_bytes": "max", "memsave/peak_mib": "max"}
    assert reductions == {**peaks, "memsave/factor": "min", "memsave/step_seconds": "max"}


def test_a_baseline_that_has_not_run_is_refused():
    with pytest.raises(ValueError, match=r"baseline` must have a measured peak, got None. Fit the baseline first"):
        MemSave(microbatch=4).compare_to(MemoryMonitor().report)


def test_what_looks_after_validation_finds_the_headlines():
    class Validated(Model):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", self.layer(batch).mean())

        def val_dataloader(self):
            return self.train_dataloader()

    class Looks(L.Callback):
        seen = ()

        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                self.seen += (trainer.callback_metrics["memsave/peak_bytes"].item(),)

    looks, monitor = Looks(), MemoryMonitor()
    fit(Validated(), monitor, looks, limit_val_batches=1, val_check_interval=0.5)
    assert looks.seen == (monitor.report.peak_bytes,) * 2


def test_batches_that_were_not_cut_have_no_size_of_parts():
    class Contrasts(Model):
        def training_step(self, batch, batch_idx):
            y = self.layer(batch)
            return (y @ y.T).logsumexp(0).mean()

    memsave = MemSave(microbatch=4)
    with pytest.warns(MicrobatchWarning):
        trainer = fit(Contrasts(), memsave)
    assert memsave.report.microbatch_size is None
    assert "memsave/microbatch_size" not in trainer.callback_metrics


class Validated(Model):
    """Validates on large batches, of which the last is the largest."""

    def validation_step(self, batch, batch_idx):
        self.layer(batch)

    def val_dataloader(self):
        return DataLoader([torch.ones(size, 32) for size in (8, 64, 512)], batch_size=None)


def test_the_peak_of_validation_is_told_where_it_is_above_that_of_training():
    monitor = MemoryMonitor(every=3)
    fit(Validated(), monitor, limit_val_batches=3)
    report = monitor.report
    weights = sum(p.nbytes for p in Validated().parameters())
    # Weights, two moments and two step counts of each; batch, hidden layer and its tanh.
    expected = 3 * weights + 4 * 4 + 512 * (32 + 48 + 48) * 4
    assert report.evaluation_peak_bytes == expected > report.peak_bytes
    assert f"validation takes more than training: {format_bytes(expected)}" in str(report)
    assert report.metrics()["memsave/evaluation_peak_bytes"] == expected


def test_the_sanity_check_is_not_measured_and_a_fit_without_validation_has_no_peak_of_it():
    monitor = MemoryMonitor()
    fit(Validated(), monitor, limit_val_batches=1, num_sanity_val_steps=3, check_val_every_n_epoch=2)
    assert monitor.report.evaluation_peak_bytes is None
    assert "validation" not in str(monitor.report)
    fit(Validated(), monitor, limit_val_batches=1)
    assert monitor.report.evaluation_peak_bytes < monitor.report.peak_bytes
    assert "validation" not in str(monitor.report)


def test_a_validation_that_fails_is_explained_with_what_it_had(messages):
    class Failing(Validated):
        def validation_step(self, batch, batch_idx):
            self.layer(batch)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        fit(Failing(), MemoryMonitor(), limit_val_batches=1, num_sanity_val_steps=0)
    (text,) = messages
    assert "memsave: out of memory. OutOfMemoryError: CUDA out of memory." in text
    assert "Highest measured step" in text


def test_a_monitor_can_be_pickled_after_validation():
    monitor = MemoryMonitor()
    fit(Validated(), monitor, limit_val_batches=3)
    assert pickle.loads(pickle.dumps(monitor)).report == monitor.report
