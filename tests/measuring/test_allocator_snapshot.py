"""CUDA's own record: started with the fit, written after three batches or at an error, and refused elsewhere."""

import inspect
import pickle

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_memsave import MemoryMonitor, MemSave
from lightning_memsave.callbacks import monitor
from lightning_memsave.measuring.allocator_snapshot import Snapshot

CUDA = torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch):
    """What torch is asked to do, on a machine without CUDA."""
    calls = []

    def record(enabled="all", max_entries=None, device=None):
        calls.append("stop" if enabled is None else f"record {device}")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(f"write {path}"))
    return calls


@pytest.fixture
def cpu_taken_for_cuda(monkeypatch):
    monkeypatch.setattr(monitor, "Snapshot", lambda path, device: Snapshot(path, CUDA))


class Counted(BoringModel):
    def __init__(self, calls, fails_at=None):
        super().__init__()
        self.calls, self.fails_at = calls, fails_at

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.calls.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 20), batch_size=4)


def fit(model, callbacks):
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        limit_val_batches=0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return trainer


@pytest.mark.usefixtures("cpu_taken_for_cuda")
@pytest.mark.parametrize("others", [[], [MemSave("measure")]])
def test_three_batches_are_recorded(calls, tmp_path, others):
    path = tmp_path / "memory.pickle"
    fit(Counted(calls), [*others, MemoryMonitor(snapshot=path)])
    assert calls == ["record cuda:0", 0, 1, 2, f"write {path}", "stop", 3, 4]


@pytest.mark.usefixtures("cpu_taken_for_cuda")
def test_a_second_fit_is_recorded_for_as_long(calls, tmp_path):
    path = tmp_path / "memory.pickle"
    trainer = fit(Counted(calls), [MemoryMonitor(snapshot=path)])
    calls.clear()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Counted(calls))
    assert calls == ["record cuda:0", 0, 1, 2, f"write {path}", "stop", 3, 4]


@pytest.mark.usefixtures("cpu_taken_for_cuda")
def test_an_error_writes_what_there_is(calls, tmp_path):
    path = tmp_path / "memory.pickle"
    with pytest.raises(torch.OutOfMemoryError):
        fit(Counted(calls, fails_at=1), [MemoryMonitor(snapshot=str(path))])
    assert calls == ["record cuda:0", 0, f"write {path}", "stop"]


def test_other_devices_refuse_it_before_training(calls, tmp_path):
    with pytest.raises(ValueError, match=r"`MemoryMonitor.snapshot` records CUDA's caching allocator, got 'cpu'"):
        fit(Counted(calls), [MemoryMonitor(snapshot=tmp_path / "memory.pickle")])
    assert calls == []


def test_a_missing_folder_is_an_error(calls, tmp_path):
    with pytest.raises(ValueError, match=r"`MemoryMonitor.snapshot` must lie in a folder"):
        Snapshot(tmp_path / "nowhere" / "memory.pickle", CUDA)
    assert calls == []


def test_torchs_names_are_there():
    """Private by their underscore (torch 2.13)."""
    assert {"enabled", "max_entries", "device"} <= set(
        inspect.signature(torch.cuda.memory._record_memory_history).parameters
    )
    assert "filename" in inspect.signature(torch.cuda.memory._dump_snapshot).parameters


@pytest.mark.gpu
def test_a_real_record_holds_the_blocks(tmp_path):
    snapshot = Snapshot(tmp_path / "memory.pickle", torch.device("cuda", torch.cuda.current_device()))
    kept = torch.empty(3 << 20, device="cuda")
    found = pickle.loads(snapshot.save().read_bytes())  # written two lines above
    sizes = {block["requested_size"] for segment in found["segments"] for block in segment["blocks"]}
    assert kept.nbytes in sizes
