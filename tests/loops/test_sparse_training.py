"""Sparsity through trainers: schedules, logs, resuming, and what meets it."""

from __future__ import annotations

import copy

import bitsandbytes
import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memsave import Checkpointing, MemSave, OptimizerState, Sparsity, UpdateSchedule
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME
from lightning_memsave.techniques.sparsity import sparse_layers
from tests.harness import EMAWeightAveraging, ListLogger


class Net(L.LightningModule):
    def __init__(self, optimizer=lambda p: torch.optim.AdamW(p, 0.01)):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3)))
        self.head, self._make = nn.Linear(8, 3), optimizer

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.blocks(batch[0])), batch[1])

    def configure_optimizers(self):
        return self._make(self.parameters())


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Patterns(L.Callback):
    """What lived at the end of each batch."""

    def __init__(self):
        self.seen, self.model = [], None

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.seen.append({name: layer.layout.positions() for name, layer in sparse_layers(pl_module).items()})

    def on_fit_end(self, trainer, pl_module):
        self.model = copy.deepcopy(pl_module.state_dict())


class Endless(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(8, 8), torch.zeros(8, dtype=torch.long))] * 6)


def test_a_schedule_needs_to_know_how_long_a_run_is():
    memsave = MemSave(sparsity=Sparsity(method="rigl", min_size=1))
    trainer = L.Trainer(accelerator="cpu", max_epochs=2, callbacks=[memsave], logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"UpdateSchedule.until.*where the length of the run is not known"):
        trainer.fit(Net(), DataLoader(Endless(), batch_size=None))


def data(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 8, generator=generator).to(dtype)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (48,), generator=generator)), batch_size=8)


def fit(memsave, module=None, ckpt=None, epochs=2, callbacks=(), **options):
    torch.manual_seed(0)
    module = Net() if module is None else module
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[*([memsave] if memsave else []), *callbacks],
        logger=options.pop("logger", False),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data(torch.float64 if options.get("precision") == "64-true" else torch.float32), ckpt_path=ckpt)
    return trainer, module


def setting(method="set", sparsity=0.75, every=2, until=1.0, **options) -> Sparsity:
    moves = {} if method == "static" else {"schedule": UpdateSchedule(every=every, until=until)}
    return Sparsity(sparsity=sparsity, method=method, min_size=64, **moves, **options)


def equal(first, second) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("module", [Net, Manual])
@pytest.mark.parametrize("method", ["set", "rigl", "dsr", "gradual"])
def test_patterns_change_on_schedule(method, module):
    patterns = Patterns()
    fit(MemSave(sparsity=setting(method, initial="magnitude", every=3)), module(), callbacks=[patterns])
    changes = [not equal(a, b) for a, b in zip(patterns.seen, patterns.seen[1:], strict=False)]
    assert len(changes) == 11
    due = [step % 3 == 0 for step in range(2, 13)]
    if method == "rigl":
        due[10] = False  # its cosine has come down to zero
    assert changes == due


def test_metrics_are_logged():
    logger, told = ListLogger(), []
    logger.log_metrics = lambda metrics, step=None: told.append((step, metrics))
    trainer, _ = fit(MemSave(sparsity=setting("set", every=4)), logger=logger, log_every_n_steps=1)
    assert trainer.callback_metrics["memsave/density_fraction"].item() == 0.25
    assert trainer.callback_metrics["memsave/num_weights_moved"].item() == 3 * 6 * int(64 * 0.3)
    moved = [m["memsave/num_weights_moved"] for _, m in told if "memsave/num_weights_moved" in m and "epoch" not in m]
    assert moved == [6 * 19, 12 * 19, 18 * 19]


@pytest.mark.parametrize(
    ("method", "slots"),
    [
        *((method, {}) for method in ("static", "set", "rigl", "dsr", "gradual")),
        ("static", {"optimizer_state": OptimizerState(min_size=0)}),
        ("static", {"optimizer_state": OptimizerState(first_moment="4bit", min_size=0)}),
        *(("set", {"precision": precision}) for precision in ("bf16-sr", "bf16+8", "bf16-kahan")),
    ],
)
def test_a_resumed_run_is_bit_equal(method, slots, tmp_path):
    config, path = setting(method, until=20), tmp_path / "half.ckpt"
    trainer, _ = fit(MemSave(sparsity=config, **slots))
    trainer.save_checkpoint(path)  # after the run: the model is dense again, the optimizer's state is not
    straight, resumed = Patterns(), Patterns()
    fit(MemSave(sparsity=config, **slots), epochs=4, callbacks=[straight])
    fit(MemSave(sparsity=config, **slots), epochs=4, callbacks=[resumed], ckpt=path)
    assert equal(straight.model, resumed.model)
    assert equal(straight.seen[-1], resumed.seen[-1])
    assert len(resumed.seen) == 12


