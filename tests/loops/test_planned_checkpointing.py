"""Planned checkpointing through real trainers: the first batch is rehearsed, and nothing else notices."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import defaultdict

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_memsave import (
    ActivationCompression,
    BudgetWarning,
    Checkpointing,
    MemSave,
    NoEffectWarning,
    OptimizerState,
)
from lightning_memsave.loops import planned_checkpointing

SETTINGS = {
    "sqrt": "sqrt",
    "recursive": "recursive",
    "budget": Checkpointing(budget=0.7),
}


class Block(nn.Module):
    def __init__(self, width: int, has_noise: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if has_noise else nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1) if has_noise else nn.Identity()

    def forward(self, x):
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Module(L.LightningModule):
    has_noise = True

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), *(Block(16, self.has_noise) for _ in range(6)), nn.Linear(16, 3))
        self.accuracy, self.seen, self.logged = MulticlassAccuracy(3), [], []

    def training_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        loss = F.cross_entropy(scores, batch[1])
        self.accuracy(scores, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(batch[0].sum().item())
        logged = {k: v.clone() for k, v in self.trainer.callback_metrics.items() if "memsave" not in k}
        self.logged.append({**logged, **{k: v.clone() for k, v in self.accuracy.metric_state.items()}})

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01, foreach=False)


class Quiet(Module):
    """Nothing that depends on the size of a batch."""

    has_noise = False


class Reads(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss.item() > 0 else loss


def data():
    generator = torch.Generator().manual_seed(3)
    rows, labels = torch.randn(384, 8, generator=generator), torch.randint(3, (384,), generator=generator)
    return DataLoader(TensorDataset(rows, labels), 96, shuffle=True)


def train(memsave, kind=Module, **options):
    torch.manual_seed(0)
    module = kind() if isinstance(kind, type) else kind
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=options.pop("max_epochs", 2),
        callbacks=[memsave] if memsave is not None else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, data())
    return module


def bits_of(module):
    return {
        "parameters": dict(module.named_parameters()),
        "buffers": dict(module.named_buffers()),
        "logged": {(i, k): v for i, row in enumerate(module.logged) for k, v in row.items()},
        "data": {"order": torch.tensor(module.seen)},
        "generator": {"state": torch.get_rng_state()},
    }


def run(memsave, kind=Module, **options):
    return bits_of(train(memsave, kind, **options))


def assert_same_run(plain, ours):
    for part, tensors in plain.items():
        assert tensors.keys() == ours[part].keys(), part
        for key, tensor in tensors.items():
            assert torch.equal(tensor, ours[part][key]), (part, key)


def applied_in(memsave):
    (applied,) = [a for a in memsave.report.applied if a.technique == "checkpointing"]
    return applied


# ---------------------------------------------------------------------- the same run
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", [Module, Reads])
def test_a_planned_run_is_the_plain_run_to_the_bit(name, kind):
    memsave = MemSave("measure", checkpointing=SETTINGS[name])
    assert_same_run(run(MemSave("measure"), kind), run(memsave, kind))
    assert "0 regions" not in applied_in(memsave).summary
    assert memsave.report.loss_class == "exact"


@pytest.mark.parametrize("name", ["budget", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sqrt", "recursive"))])
@pytest.mark.parametrize(
    ("others", "options"),
    [
        ({"microbatch": 48}, {}),
        ({"activations": ActivationCompression(min_numel=64)}, {}),
        ({}, {"accumulate_grad_batches": 2}),
        ({"optimizer_state": OptimizerState(min_size=0)}, {}),
        ({}, {"precision": "bf16-mixed"}),
    ],
    ids=["microbatch", "exact activations", "accumulation", "8bit", "bf16"],
)
def test_with_other_techniques(name, others, options):
    plain = run(MemSave("lossless", **others), Quiet, **options)
    memsave = MemSave("lossless", **others, checkpointing=SETTINGS[name])
    assert_same_run(plain, run(memsave, Quiet, **options))
    assert applied_in(memsave).technique == "checkpointing"


class Silent(Quiet):
    """No metric: those read values as well."""

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])


@pytest.mark.parametrize(("kind", "expected"), [(Silent, ["fake"]), (Reads, ["fake", "real"])])
def test_a_step_that_reads_values_is_rehearsed_on_real_tensors(kind, expected, monkeypatch):
    rehearsed = []
    real = planned_checkpointing.trace_step

    def recorded(model, run, *, held):
        rehearsed.append("fake" if isinstance(next(model.parameters()), FakeTensor) else "real")
        return real(model, run, held=held)

    monkeypatch.setattr(planned_checkpointing, "trace_step", recorded)
    train(MemSave("measure", checkpointing="sqrt"), kind, max_epochs=1)
    assert rehearsed == expected


def test_without_room_on_fake_tensors_a_step_is_rehearsed_on_real_ones(monkeypatch):
    """Torch would end the process where addresses run out under fake tensors."""
    monkeypatch.setattr(planned_checkpointing, "address_space_left", lambda: 2**27)
    monkeypatch.setattr(planned_checkpointing, "fake_tensors", lambda module: pytest.fail("rehearsed on fake tensors"))
    memsave = MemSave(checkpointing="sqrt")
    assert_same_run(run(None), run(memsave))
    assert "regions" in applied_in(memsave).summary


def test_the_measured_peak_is_lower_and_within_the_budget():
    plain, memsave = MemSave("measure"), MemSave("lossless", checkpointing=Checkpointing(budget=0.7))
    train(plain, Quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        train(memsave, Quiet)
    assert memsave.report.peak_bytes < plain.report.peak_bytes


# ---------------------------------------------------------------------- correction
class TakesMore(Quiet):
    """Makes something that its rehearsal does not show."""

    num_bytes = 0

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        planned = self.trainer.strategy.memsave.scopes.planned
        if planned is None or planned.applied is not None:
            self.more = torch.zeros(self.num_bytes, dtype=torch.uint8)  # until the next step
        return loss


def plans_of(monkeypatch):
    plans = []
    real = planned_checkpointing.apply_checkpointing
    monkeypatch.setattr(
        planned_checkpointing, "apply_checkpointing", lambda model, c: plans.append(c) or real(model, c)
    )
    return plans


def test_a_small_overshoot_is_planned_again_once(monkeypatch):
    plans = plans_of(monkeypatch)
    monkeypatch.setattr(TakesMore, "num_bytes", 40_000)
    ours = run(MemSave("lossless", checkpointing=Checkpointing(budget=0.8)), TakesMore)
    assert len(plans) == 2
    assert plans[0] != plans[1]
    assert_same_run(run(MemSave("lossless"), TakesMore), ours)


def test_a_large_overshoot_is_said(monkeypatch):
    plans = plans_of(monkeypatch)
    monkeypatch.setattr(TakesMore, "num_bytes", 10_000_000)
    with pytest.warns(BudgetWarning, match="is exceeded by 9"):
        train(MemSave("lossless", checkpointing=Checkpointing(budget=0.8)), TakesMore)
    assert len(plans) == 1


# ---------------------------------------------------------------------- what is refused
class Manual(Quiet):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class TakesIterator(Quiet):
    def training_step(self, dataloader_iter):
        raise AssertionError("refused before")


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`")
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("kind", "why"), [(Manual, "under manual optimization"), (TakesIterator, "dataloader_iter")])
def test_a_step_that_cannot_be_rehearsed_is_refused(name, kind, why):
    with pytest.raises(ValueError, match=rf'`checkpointing` cannot be planned .*{why}.*Use `checkpointing="blocks"`'):
        train(MemSave("measure", checkpointing=SETTINGS[name]), kind)


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy])
def test_sharded_parameters_are_refused(strategy):
    class Trainer:
        lightning_module = Quiet()

    trainer = Trainer()
    trainer.strategy = strategy()
    with pytest.raises(ValueError, match=rf"cannot be planned under {strategy.__name__}.*shards"):
        planned_checkpointing.PlannedCheckpointing(trainer, Checkpointing(method="sqrt"))


def test_an_impossible_budget_is_said_before_anything_is_trained():
    torch.manual_seed(0)
    module = Module()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"`Checkpointing.budget` must be at least .*Weights, batch and state take"):
        train(MemSave("measure", checkpointing=Checkpointing(budget=1000)), module)
    assert module.seen == []
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in before.items())
    assert all(p.grad is None for p in module.parameters())
    assert not any("forward" in vars(m) for m in module.modules())


def test_no_effect_is_said():
    class Tiny(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 3)

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    with pytest.warns(NoEffectWarning, match="checkpointing='sqrt' had no effect: no region lowers"):
        train(MemSave("measure", checkpointing="sqrt"), Tiny)


# ---------------------------------------------------------------------- before and after
@pytest.mark.parametrize("name", SETTINGS)
def test_the_model_is_as_before_afterwards(name):
    torch.manual_seed(0)
    module = Module()
    keys, attributes = list(module.state_dict()), {n: set(vars(m)) for n, m in module.net.named_modules()}
    train(MemSave("measure", checkpointing=SETTINGS[name]), module)
    assert list(module.state_dict()) == keys
    assert {n: set(vars(m)) for n, m in module.net.named_modules()} == attributes
    net, x = module.net.eval(), torch.randn(4, 8)
    assert torch.equal(copy.deepcopy(net)(x), net(x))
    assert torch.equal(pickle.loads(pickle.dumps(net))(x), net(x))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_second_fit_is_planned_anew(name, monkeypatch):
    plans = plans_of(monkeypatch)

    def twice(memsave):
        module = train(memsave, Module, max_epochs=1)
        return bits_of(train(memsave, module, max_epochs=1))

    plain = twice(MemSave("measure"))
    assert_same_run(plain, twice(MemSave("measure", checkpointing=SETTINGS[name])))
    assert len(plans) == 2


class WithoutMetrics(Quiet):
    """Nothing that reads values, so that it is rehearsed on fake tensors."""

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def test_a_second_fit_of_the_same_trainer_logs_numbers():
    """Its first batch empties what the first fit logged: the rehearsal, on fake tensors, must leave that to it."""

    def twice(memsave):
        torch.manual_seed(0)
        module, quiet = WithoutMetrics(), {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(accelerator="cpu", max_epochs=1, callbacks=[memsave], enable_model_summary=False, **quiet)
        trainer.fit(module, data())
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, data())
        return {name: value for name, value in trainer.callback_metrics.items() if "memsave" not in name}

    found, plain = twice(MemSave("measure", checkpointing="sqrt")), twice(MemSave("measure"))
    assert not any(isinstance(value, FakeTensor) for value in found.values())
    assert found == plain


class Keeps(WithoutMetrics):
    """Containers in containers, and names that begin with `_`: where a rehearsal leaves fake tensors."""

    def __init__(self):
        super().__init__()
        self._logs, self.net.outs = {"loss": []}, defaultdict(list)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self._logs["loss"].append(loss.detach())
        self.net.outs["train"].append(loss.detach())
        return loss


@pytest.mark.filterwarnings("ignore:checkpointing=.sqrt. had no effect")
def test_containers_of_the_model_keep_nothing_of_a_rehearsal():
    module = train(MemSave("measure", checkpointing="sqrt"), Keeps)
    assert len(module._logs["loss"]) == len(module.net.outs["train"]) == 8
    assert not any(isinstance(loss, FakeTensor) for loss in [*module._logs["loss"], *module.net.outs["train"]])


@pytest.mark.filterwarnings("ignore:checkpointing=.sqrt. had no effect")
def test_the_step_that_tells_how_the_loss_reduces_is_not_planned_for(monkeypatch):
    """It runs again with gradients where the step needs them, in eval mode and with noise that is set."""

    class Penalised(Quiet):
        def training_step(self, batch, batch_idx):
            x = batch[0].clone().requires_grad_()
            slope = torch.autograd.grad(self.net(x).sum(), x)[0]
            return F.cross_entropy(self.net(x), batch[1]) + slope.square().mean()

    sizes = []
    rehearse = planned_checkpointing._rehearse
    monkeypatch.setattr(
        planned_checkpointing,
        "_rehearse",
        lambda trainer, args, scope: sizes.append(len(args[0][0])) or rehearse(trainer, args, scope),
    )
    memsave = MemSave(microbatch=24, checkpointing="sqrt")
    train(memsave, Penalised, max_epochs=1)
    assert sizes == [24]
    assert memsave.report.microbatch_size == 24


def test_state_of_the_optimizer_counts_in_the_first_plan():
    """Two runs that differ in the optimizer alone: AdamW's moments come on top of what the rehearsal saw."""

    class Plain(Quiet):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    peaks = []
    for kind in (Plain, Quiet):
        memsave = MemSave("lossless", checkpointing="sqrt")
        module = kind()
        seen = []
        real = planned_checkpointing.Planner

        def recorded(*args, real=real, seen=seen, **kwargs):
            seen.append(kwargs["extra_bytes"])
            return real(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planned_checkpointing, "Planner", recorded)
            train(memsave, module, max_epochs=1)
        peaks += seen
    weights = sum(p.nbytes for p in Quiet().parameters())
    num_tensors = len(list(Quiet().parameters()))
    assert peaks == [0, 2 * weights + 4 * num_tensors]
