"""Runs on paper: what they count, what of the user's takes part in them, and what they leave as it was."""

from __future__ import annotations

import logging
import random
import threading

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, MicrobatchWarning, Recipe
from lightning_memsave.planner.recipes import RECIPES
from lightning_memsave.prediction.dry_run import dry_run, enough_steps, silence
from lightning_memsave.techniques.microbatching import Microbatching
from tests.strategies.quiet_runs import QUIET


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers, self.seen = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)), []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch_idx)
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def batch():
    return torch.linspace(-1, 1, 60).reshape(10, 6)


def dry(module=None, recipe=None, given=None, settings=None, data_module=None):
    module, given = module or Net(), batch() if given is None else given
    recipe = recipe or RECIPES["measure"]
    return dry_run("lightning.pytorch", module, given, recipe, settings or {}, data_module, fake=False)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_bytes_are_those_of_a_run(options):
    memsave = MemSave("measure")
    trainer = L.Trainer(**{**QUIET, "max_steps": 3}, callbacks=[memsave], **options)
    trainer.fit(Net(), DataLoader([batch()] * 6, batch_size=None))
    found = dry(settings=options)
    assert found.measured.peak_bytes == memsave.report.peak_bytes
    assert dict(found.measured.by_category) == dict(memsave.report.by_category)
    assert not found.is_cut
    assert found.flags == ()