class Save(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def test_checkpoints_of_the_run_itself_are_dense_too(tmp_path):
    path = tmp_path / "last.ckpt"
    trainer, module = fit(MemSave(sparsity=setting("rigl"), optimizer_state=False), callbacks=[Save(path)])
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    during, after = (torch.load(p, weights_only=True) for p in (path, tmp_path / "end.ckpt"))
    assert equal(during["state_dict"], after["state_dict"])
    assert equal(during["state_dict"], module.state_dict())
    shapes = [p.shape for p in Net().parameters()]
    for checkpoint in (during, after):
        moments = [state["exp_avg"] for state in checkpoint["optimizer_states"][0]["state"].values()]
        assert [moment.shape for moment in moments] == shapes
    live = during["state_dict"]["blocks.0.0.weight"] != 0
    assert not during["optimizer_states"][0]["state"][0]["exp_avg"][~live].any()


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_dense_checkpoints_go_in_and_sparse_ones_come_out(tmp_path):
    dense, path = tmp_path / "dense.ckpt", tmp_path / "sparse.ckpt"
    trainer, module = fit(None)
    trainer.save_checkpoint(dense)
    weight = module.blocks[0][0].weight.detach().abs().view(-1)
    patterns = Patterns()
    trainer, module = fit(MemSave(sparsity=setting("static")), epochs=4, callbacks=[patterns], ckpt=dense)
    largest = weight.topk(64).indices.sort().values
    assert torch.equal(patterns.seen[0]["blocks.0.0"], largest)
    trainer.save_checkpoint(path)
    _, plain = fit(None, epochs=5, ckpt=path)
    assert all(torch.isfinite(p).all() for p in plain.parameters())
    # Another sparsity: pruned further.
    tighter = Patterns()
    fit(MemSave(sparsity=setting("static", sparsity=0.9)), epochs=5, callbacks=[tighter], ckpt=path)
    assert set(tighter.seen[0]["blocks.0.0"].tolist()) < set(largest.tolist())


@pytest.mark.parametrize("until", [4, 20])
@pytest.mark.parametrize("options", [{"method": "gradual"}, {"method": "static", "initial": "snip"}])
def test_dense_checkpoints_are_pruned_in_the_run_that_resumes(options, until, tmp_path):
    trainer, _ = fit(None)
    trainer.save_checkpoint(tmp_path / "dense.ckpt")
    patterns = Patterns()
    fit(MemSave(sparsity=setting(until=until, **options)), epochs=4, callbacks=[patterns], ckpt=tmp_path / "dense.ckpt")
    assert len(patterns.seen[-1]["blocks.0.0"]) == 64
    is_at_once = until == 4 or "initial" in options
    assert (len(patterns.seen[0]["blocks.0.0"]) == 64) == is_at_once


class Data(L.LightningDataModule):
    batch_size = 4

    def train_dataloader(self):
        return DataLoader(data().dataset, self.batch_size)


@pytest.mark.parametrize("options", [{"method": "gradual"}, {"method": "set"}, {"initial": "snip", "method": "static"}])
@pytest.mark.parametrize("find", ["lr_find", "scale_batch_size"])
def test_trials_of_finders_would_leave_their_patterns(find, options):
    trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[MemSave(sparsity=setting(**options))], logger=False)
    with pytest.raises(ValueError, match=r"changing patterns.*cannot be combined with (learning|batch).*Find it with"):
        getattr(Tuner(trainer), find)(Net(), datamodule=Data())


def test_a_learning_rate_is_found_with_patterns_that_stay(tmp_path):
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[MemSave(sparsity=setting("static"))],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    module = Net()
    module.lr = 0.1
    found = Tuner(trainer).lr_find(module, data(), num_training=4, update_attr=False)
    assert len(found.results["lr"]) == 4


def test_a_second_fit_keeps_the_pattern():
    memsave, module = MemSave(sparsity=setting("static")), Net()
    first, second = Patterns(), Patterns()
    fit(memsave, module, callbacks=[first])
    fit(MemSave(sparsity=setting("static", seed=9)), module, callbacks=[second])
    assert equal(first.seen[0], second.seen[0])


@pytest.mark.parametrize("slots", [{"microbatch": 2}, {"microbatch": 2, "checkpointing": "blocks"}])
def test_rigl_grows_the_same_weights_under_microbatches(slots):
    whole, cut = Patterns(), Patterns()
    fit(MemSave(sparsity=setting("rigl")), callbacks=[whole], precision="64-true")
    fit(MemSave(sparsity=setting("rigl"), **slots), callbacks=[cut], precision="64-true")
    assert all(equal(a, b) for a, b in zip(whole.seen, cut.seen, strict=True))


def test_rigl_sees_all_accumulated_batches():
    class Look(L.Callback):
        def __init__(self):
            self.held = []

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            layer = pl_module.blocks[0][0]
            if layer.dense_gradient is not None:
                live = layer.layout.positions()
                self.held.append(torch.equal(layer.dense_gradient.view(-1)[live], layer.values.grad))

    look = Look()
    fit(MemSave(sparsity=setting("rigl", every=3)), callbacks=[look], accumulate_grad_batches=2)
    assert look.held == [True, True]


