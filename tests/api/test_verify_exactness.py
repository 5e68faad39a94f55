from __future__ import annotations

import copy
import gc
import math
import os
import random
import weakref

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from lightning_memsave import (
    ActivationCompression,
    MemSave,
    Microbatching,
    OptimizerState,
    Sparsity,
    plan_training,
    predict,
    verify,
)
from lightning_memsave.api import verify_exactness
from lightning_memsave.loops.step_effects import StepEffects


class Net(L.LightningModule):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 64), norm(64), nn.Linear(64, 2)
        self.drop, self.calls = nn.Dropout(0.3), 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        z = self.drop(torch.tanh(self.norm(self.first(self.drop(batch[0])))))
        loss = (self.last(z) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 6, generator=generator), torch.randn(32, 2, generator=generator)


def test_what_is_exact_holds_and_nothing_is_left_behind(batch):
    module = Net()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    result = verify(module, batch, MemSave(activations=ActivationCompression(min_numel=1), checkpointing="sqrt"))
    assert result.holds
    assert result.loss_class == "exact"
    assert result.largest_difference == 0  # the same bits
    assert set(result.gradient_differences) == {"first", "norm", "last"}
    assert result.report.peak_bytes < result.plain.peak_bytes
    assert result.report.step_seconds > 0
    assert module.calls == 0
    assert module._trainer is None
    assert all(torch.equal(a, b) for a, b in zip(before.values(), module.state_dict().values(), strict=True))
    assert torch.equal(state, torch.get_rng_state())


