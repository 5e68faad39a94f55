"""The first batch before the run takes it: which one it is, and what does not move on."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_memsave import MemSave
from lightning_memsave.prediction.peek_batch import first_batch, samples_of, samples_per_batch
from tests.prediction.budget_runs import data, train


def test_the_first_batch_is_the_runs_and_nothing_moves_on():
    generator = torch.Generator().manual_seed(1)
    seen = []

    class Look(L.Callback):
        def setup(self, trainer, pl_module, stage):
            state = torch.get_rng_state()
            seen.append(first_batch(trainer))
            assert torch.equal(state, torch.get_rng_state())

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(batch)

    train(None, callbacks=[Look()], loader=data(generator=generator), max_epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))


class OpenedInWorkers(Dataset):
    """As of a file whose handle may not be shared by processes that are forked later."""

    opened = None

    def __len__(self):
        return 8

    def __getitem__(self, index):
        worker = get_worker_info()
        assert worker is not None, "read in the main process"
        self.opened = worker.id
        return torch.tensor([index, self.opened])


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"batch_size": None, "sampler": [3, 4]}])
def test_the_first_batch_is_read_by_a_worker_where_the_run_has_workers(options):
    loader = DataLoader(OpenedInWorkers(), num_workers=2, **{"batch_size": 4, **options})
    trainer = L.Trainer(accelerator="cpu", logger=False)
    trainer.strategy.connect(BoringModel())
    trainer._data_connector.attach_data(BoringModel(), train_dataloaders=loader)
    found = first_batch(trainer)
    assert torch.equal(found, next(iter(loader)))
    assert loader.dataset.opened is None
    assert loader.num_workers == 2


class Kept(DataLoader):
    """As loaders that keep their workers between epochs."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kept = super().__iter__()

    def __iter__(self):
        yield from [next(self.kept) for _ in range(len(self))]


class Halved(DataLoader):
    def __iter__(self):
        return (batch / 2 for batch in super().__iter__())


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [Kept, Halved])
def test_loaders_of_other_kinds_are_read_as_they_are_and_lose_nothing(kind, num_workers):
    loader = kind(torch.arange(4.0) + 1, batch_size=2, num_workers=num_workers)
    trainer = L.Trainer(accelerator="cpu", logger=False)
    trainer.strategy.connect(BoringModel())
    trainer._data_connector.attach_data(BoringModel(), train_dataloaders=loader)
    found = first_batch(trainer)
    assert torch.equal(found, next(iter(loader)))
    assert torch.equal(found, torch.tensor([1.0, 2.0]) / (2 if kind is Halved else 1))


def test_data_that_can_be_read_once_is_refused():
    batches = iter([(torch.randn(4, 8), torch.zeros(4, dtype=torch.long))] * 4)
    with pytest.raises(ValueError, match="can be read from the start again"):
        train(MemSave(budget="0.5x"), loader=batches)


def attached(loaders):
    trainer = L.Trainer(accelerator="cpu", logger=False)
    trainer.strategy.connect(BoringModel())
    trainer._data_connector.attach_data(BoringModel(), train_dataloaders=loaders)
    return trainer


def loader(num, size, **options):
    return DataLoader(torch.arange(float(num)), size, **options)


def test_nests_of_loaders_give_a_batch_of_each():
    found = first_batch(attached({"a": loader(4, 2), "b": [loader(9, 3)]}))
    assert found["a"].tolist() == [0, 1]
    assert found["b"][0].tolist() == [0, 1, 2]


class Endless:
    """The same batch for ever."""

    def __init__(self, batch):
        self.batch = batch

    def __iter__(self):
        while True:
            yield self.batch


@pytest.mark.parametrize(
    ("loaders", "expected"),
    [
        (lambda: loader(8, 4), 4),
        (lambda: {"a": loader(8, 4), "b": loader(9, 3)}, 7),
        (lambda: Endless(torch.zeros(5, 2)), 5),  # names no size
        (lambda: DataLoader([torch.zeros(6, 2)], batch_size=None), 6),
        (lambda: iter([torch.zeros(5, 2)]), None),  # a batch would be missing
        (lambda: Endless(torch.zeros(())), None),
    ],
)
def test_samples_are_those_that_loaders_name_or_that_the_first_batch_has(loaders, expected):
    assert samples_per_batch(attached(loaders())) == expected


def test_a_generator_of_the_loader_does_not_move_on():
    generator = torch.Generator().manual_seed(5)
    given = loader(64, 8, shuffle=True, generator=generator)
    trainer, state, of_all = attached(given), generator.get_state(), torch.get_rng_state()
    found = first_batch(trainer)
    assert torch.equal(generator.get_state(), state)
    assert torch.equal(torch.get_rng_state(), of_all)
    assert torch.equal(found, next(iter(given)))


def test_a_loader_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="`budget` needs a batch to plan from"):
        first_batch(attached(loader(0, 2)))


def test_samples_that_a_batch_does_not_tell_are_none():
    assert samples_of((torch.zeros(3, 2), ["a", "b", "c"])) == 3
    assert samples_of({"x": torch.zeros(3), "y": torch.zeros(4)}) is None
