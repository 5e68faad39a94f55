"""Microbatches against whole batches in float64: everything that a user can see is the same to 1e-12."""

from __future__ import annotations

import gc
import warnings
import weakref

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memsave import Checkpointing, MemSave, Microbatching, NoEffectWarning, microbatches
from tests.harness import assert_same_run, fit, largest_difference
from tests.loops.whole_batches import EXACT, SHAPES, Module, batches, both


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")  # Lightning, of the plain run as well
@pytest.mark.parametrize("shape", SHAPES)
def test_every_batch_structure_equals_the_whole_batch(shape):
    memsave = MemSave(microbatch=3)
    plain, ours = both(Module(output="dict"), batches(shape), memsave)
    assert_same_run(plain, ours, EXACT)
    assert memsave.report.loss_class == "exact"
    assert memsave.report.microbatch_size == 3


@pytest.mark.parametrize("size", [1, 3, 4, 10, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sizes_and_reductions(size, reduction):
    plain, ours = both(Module(reduction=reduction), batches(), MemSave(microbatch=size))
    assert_same_run(plain, ours, EXACT)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3, "max_epochs": 3},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"max_steps": 4, "max_epochs": -1},
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_trainer_options(options, optimizer):
    plain, ours = both(Module(optimizer=optimizer), batches(), MemSave(microbatch=3), **options)
    assert_same_run(plain, ours, EXACT)


def test_lbfgs_calls_the_closure_many_times():
    plain, ours = both(Module(optimizer="lbfgs", metrics=False), batches(), MemSave(microbatch=3))
    # Round-off is amplified by the line search, so the bar is lower; the number of evaluations is the same.
    assert len(plain.hooks) == len(ours.hooks)
    assert_same_run(plain, ours, 1e-8)


def test_returning_none_skips_the_step():
    class Skips(Module):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plain, ours = both(Skips(metrics=False), batches(), MemSave(microbatch=3))
    assert_same_run(plain, ours, EXACT)


