"""Sparse update through trainers: plans, resuming, checkpoints, logs, and what meets it."""

from __future__ import annotations

import copy

import bitsandbytes
import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memsave import Checkpointing, MemSave, OptimizerState, SparseUpdate, predict
from lightning_memsave.techniques.sparse_update import partial_layers
from tests.harness import EMAWeightAveraging, ListLogger
from tests.loops.recovery_runs import Deterministic, limited, train
from tests.techniques.sparse_update_subjects import convolutions


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


class Net(L.LightningModule):
    def __init__(self, optimizer=adamw):
        super().__init__()
        self.body, self._make = convolutions(), optimizer

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.body(batch[0]), batch[1])

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


class Values(L.Callback):
    """Those at the end of each batch, and the state dict at the end of the fit."""

    def __init__(self):
        self.seen, self.channels, self.model = [], {}, None

    def on_train_batch_end(self, trainer, pl_module, *args):
        layers = partial_layers(pl_module)
        self.seen.append({name: layer.whole_values().clone() for name, layer in layers.items()})
        self.channels = {name: layer.channels.tolist() for name, layer in layers.items()}

    def on_fit_end(self, trainer, pl_module):
        self.model = copy.deepcopy(pl_module.state_dict())


def data(num=48):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, 1, 8, 8, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 5, (num,), generator=generator)), batch_size=8)


def trainer_with(memsave, epochs=2, callbacks=(), **options):
    return L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[*([memsave] if memsave else []), *callbacks],
        logger=options.pop("logger", False),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(memsave, module=None, ckpt=None, **options):
    module = Net() if module is None else module
    trainer = trainer_with(memsave, **options)
    trainer.fit(module, data(), ckpt_path=ckpt)
    return trainer, module


def equal(first, second) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


NO_MINIMUM = {"min_size": 0}
FORMATS = {
    "8bit": OptimizerState(**NO_MINIMUM),
    "4bit": OptimizerState(first_moment="4bit", **NO_MINIMUM),
    "factored": OptimizerState(first_moment="4bit", second_moment="factored", **NO_MINIMUM),
    "offload": OptimizerState(placement="host", **NO_MINIMUM),
}
PARTS = SparseUpdate(layers={"body.8": 0.25, "body.10": (1, 3, 5), "body.14": 1.0})


