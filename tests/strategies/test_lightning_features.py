"""What Lightning offers, with `MemSave()` and with microbatches: as without, in results and in what is called."""

from __future__ import annotations

import os
import signal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import Checkpointing, MemSave, Microbatching, SparseUpdate, Sparsity
from tests.harness import EMAWeightAveraging

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers",
    "ignore:.*no `val_dataloader`",
    "ignore:SWA is currently",
    "ignore:.*callbacks used to create",
    "ignore:.*resuming from a checkpoint",
)
WAYS = {"default": lambda: MemSave(), "microbatches": lambda: MemSave(microbatch=Microbatching(size=3))}


@pytest.fixture(params=WAYS)
def memsave(request):
    return WAYS[request.param]()


class Net(L.LightningModule):
    def __init__(self, lr=0.02):
        super().__init__()
        self.lr, self.net = lr, nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
        self.steps, self.stop_at = 0, None

    def loss(self, batch):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch, batch_idx):
        if self.stop_at is not None and self.trainer.global_step == self.stop_at:
            self.stop_at = None
            os.kill(os.getpid(), signal.SIGTERM)
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def on_train_batch_start(self, batch, batch_idx):
        self.steps += 1

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"}]


def data(seed=0):
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)


def trainer_with(memsave, *callbacks, **options):
    options = {"max_epochs": 2, "precision": "64-true", "logger": False, "enable_checkpointing": False, **options}
    return L.Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*([memsave] if memsave else []), *callbacks],
        **options,
    )


def new(**options):
    torch.manual_seed(0)
    return Net(**options)


def assert_same(first, second):
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "options",
    [
        {"fast_dev_run": 3},
        {"overfit_batches": 2},
        {"limit_train_batches": 3, "limit_val_batches": 2},
        {"max_steps": 7, "max_epochs": -1},
        {"accumulate_grad_batches": 3},
        {"val_check_interval": 2, "gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=str,
)
def test_options_of_the_trainer(options, memsave):
    ours, plain, modules = trainer_with(memsave, **options), trainer_with(None, **options), [new(), new()]
    loaders = () if "overfit_batches" in options else (data(1),)
    for trainer, module in zip((ours, plain), modules, strict=True):
        trainer.fit(module, data(), *loaders)
    assert_same(*modules)
    assert modules[0].steps == modules[1].steps
    assert ours.global_step == plain.global_step
    found = {k: v for k, v in ours.callback_metrics.items() if not k.startswith("memsave/")}
    assert found.keys() == plain.callback_metrics.keys()
    for name, value in plain.callback_metrics.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-8)


def test_fit_validate_test_predict_and_fit_again(memsave):
    module, plain = new(), new()
    ours, theirs = trainer_with(memsave), trainer_with(None)
    for trainer, each in ((ours, module), (theirs, plain)):
        trainer.fit(each, data(), data(1))
        each.found = [trainer.validate(each, data(1), verbose=False), trainer.test(each, data(1), verbose=False)]
        each.predicted = torch.cat(trainer.predict(each, data(1)))
        trainer.fit_loop.max_epochs = 3
        trainer.fit(each, data(), data(1))
    assert_same(module, plain)
    torch.testing.assert_close(module.predicted, plain.predicted, rtol=1e-11, atol=1e-13)
    for a, b in zip(module.found, plain.found, strict=True):
        assert a[0].keys() == b[0].keys()
        assert all(a[0][k] == pytest.approx(b[0][k], rel=1e-6) for k in a[0] if not k.startswith("memsave"))
    assert type(ours.strategy) is type(theirs.strategy)
    assert vars(ours.strategy).keys() == vars(theirs.strategy).keys()


