"""Low-rank layers through trainers: resuming, checkpoints, logs, and what meets them."""

from __future__ import annotations

import copy
import math

import bitsandbytes
import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import Checkpointing, LowRank, MemSave, OptimizerState
from lightning_memsave.techniques.low_rank import low_rank_layers
from lightning_memsave.techniques.low_rank.factored_state import FACTORED
from tests.harness import EMAWeightAveraging, ListLogger


def adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01)


class Net(L.LightningModule):
    def __init__(self, optimizer=adamw):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)))
        self.head, self._make = nn.Linear(16, 3), optimizer

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.blocks(batch[0])), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))

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


class Factors(L.Callback):
    """Those at the end of each batch, and the state dict at the end of the fit."""

    def __init__(self):
        self.seen, self.model = [], None

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.seen.append({name: layer.whole_values().clone() for name, layer in low_rank_layers(pl_module).items()})

    def on_fit_end(self, trainer, pl_module):
        self.model = copy.deepcopy(pl_module.state_dict())


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(48, 16, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(0, 3, (48,), generator=generator)), batch_size=8)


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


def net(optimizer=adamw):
    torch.manual_seed(0)
    return Net(optimizer)


def fit(memsave, module=None, ckpt=None, **options):
    module = net() if module is None else module
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
    "compact": OptimizerState(checkpoint="compact", **NO_MINIMUM),
    "galore": OptimizerState(projection="galore", rank=2, **NO_MINIMUM),
    "offload": OptimizerState(placement="host", **NO_MINIMUM),
}


