"""Subclasses of Tensor that cannot be made under a dispatch mode are found, and measured without one."""

from __future__ import annotations

import gc

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_memsave import MemoryMonitor, MemSave
from lightning_memsave.torch_internals.tensor_subclasses import made_only_unwatched


@pytest.fixture(autouse=True)
def nothing_left():
    """Other tests of this process are measured by the ledger again, where the classes made here are gone."""
    yield
    gc.collect()
    assert made_only_unwatched() == []


WAYS = {
    "Tensor.__new__": (lambda cls, x, labels: torch.Tensor.__new__(cls, x), True),
    "as_subclass": (lambda cls, x, labels: x.as_subclass(cls), False),
    "_make_subclass": (lambda cls, x, labels: torch.Tensor._make_subclass(cls, x), False),
    "something that needs more": (lambda cls, x, labels: x.as_subclass(cls) if len(labels) else None, False),
}


def labelled(way):
    def new(cls, x, labels, *, unit="m", **others):
        return WAYS[way][0](cls, x, labels)

    return type("Labelled", (torch.Tensor,), {"__new__": new, "__init__": lambda self, x, labels: None})


@pytest.mark.parametrize("way", WAYS)
def test_classes_are_told_by_how_they_are_made(way):
    cls = labelled(way)
    assert made_only_unwatched() == ([cls] if WAYS[way][1] else [])
    assert made_only_unwatched() == ([cls] if WAYS[way][1] else []), "the second answer is the first"


@pytest.mark.parametrize("callback", [lambda: MemSave(summary=False), lambda: MemSave("measure"), MemoryMonitor])
def test_a_step_that_makes_one_is_measured_by_the_allocator(callback):
    cls = labelled("Tensor.__new__")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(cls(batch[:, :2], ["x", "y"])).as_subclass(torch.Tensor).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    def trained(callbacks):
        torch.manual_seed(0)
        module = Module()
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=callbacks, enable_model_summary=False, **quiet)
        trainer.fit(module, DataLoader(torch.arange(72.0).view(24, 3) / 72, 4))
        return module

    found = callback()
    assert torch.equal(trained([found]).layer.weight, trained([]).layer.weight)
    assert found.report.num_steps_measured == 2
    assert found.report.peak_bytes > 0