@pytest.mark.parametrize(
    ("update", "slots", "make"),
    [
        (0.3, {}, adamw),
        ("40KiB", {}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        (PARTS, {}, adamw),
        (PARTS, {}, lambda p: adamw(each for each in p if each.requires_grad)),
        (PARTS, {}, lambda p: torch.optim.Adafactor(p, 0.01)),
        *((PARTS, {"optimizer_state": each}, adamw) for each in FORMATS.values()),
        *((PARTS, {"precision": precision}, adamw) for precision in ("bf16-sr", "bf16+8", "bf16-kahan")),
        (0.3, {"precision": "bf16+8", "optimizer_state": FORMATS["8bit"], "activations": "int4"}, adamw),
    ],
    ids=[
        *("budget", "bytes", "layers", "only what is trained", "adafactor", *FORMATS),
        *("bf16-sr", "bf16+8", "bf16-kahan", "together"),
    ],
)
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_is_bit_equal_and_a_plain_one_can_go_on(update, slots, make, tmp_path):
    path = tmp_path / "half.ckpt"
    trainer, _ = fit(MemSave(sparse_update=update, **slots), Net(make))
    trainer.save_checkpoint(path)  # after the run: the model is dense again, the optimizer's state is not
    straight, resumed = Values(), Values()
    fit(MemSave(sparse_update=update, **slots), Net(make), epochs=4, callbacks=[straight])
    fit(MemSave(sparse_update=update, **slots), Net(make), epochs=4, callbacks=[resumed], ckpt=path)
    assert len(resumed.seen) == 12
    assert straight.channels == resumed.channels
    assert all(map(equal, straight.seen[12:], resumed.seen))
    assert equal(straight.model, resumed.model)
    if make is adamw or "optimizer_state" in slots:
        _, plain = fit(None, Net(make), epochs=4, ckpt=path)
        assert all(torch.isfinite(p).all() for p in plain.parameters())


class Save(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def test_checkpoints_are_those_of_a_dense_run(tmp_path):
    path, seen = tmp_path / "last.ckpt", Values()
    trainer, module = fit(MemSave(sparse_update=PARTS), callbacks=[Save(path), seen])
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    during, after = (torch.load(p, weights_only=True) for p in (path, tmp_path / "end.ckpt"))
    fit(None, callbacks=[Save(tmp_path / "plain.ckpt")])
    plain = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    assert equal(during["state_dict"], after["state_dict"])
    assert equal(during["state_dict"], module.state_dict())
    shapes = {n: {k: t.shape for k, t in s.items()} for n, s in plain["optimizer_states"][0]["state"].items()}
    for checkpoint in (during, after):
        (optimizer,) = checkpoint["optimizer_states"]
        assert {n: {k: t.shape for k, t in s.items()} for n, s in optimizer["state"].items()} == shapes
        frozen, partly, whole = (optimizer["state"][number] for number in (0, 8, 12))
        assert not frozen["exp_avg"].any()
        assert frozen["step"] == 0
        assert partly["step"] == whole["step"] == 12
        moved = partly["exp_avg"].abs().sum((0, 2, 3)).nonzero().view(-1).tolist()
        assert moved
        assert set(moved) <= set(seen.channels["body.8"])  # some may be zero
        (ours,) = (state for name, state in checkpoint["callbacks"].items() if name.startswith("MemSave"))
        assert ours["sparse_update"]["layers"] == {
            "body.8": seen.channels["body.8"],
            "body.10": [1, 3, 5],
            "body.14": 1.0,
        }


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_that_is_resumed_with_another_setting_chooses_again(tmp_path):
    path = tmp_path / "half.ckpt"
    trainer, _ = fit(MemSave(sparse_update=0.3))
    trainer.save_checkpoint(path)
    for update, expected in ((SparseUpdate(layers={"body.6": (2, 4)}), {"body.6": [2, 4]}), (0.5, None)):
        seen = Values()
        fit(MemSave(sparse_update=update), epochs=3, ckpt=path, callbacks=[seen])
        assert len(seen.seen) == 6
        assert expected is None or seen.channels == expected
        assert all(values.isfinite().all() for values in seen.seen[-1].values())
    dense = tmp_path / "dense.ckpt"
    fit(None)[0].save_checkpoint(dense)
    before = torch.load(dense, weights_only=True)["state_dict"]
    _, module = fit(MemSave(sparse_update=PARTS), epochs=3, ckpt=dense)
    changed = {name for name, t in module.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == {f"body.{n}.{kind}" for n in (8, 10, 14) for kind in ("weight", "bias")}


def test_what_is_frozen_stays_to_the_bit_and_what_is_trained_is_logged():
    logger, before = ListLogger(), Net().state_dict()
    memsave = MemSave(sparse_update=PARTS)
    trainer, module = fit(memsave, logger=logger, log_every_n_steps=1)
    after = module.state_dict()
    assert all(p.requires_grad for p in module.parameters())
    kept = sorted(set(range(32)) - {1, 3, 5})
    assert torch.equal(after["body.10.weight"][:, kept], before["body.10.weight"][:, kept])
    assert not torch.equal(after["body.10.weight"], before["body.10.weight"])
    in_front = [name for name in before if name.split(".")[1] in "0246"]
    assert all(torch.equal(after[name], before[name]) for name in in_front)
    numbers = 8 * 32 * 9 + 3 * 32 * 9 + 5 * 32 + 32 + 32 + 5
    total = sum(p.numel() for p in module.parameters())
    assert trainer.callback_metrics["memsave/trained_fraction"].item() == pytest.approx(numbers / total, rel=1e-6)
    (applied,) = (a for a in memsave.report.applied if a.technique == "sparse_update")
    assert applied.summary == f"{numbers:,} of {total:,} numbers are trained, of weights in 3 layers (2 in part)"
    assert memsave.report.loss_class == "changed"
    assert f"all but {numbers:,} of {total:,} numbers are frozen" in memsave.report.loss_class_reasons


def test_a_plan_leaves_no_trace():
    seen = []

    class Look(L.Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append((copy.deepcopy(pl_module.state_dict()), torch.get_rng_state(), len(partial_layers(pl_module))))

    fit(None, callbacks=[Look()])
    fit(MemSave(sparse_update=0.3), callbacks=[Look()])
    (plain, rng, _), (ours, our_rng, num_layers) = seen
    assert equal(plain, ours)
    assert torch.equal(rng, our_rng)
    assert num_layers


@pytest.mark.parametrize("module", [Net, Manual])
def test_layers_may_be_given_with_either_way_of_optimization(module):
    seen = Values()
    fit(MemSave(sparse_update=PARTS), module(), callbacks=[seen])
    for name in seen.seen[0]:
        assert not torch.equal(seen.seen[0][name], seen.seen[-1][name])


@pytest.mark.parametrize(
    "slots",
    [
        {"checkpointing": Checkpointing(modules="body.[68]")},
        {"checkpointing": Checkpointing(modules="body.1*"), "activations": "exact"},
        {"microbatch": 4, "activations": "exact"},
        {"tiling": "samples"},
    ],
    ids=str,
)
def test_exact_techniques_beside_it_change_nothing_more(slots):
    alone, beside = Values(), Values()
    fit(MemSave(sparse_update=PARTS), callbacks=[alone])
    fit(MemSave(sparse_update=PARTS, **slots), callbacks=[beside])
    for name, values in alone.seen[-1].items():
        torch.testing.assert_close(beside.seen[-1][name], values, rtol=1e-3, atol=1e-4)


def test_gradients_may_end_in_backward():
    kept, released = Values(), Values()
    fit(MemSave(sparse_update=PARTS), callbacks=[kept])
    state = OptimizerState(first_moment="32bit", gradients="release")
    fit(MemSave(sparse_update=PARTS, microbatch=False, optimizer_state=state), callbacks=[released])
    assert equal(kept.seen[-1], released.seen[-1])


@pytest.mark.parametrize("slots", [{}, {"activations": "exact"}], ids=str)
def test_a_prediction_is_what_is_measured(slots):
    batch = next(iter(data(8)))
    for update in (PARTS, 0.3):
        prediction = predict(Net(), batch, MemSave("measure", sparse_update=update, **slots))
        memsave = MemSave("measure", sparse_update=update, **slots)
        trainer_with(memsave, epochs=3).fit(Net(), data(8))
        assert prediction.source == "fake"
        assert dict(prediction.by_category) == dict(memsave.report.by_category)


def test_a_learning_rate_is_found_and_the_model_is_as_before(tmp_path):
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[MemSave(sparse_update=0.3)],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    module = Net()
    module.lr, before = 0.1, copy.deepcopy(module.state_dict())
    found = Tuner(trainer).lr_find(module, data(), num_training=4, update_attr=False)
    assert len(found.results["lr"]) == 4
    assert equal(before, module.state_dict())


# ------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("callback", [lambda: EMAWeightAveraging(), lambda: StochasticWeightAveraging(1e-2)])
def test_averages_of_dense_copies_are_refused(callback):
    with pytest.raises(ValueError, match=r"`sparse_update` cannot.*averages a copy of the dense model"):
        fit(MemSave(sparse_update=PARTS), callbacks=[callback()])


def test_callbacks_that_unfreeze_parameters_are_refused():
    class Finetuning(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.body[0])

    with pytest.raises(ValueError, match=r"`sparse_update` cannot.*freezes and unfreezes.*Finetuning"):
        fit(MemSave(sparse_update=PARTS), callbacks=[Finetuning()])


def test_optimizers_of_bitsandbytes_are_refused():
    with pytest.raises(ValueError, match=r"`sparse_update` cannot write the state of bitsandbytes' own"):
        fit(MemSave(sparse_update=PARTS), Net(lambda p: bitsandbytes.optim.Adam8bit(p, 1e-3)))


def test_others_that_replace_weights_are_refused_and_step_aside_where_nobody_asked_for_them():
    for other in ({"sparsity": 0.9}, {"low_rank": 3}):
        with pytest.raises(ValueError, match=r"cannot be combined with .*: both put other parameters"):
            MemSave(sparse_update=PARTS, **other)
    assert "sparsity" not in MemSave("extreme", sparse_update=PARTS).recipe.stems()


def test_a_budget_that_cannot_be_planned_is_refused():
    with pytest.raises(ValueError, match=r"`sparse_update` cannot be planned with manual optimization.*layers="):
        fit(MemSave(sparse_update=0.2), Manual())
    with pytest.raises(ValueError, match=r"`budget` cannot be planned beside a sparse update's own"):
        MemSave(sparse_update=0.2, budget="1GiB")
    MemSave(sparse_update=PARTS, budget="1GiB")
    with pytest.raises(ValueError, match="`sparse_update` must have room for"):
        fit(MemSave(sparse_update=100))

    class Once(IterableDataset):
        def __iter__(self):
            return self

        def __next__(self):
            return torch.randn(8, 1, 8, 8), torch.zeros(8, dtype=torch.long)

    with pytest.raises(ValueError, match=r"`sparse_update` needs data that can be read from the start again"):
        trainer_with(MemSave(sparse_update=0.3)).fit(Net(), Once())


def test_a_step_that_fails_in_a_plan_names_its_error():
    class Broken(Net):
        def training_step(self, batch, batch_idx):
            raise KeyError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        fit(MemSave(sparse_update=0.3), Broken())


def test_modules_without_a_pattern_that_matches_are_refused():
    with pytest.raises(ValueError, match=r"`SparseUpdate.layers` must match"):
        fit(MemSave(sparse_update=SparseUpdate(layers={"tail.*": 0.5})))
    assert isinstance(Net().body[0], nn.Conv2d)


def test_a_batch_that_ran_out_of_memory_is_run_again():
    update, trained = SparseUpdate(layers={"first": (0, 2), "last": 1.0}), []
    for limit in (8, 10**9):
        module, memsave = limited(Deterministic, limit), MemSave(sparse_update=update)
        train(module, memsave)
        assert (memsave.report.num_oom_recovered > 0) is (limit == 8)
        trained.append(module)
    for a, b in zip(*(module.parameters() for module in trained), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