def test_seeds_of_the_run_that_comes_are_kept(batch, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "42")
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002  # the generator that users seed
    verify(Net(), batch)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    assert (os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"]) == ("42", "1")


class NoNumber(Net):
    """Its loss is finite, a gradient is not: the root's slope at 0."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + (0 * self.last.bias).sum().abs().sqrt()


@pytest.mark.parametrize("sparsity", [False, 0.5])
def test_a_gradient_that_is_no_number_holds_nothing(batch, sparsity):
    result = verify(NoNumber(), batch, MemSave(sparsity=sparsity and Sparsity(sparsity=sparsity, min_size=8)))
    assert result.loss_difference < math.inf
    assert next(iter(result.gradient_differences.items())) == ("last", math.inf)
    assert not result.holds


def test_a_difference_from_nothing_is_infinite():
    assert verify_exactness._relative(torch.ones(2), torch.zeros(2)) == math.inf
    assert verify_exactness._relative(torch.zeros(2), torch.zeros(2)) == 0


@pytest.mark.filterwarnings("ignore:Microbatches change the result")
def test_a_change_is_told_by_module_the_largest_first(batch):
    result = verify(Net(nn.BatchNorm1d), batch, MemSave(microbatch=Microbatching(size=8)))
    assert result.loss_class == "changed"
    assert result.holds
    differences = list(result.gradient_differences.values())
    assert differences == sorted(differences, reverse=True)
    assert differences[0] > 0.01
    assert 0 < result.buffer_differences["norm"] < 0.1


def test_a_claim_that_is_false_does_not_hold(batch, monkeypatch):
    from lightning_memsave.techniques.microbatching import why_not_exact

    monkeypatch.setattr("lightning_memsave.loops.microbatch_record.why_not_exact", lambda module: ())
    monkeypatch.setattr(StepEffects, "has_drawn", False)
    monkeypatch.setattr(StepEffects, "changes", lambda self: [])
    assert why_not_exact(Net())
    result = verify(Net(), batch, MemSave(microbatch=8))  # other dropout masks
    assert result.loss_class == "exact"
    assert not result.holds
    assert result.largest_difference > result.tolerance


def test_a_gradient_that_one_side_lacks_is_infinitely_far(batch):
    class Loses(Net):
        def training_step(self, batch, batch_idx):
            if self.trainer.strategy.memsave.cutter.config is not None:
                batch = batch[0].detach(), batch[1]
                self.norm.requires_grad_(False)
            return super().training_step(batch, batch_idx)

    result = verify(Loses(), batch, MemSave(microbatch=Microbatching(size=32, reduction="mean")))
    assert result.gradient_differences["norm"] == math.inf
    assert not result.holds


def test_a_module_that_is_compiled_as_a_whole_is_refused(batch):
    module = torch.compile(Net(), backend="eager")
    with pytest.raises(ValueError, match=r"LightningModule itself.*torch\.compile"):
        verify(module, batch)
    with pytest.raises(ValueError, match=r"OptimizedModule.*Pass what was compiled"):
        predict(module, batch)


def test_manual_optimization_is_refused(batch):
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="automatic optimization"):
        verify(module, batch)


@pytest.mark.parametrize(
    ("slots", "loss_class"),
    [
        ({"optimizer_state": OptimizerState(first_moment="32bit", gradients="release")}, "exact"),
        ({"sparsity": Sparsity(sparsity=0.5, min_size=1)}, "changed"),
        ({"precision": "bf16-kahan"}, "changed"),
    ],
    ids=str,
)
def test_gradients_that_are_released_and_tensors_of_other_names(batch, slots, loss_class):
    result = verify(Net(), batch, MemSave(**slots))
    assert result.loss_class == loss_class
    assert result.holds
    assert "norm" in result.gradient_differences
    if loss_class == "exact":
        assert result.largest_difference == 0


def test_a_batch_that_does_not_fit_without_memory_saving_is_refused():
    class Large(Net):
        def training_step(self, batch, batch_idx):
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    with pytest.raises(ValueError, match=r"`batch` must fit without memory saving.* 2.00 GiB'. Take fewer samples"):
        verify(Large(), (torch.ones(8, 6), torch.ones(8, 2)), MemSave(microbatch=1))


class AsInRuns(Net):
    """What a module may have around its steps, none of which belongs to them."""

    def configure_callbacks(self):
        return [EarlyStopping("val_loss"), MemSave("measure")]

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters())
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    def on_train_epoch_end(self):
        raise AssertionError("an epoch ends")


def test_what_is_around_the_steps_of_a_module_stays_out_of_it(batch):
    result = verify(AsInRuns(), batch, MemSave(activations="int8"))
    assert result.loss_class == "approximate"
    assert result.largest_difference > 0


class Late(L.LightningModule):
    """Its layers are made when a run begins."""

    def __init__(self, hook):
        super().__init__()
        setattr(self, hook, lambda stage=None: setattr(self, "layer", nn.Linear(6, 2)))

    def training_step(self, batch, batch_idx):
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_layers_that_a_run_makes_are_compared(batch, hook):
    result = verify(Late(hook), batch, MemSave(microbatch=8))
    assert result.holds
    assert set(result.gradient_differences) == {"layer"}


def test_a_step_without_gradients_is_no_comparison(batch):
    class Skips(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx).detach().requires_grad_()

    with pytest.raises(ValueError, match="`verify` needs gradients: in the first step no parameter"):
        verify(Skips(), batch)


def test_a_module_of_the_other_lightning():
    from pytorch_lightning.demos.boring_classes import BoringModel as OtherModel

    assert verify(OtherModel(), torch.ones(8, 32), MemSave(microbatch=2)).holds


class Scaled(torch.autograd.Function):
    """A gradient that grows with the number of samples, in front of the last layer, where nobody looks."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + ctx.factor * len(gradient)), None


class Rectified(Net):
    """Linear layers and ReLU alone: what is kept with noise leaves gradients unbiased."""

    statistic = 0.0

    def __init__(self):
        super().__init__(nn.Identity)
        self.first, self.middle, self.last = nn.Linear(6, 64), nn.Linear(64, 64), nn.Linear(64, 2)
        self.drop = nn.Identity()

    def training_step(self, batch, batch_idx):
        h = Scaled.apply(self.middle(self.first(batch[0]).relu()).relu(), self.statistic)
        return (self.last(h) - batch[1]).square().mean()


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "rows-0.5"])
def test_noise_that_averages_to_zero_is_expected(batch, codec):
    module = Rectified()
    result = verify(module, batch, MemSave(activations=ActivationCompression(codecs=(codec,), min_numel=1)))
    assert result.loss_class == "unbiased"
    assert result.holds
    assert (result.noise.codecs, result.noise.num_draws) == ((codec,), 8)
    assert 0 < result.noise.mean_size < 1.5 * result.noise.size / 8**0.5


def test_a_draw_that_is_no_number_is_not_expected(batch, monkeypatch):
    run = verify_exactness._one_run

    def spoiled(*args, num_steps=verify_exactness._NUM_STEPS):
        found = run(*args, num_steps)
        if num_steps == 1:
            found.gradients["last.bias"] *= math.nan
        return found

    monkeypatch.setattr(verify_exactness, "_one_run", spoiled)
    result = verify(Rectified(), batch, MemSave(activations=ActivationCompression(codecs=("int4",), min_numel=1)))
    assert result.largest_difference < math.inf
    assert not result.holds


