"""Modules that build or decide something in their first forward pass train to the weights of plain Lightning."""

from __future__ import annotations

import collections
import functools

import lightning.pytorch as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave
from lightning_memsave.loops.batch_structure import Structure


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Counter:
    def __init__(self):
        self.count = 0

    def next(self):
        self.count += 1
        return self.count


class Built(nn.Module):
    """Calls `first` in its first forward pass, and `scale` in each."""

    table = None
    memo: dict = {}  # noqa: RUF012  # of the class

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(6)))
        self.register_buffer("buffer", None)
        self.is_built = False

    def forward(self, x):
        if not self.is_built:
            self.first()
            self.is_built = True
        return self.blocks(self.scale(x))

    def first(self):
        pass

    def scale(self, x):
        return x


class BuildsLayer(Built):
    def first(self):
        self.extra = nn.Linear(16, 16)

    def scale(self, x):
        return self.extra(x)


class ReplacesLayers(Built):
    def first(self):
        for block in self.blocks:
            block.up = nn.Linear(16, 32)


class FillsBuffer(Built):
    def first(self):
        self.buffer = torch.randn(16)

    def scale(self, x):
        return x * self.buffer


class AddsHook(Built):
    def first(self):
        self.blocks[0].register_forward_hook(lambda module, args, out: 1.5 * out)


class Counts(Built):
    """In an object of its own, in each forward pass."""

    def __init__(self):
        super().__init__()
        self.counter, self.values = Counter(), np.zeros(1)

    def scale(self, x):
        self.values += 1
        return x / (self.counter.next() + float(self.values[0]))


class FillsClass(Built):
    def first(self):
        if type(self).table is None:
            type(self).table = torch.linspace(1, 2, 16)

    def scale(self, x):
        return x * self.table


class FillsDictionary(Built):
    def scale(self, x):
        if len(x) not in Built.memo:
            Built.memo[len(x)] = torch.linspace(1, 2, 16)
        return x * Built.memo[len(x)]


@functools.lru_cache
def cached(width):
    return torch.linspace(1, 2, width), width


class FillsCache(Built):
    def scale(self, x):
        return x * cached(16)[0]


KINDS = [
    *(BuildsLayer, ReplacesLayers, FillsBuffer, AddsHook, Counts),
    *(FillsClass, FillsDictionary, FillsCache),
]


class Module(L.LightningModule):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.head = kind(), nn.Linear(16, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(kind, *callbacks):
    cached.cache_clear()
    Built.memo.clear()
    FillsClass.table = None
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 16, generator=generator), torch.randint(2, (48,), generator=generator))
    L.seed_everything(0, verbose=False)
    module = Module(kind)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, DataLoader(data, 16))
    return module


SETTINGS = {
    "lossless": {},
    "sqrt": {"checkpointing": "sqrt"},
    "recursive": {"checkpointing": "recursive"},
    "sqrt, exact": {"checkpointing": "sqrt", "activations": "exact"},
    "budget": {"budget": "0.9x"},
}


@pytest.mark.filterwarnings("ignore:checkpointing='sqrt' had no effect")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_first_forward_pass_builds_is_built_once(kind, settings):
    plain, memsave = trained(kind), MemSave(**SETTINGS[settings])
    ours = trained(kind, memsave)
    assert memsave.report.loss_class == "exact"
    pairs = list(zip(plain.state_dict().items(), ours.state_dict().items(), strict=True))
    assert [a[0] for a, _ in pairs] == [b[0] for _, b in pairs]
    assert all(torch.equal(a[1], b[1]) for a, b in pairs)


class OutOfMemoryAtFirst(BuildsLayer):
    num_failures = 0

    def scale(self, x):
        out = super().scale(x)
        if not self.num_failures:
            type(self).num_failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return out


def test_a_first_batch_that_is_run_again_builds_its_layer_again():
    OutOfMemoryAtFirst.num_failures = 1
    plain = trained(OutOfMemoryAtFirst)
    OutOfMemoryAtFirst.num_failures = 0
    memsave = MemSave()
    ours = trained(OutOfMemoryAtFirst, memsave)
    assert memsave.report.num_oom_recovered == 1
    assert all(map(torch.equal, plain.state_dict().values(), ours.state_dict().values()))


def test_objects_are_filled_with_what_they_held():
    class Words(list):
        pass

    class Queue(collections.deque):
        pass

    module = nn.Module()
    module.counter, module.array, module.words, module.queue = Counter(), np.zeros(2), Words("a"), Queue([1])
    module.iterator = iter([1, 2])
    objects = dict(vars(module))
    structure = Structure([module], [module])
    module.counter.next()
    module.array += 1
    module.words.append("b")
    module.queue.append(2)
    next(module.iterator)
    module.new = Counter()
    structure.restore()
    assert module.counter is objects["counter"]
    assert module.counter.count == 0
    assert module.array is objects["array"]
    assert module.array.tolist() == [0, 0]
    assert module.words is objects["words"]
    assert module.words == ["a"]
    assert list(module.queue) == [1]
    assert list(module.iterator) == [1, 2]
    assert not hasattr(module, "new")
