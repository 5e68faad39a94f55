"""Runs of small classifiers with and without microbatches: what they report, and how far apart they end."""

from __future__ import annotations

import copy
import random
import warnings

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, Microbatching, MicrobatchWarning
from lightning_memsave.core.errors import NotLosslessWarning

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


DIM, CLASSES, BATCH = 6, 4, 12


class Base(L.LightningModule):
    """A small classifier; `loss(z, y)` is what each case says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(DIM, 16), nn.Linear(16, CLASSES)

    def training_step(self, batch, batch_idx):
        self.batch_idx = batch_idx
        return self.loss(self.head(self.first(batch[0]).tanh()), batch[1])

    def loss(self, z, y):
        return F.cross_entropy(z, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def batches(num=4, *, is_sorted=False, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num * BATCH, DIM, generator=generator, dtype=dtype)
    y = torch.randint(CLASSES, (num * BATCH,), generator=generator)
    return list(zip(x.split(BATCH), (y.sort()[0] if is_sorted else y).split(BATCH), strict=True))


def fit(module, data, memsave=None, **options):
    callbacks = [] if memsave is None else [memsave]
    loader = DataLoader(data, batch_size=None)
    trainer = L.Trainer(**{"max_epochs": 1, "accelerator": "cpu"} | options, **QUIET, callbacks=callbacks)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # what modules draw from
    torch.manual_seed(0)
    trainer.fit(module, loader)
    return module


def compare(module, data, size=4, **options):
    """Train with and without microbatches: the report, how far parameters lie apart, and what was warned of."""
    plain, ours = copy.deepcopy(module), copy.deepcopy(module)
    memsave = MemSave(microbatch=size if isinstance(size, Microbatching) else Microbatching(size=size))
    fit(plain, data, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(ours, data, memsave, **options)
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    apart = max(float((a - b).detach().abs().max() / a.detach().abs().max().clamp(min=1e-6)) for a, b in pairs)
    messages = [str(each.message) for each in caught if each.category in (MicrobatchWarning, NotLosslessWarning)]
    return memsave.report, apart, messages


def applied(report):
    return next((a for a in report.applied if a.technique == "microbatching"), None)