class RunsOut(Net):
    """In the middle of the backward of one accumulated batch, until that is cut."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def training_step(self, batch, batch_idx):
        x = self.blocks[0](batch[0])
        if self.trainer.fit_loop.total_batch_idx == self.at and len(x) > 4 and x.requires_grad:
            x.register_hook(self.fail)
        return F.cross_entropy(self.head(self.blocks[2](self.blocks[1](x))), batch[1])

    def fail(self, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried ...")


def test_rigl_does_not_score_by_tries_that_failed():
    def patterns(at):
        torch.manual_seed(0)
        memsave, seen = MemSave(sparsity=setting("rigl"), microbatch="auto"), Patterns()
        fit(memsave, RunsOut(at), callbacks=[seen], accumulate_grad_batches=2, precision="64-true")
        return seen.seen, memsave.report.num_oom_recovered

    (plain, no_failure), (ours, some_failures) = patterns(-1), patterns(3)
    assert no_failure == 0
    assert some_failures >= 1
    assert all(equal(a, b) for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize(
    "slots",
    [
        {"checkpointing": "sqrt"},
        {"checkpointing": Checkpointing(budget=0.9), "activations": "exact"},
        {"microbatch": "auto", "activations": "int4"},
        {
            "microbatch": 4,
            "checkpointing": "blocks",
            "activations": "exact",
            "optimizer_state": OptimizerState(min_size=0),
        },
    ],
)
def test_everything_together(slots):
    memsave, patterns = MemSave(sparsity=setting("static"), **slots), Patterns()
    _, module = fit(memsave, callbacks=[patterns])
    assert memsave.report.loss_class == "changed"
    assert (
        "384 of 1,536 weights live in 6 layers (static); dense: head (24 weights)" in memsave.report.applied[1].summary
    )
    assert equal(patterns.seen[0], patterns.seen[-1])
    assert int(module.blocks[0][0].weight.count_nonzero()) == 64


# ------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("callback", [lambda: EMAWeightAveraging(), lambda: StochasticWeightAveraging(1e-2)])
def test_averages_of_dense_copies_are_refused(callback):
    with pytest.raises(ValueError, match=r"averages a copy of the dense model, got '\w+Averaging'"):
        fit(MemSave(sparsity=setting("static")), callbacks=[callback()])


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_coded_state_of_moving_weights_is_refused(bits):
    with pytest.raises(ValueError, match=r"coded in blocks"):
        fit(MemSave(sparsity=setting("rigl"), optimizer_state=OptimizerState(**BY_NAME[bits], min_size=0)))


@pytest.mark.parametrize(
    "slots",
    [
        {"optimizer_state": OptimizerState(first_moment="4bit", min_size=0)},
        {"optimizer_state": OptimizerState(min_size=0)},
        {"precision": "bf16-sr"},
        {"precision": "bf16+8"},
    ],
    ids=str,
)
def test_coded_state_and_bfloat16_values_are_dense_on_disk_and_resume_to_the_bit(slots, tmp_path):
    def made():
        return MemSave(sparsity=setting("static"), **slots)

    trainer, _ = fit(made(), epochs=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    plain_trainer, plain = fit(None, epochs=2)
    assert list(saved["state_dict"]) == list(plain.state_dict())
    for ours, theirs in zip(saved["state_dict"].values(), plain.state_dict().values(), strict=True):
        assert ours.shape == theirs.shape
    moments = saved["optimizer_states"][0]["state"]
    for number, state in plain_trainer.optimizers[0].state_dict()["state"].items():
        assert {n: t.shape for n, t in moments[number].items()} == {n: t.shape for n, t in state.items()}
    _, straight = fit(made(), epochs=4)
    _, resumed = fit(made(), epochs=4, ckpt=tmp_path / "half.ckpt")
    for a, b in zip(straight.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_bitsandbytes_own_optimizers_are_refused():
    with pytest.raises(ValueError, match=r"got 'Adam8bit'.*optimizer_state=\"8bit\""):
        fit(MemSave(sparsity=setting("static")), Net(lambda p: bitsandbytes.optim.Adam8bit(p, 1e-3)))


def test_a_failed_fit_gives_the_dense_model_back():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("on purpose")

    module = Fails()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(MemSave(sparsity=setting("set")), module)
    assert type(module.blocks[0][0]) is nn.Linear


def test_settings_of_the_slot():
    assert MemSave(sparsity=0.8).recipe.get(Sparsity) == Sparsity(sparsity=0.8)
    assert MemSave(sparsity="2:4").recipe.get(Sparsity).density == 0.5
    assert MemSave(sparsity=False).recipe.get(Sparsity) is None
    with pytest.raises(ValueError, match="fraction from 0 to below 1"):
        MemSave(sparsity=True)