def test_a_difference_that_is_there_in_every_draw_is_no_noise(batch):
    module = Rectified()
    module.statistic = 0.1
    whole = verify(module, batch, MemSave(activations=ActivationCompression(codecs=("int4",), min_numel=1)))
    cut = ActivationCompression(codecs=("int4",), min_numel=1)
    parts = verify(module, batch, MemSave(activations=cut, microbatch=8))
    assert (whole.loss_class, parts.loss_class) == ("unbiased", "unbiased")
    assert whole.holds
    assert not parts.holds
    assert parts.noise.bias > 0.1


@pytest.mark.parametrize(
    "memsave", [MemSave(), MemSave(activations="exact"), MemSave(precision="bf16-sr", activations="int4")], ids=repr
)
def test_draws_are_taken_only_where_nothing_but_noise_changes_the_result(batch, memsave, monkeypatch):
    monkeypatch.setattr(verify_exactness, "noise_of", lambda *_: pytest.fail("several draws"))
    assert verify(Rectified(), batch, memsave).noise is None


def draws(num, elements, seed):
    """Rounding to a whole number up or down, so that the mean is the number: some of it hardly ever goes up."""
    generator = torch.Generator().manual_seed(seed)
    fraction = torch.rand(elements, generator=generator, dtype=torch.float64)
    return (torch.rand(num, elements, generator=generator, dtype=torch.float64) < fraction).double() - fraction


def test_noise_without_a_bias_is_rarely_taken_for_more():
    """Chances of noise are spread evenly: a hundredth of them is below a hundredth."""
    found = torch.tensor([verify_exactness.noise_of(draws(8, 64, seed), ("x",)).chance for seed in range(2000)])
    assert float((found < 0.5).double().mean()) == pytest.approx(0.5, abs=0.05)
    assert float((found < 0.01).double().mean()) < 0.02
    assert float(found.min()) > 1e-5


def test_a_bias_as_large_as_the_noise_is_told_from_it():
    for seed in range(200):
        errors = draws(8, 4096, seed)
        bias = errors.square().mean() ** 0.5
        found = verify_exactness.noise_of(errors + bias, ("x",))
        assert found.chance < 1e-4
        assert found.bias == pytest.approx(float(bias) * 64, rel=0.05)


@pytest.mark.parametrize("num", [4, 8, 16])
def test_the_chance_is_that_of_an_analysis_of_variance(num):
    """The referee: scipy's F distribution, and the ratio of variances as its textbook has it."""
    stats = pytest.importorskip("scipy.stats")
    for shift in (0.0, 0.02, 0.05, 0.1):
        errors = (draws(num, 300, 1) + shift).numpy()
        mean = errors.mean(0)
        within = ((errors - mean) ** 2).sum() / (num - 1)
        sizes = (errors**2).sum(1).mean()
        pairs = [float(errors[i] @ errors[j]) ** 2 for i in range(num) for j in range(i)]
        degrees = sizes**2 / (sum(pairs) / len(pairs))
        expected = stats.f.sf(num * (mean**2).sum() / within, degrees, degrees * (num - 1))
        assert verify_exactness.noise_of(torch.tensor(errors), ("x",)).chance == pytest.approx(expected, rel=0.2)


def test_draws_without_any_difference_have_no_noise():
    found = verify_exactness.noise_of(torch.zeros(4, 8, dtype=torch.float64), ("x",))
    assert (found.size, found.mean_size, found.bias, found.chance) == (0, 0, 0, 1)


def test_a_plan_is_that_of_a_run(batch):
    """Trials of plans are not looked at as the steps are that are compared."""
    torch.manual_seed(0)
    module = Net()
    alone, ours = MemSave(budget="0.9x"), MemSave(budget="0.9x")
    plan_training(module, batch, alone)
    verify(module, batch, ours)
    assert ours.plan.baseline_by_category == alone.plan.baseline_by_category


def test_nothing_of_the_runs_is_alive_afterwards(batch):
    made = []

    class Watched(Net):
        def configure_optimizers(self):
            made.append(weakref.ref(self.first.weight))
            return super().configure_optimizers()

    verify(Watched(), batch, MemSave(activations="int4"))
    gc.collect()
    assert len(made) > 1
    assert [each() for each in made] == [None] * len(made)