@pytest.mark.parametrize("overflow", [False, True])
def test_fp16_with_a_grad_scaler(overflow):
    class Scaled(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * (float("inf") if overflow and batch_idx == 1 else 1.0)

    module = Scaled(metrics=False)

    def run(memsave):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        data = [(x.float(), y) for x, y in batches()]
        seen = fit(module, data, memsave, plugins=[plugin], gradient_clip_val=1.0)
        return seen, scaler.get_scale()

    (plain, plain_scale), (ours, scale) = run(None), run(MemSave(microbatch=Microbatching(size=3, reduction="mean")))
    assert scale == plain_scale
    assert largest_difference(plain.parameters, ours.parameters) < 2e-3  # half-precision round-off
    assert sorted(plain.hooks) == sorted(ours.hooks)


def gan_steps(module, batch, parts):
    d_opt, g_opt = module.optimizers()
    d_opt.zero_grad()
    for part, weight in parts(batch):
        real, noise = part
        fake = module.generator(noise).detach()
        loss = F.softplus(-module.critic(real)).mean() + F.softplus(module.critic(fake)).mean()
        module.manual_backward(loss * weight)
    d_opt.step()
    g_opt.zero_grad()
    for part, weight in parts(batch):
        module.manual_backward(F.softplus(-module.critic(module.generator(part[1]))).mean() * weight)
    g_opt.step()


class Gan(L.LightningModule):
    def __init__(self, parts):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(3, 5), nn.Linear(5, 1)
        self.parts = parts

    def training_step(self, batch, batch_idx):
        gan_steps(self, batch, self.parts)

    def configure_optimizers(self):
        return torch.optim.Adam(self.generator.parameters(), 0.01), torch.optim.Adam(self.critic.parameters(), 0.01)


def whole(batch):
    yield batch, 1.0


def test_manual_optimization_gan_with_two_optimizers():
    data = [(torch.randn(7, 5, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)) for _ in range(3)]
    torch.manual_seed(0)
    plain_module = Gan(whole).double()
    ours_module = Gan(microbatches).double()
    ours_module.load_state_dict(plain_module.state_dict())
    memsave = MemSave(microbatch=2)
    plain = fit(plain_module, data, precision="64-true")
    ours = fit(ours_module, data, memsave, precision="64-true")
    assert largest_difference(plain.gradients, ours.gradients) < EXACT
    assert largest_difference(plain.parameters, ours.parameters) < EXACT
    assert memsave.report.microbatch_size == 2
    assert memsave.report.peak_bytes is not None
    with pytest.warns(NoEffectWarning, match="microbatches"):
        fit(plain_module, data, MemSave(microbatch=2), precision="64-true")


def test_a_validation_says_nothing_of_microbatches_in_training():
    class Validated(Gan):
        def validation_step(self, batch, batch_idx):
            return self.critic(batch[0]).mean()

    data = torch.utils.data.DataLoader([(torch.zeros(5), torch.zeros(3))] * 4, 2)
    trainer = L.Trainer(accelerator="cpu", callbacks=[MemSave(microbatch=1)], logger=False, enable_progress_bar=False)
    trainer.validate(Validated(whole), data, verbose=False)  # a warning is an error here


def test_manual_optimization_gan_with_regions_and_8bit_state():
    class WideGan(Gan):
        def __init__(self):
            super().__init__(whole)
            self.generator = nn.Sequential(
                nn.Linear(3, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 5)
            )
            self.critic = nn.Sequential(nn.Linear(5, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 1))

    data = [(torch.randn(7, 5), torch.randn(7, 3)) for _ in range(3)]
    module, regions = WideGan(), Checkpointing(modules="*.1")
    plain = fit(module, data)
    checkpointed = MemSave(checkpointing=regions)
    assert largest_difference(plain.parameters, fit(module, data, checkpointed).parameters) == 0
    memsave = MemSave(checkpointing=regions, optimizer_state="8bit")
    ours = fit(module, data, memsave)
    assert [a.technique for a in memsave.report.applied] == ["checkpointing", "optimizer_state", "optimizer_state"]
    assert memsave.report.by_category["optimizer_state"] < checkpointed.report.by_category["optimizer_state"]
    assert 0 < largest_difference(plain.parameters, ours.parameters) < 0.1


class OutOfMemory(Module):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch[0].clone(), batch[1].clone()  # as on an accelerator: not the data set's own tensors

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss


def test_after_a_final_out_of_memory_error_nothing_of_ours_holds_tensors():
    memsave = MemSave(microbatch=3)
    references = []

    class Keep(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            references.append(weakref.ref(batch[0]))

    module = OutOfMemory().double()
    hidden = []
    module.net.inner[0].register_forward_hook(lambda m, i, out: hidden.append(weakref.ref(out)))

    def run():
        with pytest.raises(torch.OutOfMemoryError):
            fit(module, batches(), memsave, precision="64-true", callbacks=[Keep()])

    run()
    del memsave.log, memsave.log_dict  # Lightning gives every callback its module's bound methods: the whole trainer
    gc.collect()
    assert len(references) == 2
    assert [r for r in (*references, *hidden) if r() is not None] == []
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    assert _get_current_dispatch_mode_stack() == []


def test_early_zero_grad_frees_gradients_before_the_forward_and_never_while_accumulating():
    alive: list[bool] = []

    def gradients_of(module):
        return any(p.grad is not None for p in module.parameters())

    class Looks(Module):
        def training_step(self, batch, batch_idx):
            alive.append(gradients_of(self))
            return super().training_step(batch, batch_idx)

    for memsave, expected in ((None, [False, True, True]), (MemSave(), [False, False, False])):
        alive.clear()
        fit(Looks().double(), batches(), memsave, precision="64-true", max_epochs=1)
        assert alive == expected
    alive.clear()
    plain, ours = both(Looks(), batches(), MemSave(), max_epochs=1, accumulate_grad_batches=3)
    assert alive == [False, True, True] * 2
    assert_same_run(plain, ours, 0.0)


def test_measure_changes_nothing_to_the_bit():
    plain, ours = both(Module(output="dict"), batches(), MemSave("measure"))
    assert_same_run(plain, ours, 0.0)
    assert plain.hooks == ours.hooks


def test_numpy_arrays_and_model_outputs_are_cut_as_well():
    from transformers.modeling_outputs import BaseModelOutput

    from lightning_memsave.techniques.microbatching import split

    batch = {"x": torch.zeros(4, 2).numpy(), "out": BaseModelOutput(last_hidden_state=torch.arange(4.0))}
    parts = [part for part, _ in split(batch, 2)]
    assert [part["x"].shape for part in parts] == [(2, 2), (2, 2)]
    assert parts[1]["out"].last_hidden_state.tolist() == parts[1]["out"]["last_hidden_state"].tolist() == [2.0, 3.0]


class CountedOperations(TorchDispatchMode):
    """Counts operations, views aside."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class CountsOperations(L.Callback):
    """Counts the operations of a batch that is not measured."""

    def __init__(self):
        self.mode = CountedOperations()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 4:
            self.mode.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 4:
            self.mode.__exit__(None, None, None)


class WithoutBuffers(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0].float()).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def test_a_batch_in_one_piece_runs_the_operations_of_plain_lightning():
    def count(memsave):
        counts = CountsOperations()
        fit(WithoutBuffers(), batches(sizes=(10,) * 6), memsave, callbacks=[counts], max_epochs=1)
        return counts.mode.count

    assert count(MemSave()) == count(None) > 0