def test_the_learning_rate_finder(memsave, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for callback in (memsave, None):
        module = new()
        trainer = trainer_with(callback, max_epochs=3)
        found.append(Tuner(trainer).lr_find(module, data(), num_training=10, attr_name="lr", update_attr=True))
        trainer.fit(module, data())
        found.append(module)
    torch.testing.assert_close(torch.tensor(found[0].results["loss"]), torch.tensor(found[2].results["loss"]))
    assert_same(found[1], found[3])


@pytest.mark.parametrize(
    "slots",
    [
        {"checkpointing": Checkpointing(modules="net")},
        {"sparsity": Sparsity(sparsity=0.5, min_size=1)},
        {"low_rank": 1},
        {"sparse_update": SparseUpdate(layers={"*": 0.5})},
        {"precision": "bf16-sr"},
        {"activations": "int8", "microbatch": 2},
    ],
    ids=lambda slots: "-".join(slots),
)
def test_after_a_finder_a_fit_is_as_without(slots, tmp_path, monkeypatch):
    """After its trial Lightning calls `teardown` of callbacks before the strategy's."""
    monkeypatch.chdir(tmp_path)
    module, memsave = new().float(), MemSave(**slots)
    trainer = trainer_with(memsave, max_epochs=1, precision=None)
    loader = DataLoader([tuple(part.float() for part in batch) for batch in data()], batch_size=None)
    kind, weights = type(module.net[0]), [p.detach().clone() for p in module.parameters()]
    Tuner(trainer).lr_find(module, loader, num_training=3, update_attr=False)
    assert type(module.net[0]) is kind
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert all(map(torch.equal, weights, module.parameters()))
    trainer.fit(module, loader)
    assert type(module.net[0]) is kind
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert len(memsave.report.applied) >= len(slots)


def test_the_profiler_sees_the_same_actions(memsave, tmp_path):
    def calls(callback):
        profiler = SimpleProfiler(dirpath=tmp_path, filename=f"{callback is None}")
        trainer_with(callback, profiler=profiler, max_epochs=1).fit(new(), data())
        return {k: len(v) for k, v in profiler.recorded_durations.items() if "training_step" in k or "optimizer" in k}

    ours, plain = calls(memsave), calls(None)
    assert plain
    per_batch = 3 if memsave.recipe.get(Microbatching).size == 3 else 1  # 8 samples in parts of 3
    for action, count in plain.items():
        found = {k.replace("MemSaveSingleDeviceStrategy", "SingleDeviceStrategy"): v for k, v in ours.items()}[action]
        assert found == count * (per_batch if action.endswith("training_step") else 1), action


@pytest.mark.parametrize(
    "callback",
    [
        lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
        lambda: EMAWeightAveraging(decay=0.9),
    ],
    ids=["SWA", "EMA"],
)
def test_averaged_weights(callback, memsave):
    module, plain = new(), new()
    trainer_with(memsave, callback(), max_epochs=4).fit(module, data(), data(1))
    trainer_with(None, callback(), max_epochs=4).fit(plain, data(), data(1))
    assert_same(module, plain)


def test_killed_in_the_middle_of_an_epoch_and_resumed(memsave, tmp_path):
    def killed_and_resumed(callback, folder):
        every_step = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        module, resumed = new(), new()
        module.stop_at = 7  # of 15
        with pytest.raises(SIGTERMException):
            trainer_with(callback, every_step, max_epochs=3, enable_checkpointing=True).fit(module, data())
        latest = max(folder.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
        trainer = trainer_with(callback, max_epochs=3)
        trainer.fit(resumed, data(), ckpt_path=latest)
        assert latest.stem == "step=8"
        return resumed, trainer.global_step

    resumed, num_steps = killed_and_resumed(memsave, tmp_path / "ours")
    plain, expected = killed_and_resumed(None, tmp_path / "plain")
    assert num_steps == expected == 15
    for a, b in zip(plain.state_dict().values(), resumed.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)  # Lightning restores float64 weights through float32


def test_early_stopping_on_a_loss_that_is_not_a_number(memsave):
    module = new()
    module.training_step = lambda batch, batch_idx: module.log("bad", torch.tensor(float("nan"))) or module.loss(batch)
    stop = L.pytorch.callbacks.EarlyStopping("bad", check_finite=True, verbose=False)
    trainer = trainer_with(memsave, stop, max_epochs=3)
    trainer.fit(module, data())
    assert trainer.current_epoch == 1
    assert stop.stopped_epoch == 0
    assert memsave.report.peak_bytes > 0


def test_an_error_before_the_fit_begins_is_the_one_that_is_told():
    trainer = L.Trainer(strategy="memsave", accelerator="cpu", logger=False, enable_checkpointing=False)
    with pytest.raises(MisconfigurationException, match="You cannot pass `train_dataloader`"):
        trainer.fit(Net(), DataLoader(TensorDataset(torch.zeros(1, 5))), datamodule=L.LightningDataModule())