@pytest.mark.parametrize(
    ("slots", "make"),
    [
        ({}, adamw),
        ({}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        ({}, lambda p: torch.optim.Adafactor(p, 0.01)),
        ({}, lambda p: torch.optim.Rprop(p, 0.01)),
        *(({"optimizer_state": each}, adamw) for each in FORMATS.values()),
        *(({"precision": precision}, adamw) for precision in ("bf16-sr", "bf16+8", "bf16-kahan", "bf16-gradients")),
        ({"precision": "bf16+8", "optimizer_state": FORMATS["8bit"], "microbatch": 4, "activations": "exact"}, adamw),
    ],
    ids=[
        *("adamw", "sgd", "adafactor", "rprop", *FORMATS),
        *("bf16-sr", "bf16+8", "bf16-kahan", "bf16-gradients", "together"),
    ],
)
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_is_bit_equal_and_a_plain_one_can_go_on(slots, make, tmp_path):
    path = tmp_path / "half.ckpt"
    trainer, _ = fit(MemSave(low_rank=3, **slots), net(make))
    trainer.save_checkpoint(path)  # after the run: the model is dense again, the optimizer's state is not
    straight, resumed = Factors(), Factors()
    fit(MemSave(low_rank=3, **slots), net(make), epochs=4, callbacks=[straight])
    fit(MemSave(low_rank=3, **slots), net(make), epochs=4, callbacks=[resumed], ckpt=path)
    assert len(resumed.seen) == 12
    assert all(map(equal, straight.seen[12:], resumed.seen))
    assert equal(straight.model, resumed.model)
    if slots.get("optimizer_state") not in (FORMATS["compact"], FORMATS["galore"]):  # which torch cannot read anyhow
        _, plain = fit(None, net(make), epochs=4, ckpt=path)
        assert all(torch.isfinite(p).all() for p in plain.parameters())


class Save(L.Callback):
    def __init__(self, path):
        self.path = path

    def on_train_epoch_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def test_checkpoints_of_the_run_itself_are_dense_too(tmp_path):
    path, seen = tmp_path / "last.ckpt", Factors()
    trainer, module = fit(MemSave(low_rank=3), callbacks=[Save(path), seen])
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    during, after = (torch.load(p, weights_only=True) for p in (path, tmp_path / "end.ckpt"))
    assert equal(during["state_dict"], after["state_dict"])
    assert equal(during["state_dict"], module.state_dict())
    shapes = [p.shape for p in Net().parameters()]
    for checkpoint in (during, after):
        (optimizer,) = checkpoint["optimizer_states"]
        assert [state["exp_avg"].shape for state in optimizer["state"].values()] == shapes
        assert not optimizer["state"][0]["exp_avg_sq"].any()
        assert optimizer["state"][0]["step"] == 0
        assert optimizer["state"][1]["step"] == 12, "a bias goes on"
        assert optimizer[FACTORED][0]["state"]["step"] == 12
        assert optimizer[FACTORED][0]["state"]["exp_avg"].shape == (80, 3)
        (ours,) = (state for name, state in checkpoint["callbacks"].items() if name.startswith("MemSave"))
        assert equal(ours["low_rank"]["factors"], seen.seen[-1])


@pytest.mark.parametrize("before", ["8bit", "compact"])
@pytest.mark.parametrize("after", [None, "4bit"])
def test_moments_of_factors_go_on_in_another_format(before, after, tmp_path):
    path, begun = tmp_path / "half.ckpt", []
    trainer, _ = fit(MemSave(low_rank=3, optimizer_state=FORMATS[before]))
    trainer.save_checkpoint(path)

    class Look(L.Callback):
        def on_train_start(self, trainer, pl_module):
            (optimizer,) = trainer.optimizers
            begun.append(copy.deepcopy(optimizer.state_dict()["state"][0]))

    fit(
        MemSave(low_rank=3, optimizer_state=FORMATS[after] if after else False), epochs=3, ckpt=path, callbacks=[Look()]
    )
    assert begun[0]["step"] == 12
    assert begun[0]["exp_avg"].shape == (80, 3)
    assert begun[0]["exp_avg"].any()
    assert begun[0]["exp_avg_sq"].any()


def test_a_plain_run_starts_moments_of_these_weights_as_a_new_one(tmp_path):
    path = tmp_path / "half.ckpt"
    trainer, module = fit(MemSave(low_rank=3))
    trainer.save_checkpoint(path)
    first, plain = [], Net()

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            first.append(pl_module.blocks[0][0].weight.detach().clone())

    with pytest.warns(UserWarning, match="Be aware that when using `ckpt_path`"):
        fit(None, plain, epochs=3, ckpt=path, callbacks=[Look()])
    moved = (first[0] - module.blocks[0][0].weight * (1 - 0.01 * 0.01)).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=0.1, atol=0)  # Adam's first step


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_dense_checkpoints_go_in_and_are_cut_to_the_rank(tmp_path):
    dense, path = tmp_path / "dense.ckpt", tmp_path / "low.ckpt"
    trainer, module = fit(None)
    trainer.save_checkpoint(dense)
    trainer, low = fit(MemSave(low_rank=3), epochs=3, ckpt=dense)
    assert torch.linalg.matrix_rank(low.blocks[0][0].weight) == 3
    assert torch.linalg.matrix_rank(module.blocks[0][0].weight) == 16
    trainer.save_checkpoint(path)
    for rank in (2, 4):  # another one: cut, or with columns that are new
        seen = Factors()
        fit(MemSave(low_rank=rank), epochs=4, ckpt=path, callbacks=[seen])
        assert seen.seen[0]["blocks.0.0"].shape == (80, rank)
        assert all(factors.isfinite().all() for factors in seen.seen[-1].values())


def test_a_second_fit_goes_on_from_the_same_weights_and_a_test_in_between_sees_them():
    memsave, module, first, second = MemSave(low_rank=3), Net(), Factors(), Factors()
    fit(memsave, module, callbacks=[first])
    end = copy.deepcopy(module.state_dict())
    (found,) = trainer_with(None).test(module, data(), verbose=False)
    with torch.no_grad():
        expected = F.cross_entropy(module.head(module.blocks(data().dataset.tensors[0])), data().dataset.tensors[1])
    torch.testing.assert_close(found["loss"], float(expected))
    slow = Net(lambda p: torch.optim.SGD(p, 0.0))
    slow.load_state_dict(module.state_dict())
    fit(MemSave(low_rank=3), slow, callbacks=[second])
    for name, p in slow.named_parameters():
        torch.testing.assert_close(p, end[name], rtol=1e-5, atol=1e-6)


def test_the_same_trainer_tests_from_a_checkpoint_of_the_run(tmp_path):
    memsave = MemSave(low_rank=3)
    trainer, module = fit(memsave, callbacks=[Save(tmp_path / "last.ckpt")])
    (now,) = trainer.test(module, data(), verbose=False)
    (loaded,) = trainer.test(Net(), data(), ckpt_path=str(tmp_path / "last.ckpt"), verbose=False, weights_only=True)
    assert now == loaded