def test_three_steps_are_taken_and_all_batches_of_accumulated_ones():
    module, accumulated = Net(), Net()
    dry(module)
    dry(accumulated, settings={"accumulate_grad_batches": 2, "max_steps": 1})
    assert (module.seen, accumulated.seen) == ([0, 1, 2], [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize(("max_steps", "expected"), [(-1, -1), (1, 10_000), (10_000, 10_000), (20_001, 20_001)])
def test_a_run_of_few_steps_is_long_enough_beside_it(max_steps, expected):
    assert enough_steps(max_steps) == expected


def test_each_step_meets_the_batch_as_it_is():
    class Edits(Net):
        def training_step(self, batch, batch_idx):
            sums.append((float(batch["x"][0].sum()), sorted(batch)))
            batch["x"][0].mul_(0)
            batch["more"] = 1
            return super().training_step(batch["x"][1], batch_idx)

    sums, given = [], {"x": [torch.ones(10, 6), batch()]}
    dry(Edits(), given=given)
    assert sums == [(60.0, ["x"])] * 3
    assert float(given["x"][0].sum()) == 60.0


def test_random_numbers_and_logging_are_as_before_also_where_a_step_fails():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            torch.rand(3)
            logging.getLogger("lightning.pytorch").critical("seen by nobody")
            raise KeyError("the user's")

    works, fails = Net(), Fails()
    state, level = torch.get_rng_state(), logging.root.manager.disable
    dry(works)
    with pytest.raises(KeyError, match="the user's"):
        dry(fails)
    assert torch.equal(torch.get_rng_state(), state)
    assert logging.root.manager.disable == level


def test_nothing_is_logged_meanwhile(caplog):
    with silence():
        logging.getLogger("mine").critical("not heard")
    logging.getLogger("mine").critical("heard")
    assert [record.message for record in caplog.records] == ["heard"]


def test_callbacks_and_checkpoints_of_the_module_stay_out_of_it(tmp_path, monkeypatch):
    class Saves(Net):
        def configure_callbacks(self):
            return [ModelCheckpoint(tmp_path, every_n_train_steps=1)]

    monkeypatch.chdir(tmp_path)
    dry(Saves())
    assert list(tmp_path.iterdir()) == []


class Data(L.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.called = []

    def prepare_data(self):
        self.called.append("prepare_data")

    def setup(self, stage):
        self.called.append(stage)

    def teardown(self, stage):
        self.called.append("teardown")

    def train_dataloader(self):
        raise AssertionError("the batch is there")

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch.float() / 2


def test_hooks_of_a_data_module_see_the_batch_and_it_is_neither_set_up_nor_torn_down():
    class Asks(Net):
        def training_step(self, batch, batch_idx):
            seen.append((batch.dtype, float(batch.max()), type(self.trainer.datamodule)))
            return super().training_step(batch, batch_idx)

    seen, data = [], Data()
    dry(Asks(), given=torch.full((4, 6), 8, dtype=torch.uint8), data_module=data)
    assert seen == [(torch.float32, 4.0, Data)] * 3
    assert not {"fit", "teardown"} & set(data.called)


class RunningMean(Data):
    """Subtracts a running mean of the data, which it keeps in several ways."""

    def __init__(self):
        super().__init__()
        self.batches, self.mean, self.named = [], torch.zeros(6), {"mean": torch.zeros(6), "num": 0}
        self.same, self.large, self.paths = self.named, torch.zeros(2**19), ["a"] * 10**5
        self.numpy, self.python = np.random.default_rng(0), random.Random(0)
        self.torch, self.augment = torch.Generator().manual_seed(0), self._shift
        self.lock = threading.Lock()

    def _shift(self, batch):
        self.batches.append(batch.mean())
        drawn = torch.rand(1, generator=self.torch) + self.numpy.random() + self.python.random()
        return batch + drawn

    def on_after_batch_transfer(self, batch, dataloader_idx):
        batch = self.augment(batch)
        self.mean.mul_(0.9).add_(batch.mean(0), alpha=0.1)
        self.same["num"] += 1
        self.named["mean"] = self.named["mean"] + batch.mean(0)
        return batch - self.mean - self.named["mean"] / self.named["num"] + self.large[0]


def test_hooks_of_a_data_module_change_nothing_of_it():
    class Asks(Net):
        def training_step(self, batch, batch_idx):
            seen.append((self.trainer.datamodule.named["num"], len(self.trainer.datamodule.batches)))
            is_shared.append(self.trainer.datamodule.large is data.large)
            return super().training_step(batch, batch_idx)

    seen, is_shared, data, fresh = [], [], RunningMean(), RunningMean()
    dry(Asks(), data_module=data)
    assert data.numpy.random() == fresh.numpy.random()
    assert data.python.random() == fresh.python.random()
    assert torch.equal(data.torch.get_state(), fresh.torch.get_state())
    assert seen == [(1, 1), (2, 2), (3, 3)], "as in the run, whose two names are one dictionary"
    assert all(is_shared), "what is large is not copied"
    assert data.batches == []
    assert data.named["num"] == 0
    assert data.named is data.same
    assert not data.mean.any()


def test_a_fit_leaves_a_data_module_as_plain_lightning_does():
    held = []
    for callbacks in ([], [MemSave(summary=False)]):
        data = RunningMean()
        data.train_dataloader = lambda: DataLoader(torch.randn(24, 6, generator=torch.Generator().manual_seed(0)), 8)
        L.Trainer(**{**QUIET, "max_epochs": 1}, callbacks=callbacks).fit(Net(), datamodule=data)
        held.append(data)
    plain, found = held
    assert [type(each) for each in found.batches] == [torch.Tensor] * 3
    assert found.named["num"] == plain.named["num"] == 3
    torch.testing.assert_close(found.mean, plain.mean)
    torch.testing.assert_close(found.named["mean"], plain.named["mean"])


def test_warnings_of_ours_become_flags_and_a_cut_on_an_assumption_is_told():
    class Contrastive(Net):
        def training_step(self, batch, batch_idx):
            z = self.layers(batch)
            return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))

    recipe = Recipe("cut", (Microbatching(size=4),))
    found = dry(Contrastive(), recipe)
    assert not found.is_cut
    assert len([flag for flag in found.flags if "neither the mean nor the sum" in flag]) == 1
    assert dry(Net(), recipe).is_cut
    given = dry(Net(), Recipe("cut", (Microbatching(size=4, reduction="mean"),)))
    assert not given.is_cut
    with pytest.warns(MicrobatchWarning, match="neither the mean nor the sum"):  # in a run it is one
        L.Trainer(**QUIET, callbacks=[MemSave(recipe)]).fit(Contrastive(), DataLoader([batch()], batch_size=None))


def test_a_step_that_stops_the_training_is_an_error():
    class Stops(Net):
        def training_step(self, batch, batch_idx):
            self.trainer.should_stop = True
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match=r"No step can be predicted: `training_step` stopped the training"):
        dry(Stops())
