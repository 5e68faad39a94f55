"""The bar in a terminal, the lines without one, and Lightning's own bar."""

from __future__ import annotations

import io
import re

import lightning as L
import pytest
import rich
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_memsave import MemoryMonitor, MemoryProgressBar, MemoryReport, MemSave
from lightning_memsave.core.units import format_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*:FutureWarning")


class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("my/loss", 0.125, prog_bar=True)
        return loss

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 16), batch_size=4)


def fit(*callbacks, model=None, **options):
    trainer = L.Trainer(
        callbacks=list(callbacks),
        accelerator="cpu",
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **options},
    )
    trainer.fit(model or Model())
    return trainer


@pytest.fixture
def terminal():
    """Rich's console is shared by the whole process."""
    file = io.StringIO()
    yield {"console_kwargs": {"file": file, "force_terminal": True, "width": 160, "_environ": {}}}, file
    rich.reconfigure()


def seen(file):
    """What was written, without colours and movements."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())


def test_a_terminal_shows_the_memory_beside_the_progress(terminal):
    options, file = terminal
    memsave = MemSave(microbatch=2).compare_to(MemoryReport(peak_bytes=20000))
    bar = MemoryProgressBar(leave=True, **options)
    fit(memsave, bar)
    text = seen(file)
    report = memsave.report
    assert re.search(rf"peak +{re.escape(format_bytes(report.peak_bytes))} w+g+a*t*d+ microbatch 2", text)
    assert f"{report.factor:.2f}x below the baseline" in text
    assert "4/4" in text
    assert "my/loss" in text
    assert "memsave/" not in text
    assert bar.is_enabled


def test_bars_are_as_long_as_the_bytes(terminal):
    options, file = terminal
    monitor = MemoryMonitor(every=1)
    fit(monitor, MemoryProgressBar(leave=True, **options))
    bars = re.findall(r"peak +[\d.]+ \w+ ([a-z]{16}) ", seen(file))
    assert bars
    by_category, peak = monitor.report.by_category, monitor.report.peak_bytes
    for category, size in by_category.items():
        assert abs(bars[-1].count(category[0]) - 16 * size / peak) <= 1


def test_without_a_terminal_there_are_lines(capfd):
    monitor = MemoryMonitor()
    bar = MemoryProgressBar()
    fit(monitor, bar)
    lines = capfd.readouterr().out.splitlines()
    peak = format_bytes(monitor.report.peak_bytes)
    assert [line.split(":")[0] for line in lines if ": peak" in line] == [
        "step 2",
        "epoch 0 of 2, my/loss 0.125",
        "epoch 1 of 2, my/loss 0.125",
    ]
    assert all(f"peak {peak} (" in line for line in lines if ": peak" in line)
    assert not any("\x1b" in line or "━" in line for line in lines)
    assert bar.is_enabled, "a later fit in a terminal has its bar"


def test_a_higher_peak_is_a_line(capfd):
    class Growing(Model):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss + self.layer(batch.repeat(1 + batch_idx, 1)).sum() * 0

    fit(MemoryMonitor(every=1), MemoryProgressBar(), model=Growing(), max_epochs=1)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert [line.partition(":")[0] for line in lines] == ["step 2", "step 3", "step 4"]


def test_who_shows_needs_somebody_who_measures():
    with pytest.raises(ValueError, match=r"`callbacks` must hold a MemSave or MemoryMonitor, got .*MemoryProgressBar"):
        fit(MemoryProgressBar())


def test_the_other_namespaces_trainer_is_refused():
    import pytorch_lightning
    from pytorch_lightning.demos.boring_classes import BoringModel as OtherModel

    bars = [MemoryMonitor(), MemoryProgressBar()]
    options = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    trainer = pytorch_lightning.Trainer(callbacks=bars, **options)
    with pytest.raises(ValueError, match=r"only in a Trainer of `lightning.pytorch`, got 'pytorch_lightning"):
        trainer.fit(OtherModel())


def test_switched_off_it_prints_nothing(capfd):
    fit(MemoryMonitor(), MemoryProgressBar(refresh_rate=0))
    assert "peak" not in capfd.readouterr().out.replace("memsave: peak", "")


def test_after_an_error_the_next_fit_is_shown(capfd):
    class Fails(Model):
        def training_step(self, batch, batch_idx):
            raise MemoryError("none left")

    monitor, bar = MemoryMonitor(), MemoryProgressBar()
    with pytest.raises(MemoryError):
        fit(monitor, bar, model=Fails())
    assert bar.is_enabled
    fit(monitor, bar)
    assert "epoch 1 of 2" in capfd.readouterr().out


def test_testing_needs_no_monitor(capfd):
    trainer = L.Trainer(callbacks=[MemoryProgressBar()], accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.test(Model(), verbose=False)


def test_lightnings_own_bar_shows_the_headlines():
    memsave = MemSave().compare_to(MemoryReport(peak_bytes=20000))
    trainer = fit(memsave, TQDMProgressBar(refresh_rate=0))
    shown = trainer.progress_bar_metrics
    assert shown["memsave/peak_mib"] == pytest.approx(memsave.report.peak_bytes / 2**20, abs=0.06)
    assert shown["memsave/factor"] == pytest.approx(memsave.report.factor)
    assert not {name for name in shown if name.startswith("memsave/")} - {"memsave/peak_mib", "memsave/factor"}