@pytest.mark.parametrize("module", [Net, Manual])
def test_factors_train_and_metrics_are_logged(module):
    logger, seen = ListLogger(), Factors()
    logger.log_metrics = lambda metrics, step=None: None
    memsave = MemSave(low_rank=3)
    trainer, _ = fit(memsave, module(), callbacks=[seen], logger=logger, log_every_n_steps=1)
    for name in seen.seen[0]:
        assert not torch.equal(seen.seen[0][name], seen.seen[-1][name])
    assert math.isclose(trainer.callback_metrics["memsave/low_rank_fraction"].item(), 3 * 80 / (16 * 64), rel_tol=1e-6)
    (applied,) = (a for a in memsave.report.applied if a.technique == "low_rank")
    assert applied.summary == (
        "1,440 numbers instead of 6,144 weights in 6 layers (rank 3); dense: head (rank 3 takes no fewer bytes)"
    )
    assert memsave.report.loss_class == "changed"
    assert "the weights of 6 layers are products of two factors (rank 3)" in memsave.report.loss_class_reasons


@pytest.mark.parametrize(
    "slots",
    [
        {"checkpointing": "sqrt"},
        {"checkpointing": Checkpointing(budget=0.9), "activations": "exact"},
        {"microbatch": 4, "checkpointing": "blocks", "activations": "exact", "optimizer_state": False},
    ],
    ids=str,
)
def test_exact_techniques_beside_it_change_nothing_more(slots):
    alone, beside = Factors(), Factors()
    fit(MemSave(low_rank=3), callbacks=[alone])
    fit(MemSave(low_rank=3, **slots), callbacks=[beside])
    for name, factors in alone.seen[-1].items():
        torch.testing.assert_close(beside.seen[-1][name], factors, rtol=1e-4, atol=1e-5)


def test_gradients_may_end_in_backward():
    kept, released = Factors(), Factors()
    fit(MemSave(low_rank=3), callbacks=[kept])
    state = OptimizerState(first_moment="32bit", gradients="release")
    fit(MemSave(low_rank=3, microbatch=False, optimizer_state=state), callbacks=[released])
    assert equal(kept.seen[-1], released.seen[-1])


def test_a_compiled_module_trains_as_an_eager_one():
    torch._dynamo.reset()
    eager, compiled = Factors(), Factors()
    fit(MemSave(low_rank=3), callbacks=[eager], epochs=1)
    trainer = trainer_with(MemSave(low_rank=3), epochs=1, callbacks=[compiled])
    trainer.fit(torch.compile(net()), data())
    for name, factors in eager.seen[-1].items():
        torch.testing.assert_close(compiled.seen[-1][name], factors, rtol=0, atol=1e-5)
    torch._dynamo.reset()


def test_a_learning_rate_is_found_and_the_model_is_as_before(tmp_path):
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[MemSave(low_rank=3)],
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
    with pytest.raises(ValueError, match=r"`low_rank` cannot.*averages a copy of the dense model.*`low_rank=False`"):
        fit(MemSave(low_rank=3), callbacks=[callback()])


def test_masks_of_dense_weights_are_refused():
    with pytest.raises(ValueError, match=r"`low_rank` cannot.*masks the dense weights, got 'ModelPruning'"):
        fit(MemSave(low_rank=3), callbacks=[ModelPruning("l1_unstructured", amount=0.5)])


def test_optimizers_of_bitsandbytes_are_refused():
    with pytest.raises(ValueError, match=r"`low_rank` cannot write the state of bitsandbytes' own"):
        fit(MemSave(low_rank=3), Net(lambda p: bitsandbytes.optim.Adam8bit(p, 1e-3)))


def test_sparsity_beside_it_is_refused_and_steps_aside_where_nobody_asked_for_it():
    with pytest.raises(ValueError, match="low_rank cannot be combined with sparsity: both put"):
        MemSave(low_rank=3, sparsity=0.9)
    assert "sparsity" not in MemSave("extreme", low_rank=3).recipe.stems()
    assert "low_rank" in MemSave("extreme", low_rank=3).recipe.stems()


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match=r"`low_rank` must match at least one layer that can be of low rank"):
        fit(MemSave(low_rank=40))
    with pytest.raises(ValueError, match=r"`LowRank.modules` must match"):
        fit(MemSave(low_rank=LowRank(rank=3, modules="body.*")))
