"""Steps inside of backward: the same bits as plain training, through real trainers and in plain torch."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import Checkpointing, Ledger, MemSave, OptimizerState, apply_optimizer_state
from tests.harness import Net, fit

RELEASE = OptimizerState(first_moment="32bit", gradients="release")
RELEASE_8BIT = OptimizerState(gradients="release", min_size=30)
RELEASE_4BIT = OptimizerState(first_moment="4bit", gradients="release", min_size=30)
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}
SCHEDULERS = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=20, cycle_momentum=False),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8),
}


class Module(L.LightningModule):
    def __init__(self, optimizer="AdamW", scheduler="one cycle"):
        super().__init__()
        self.net, self.head = Net(), nn.Linear(3, 3)
        self.head.bias.requires_grad_(False)
        self.names = optimizer, scheduler

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        decayed, others = self.net.parameters(), self.head.parameters()
        optimizer = OPTIMIZERS[self.names[0]]([{"params": decayed}, {"params": others, "weight_decay": 0.1}])
        return [optimizer], [{"scheduler": SCHEDULERS[self.names[1]](optimizer), "interval": "step"}]


def batches():
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(6, 5, generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(4)]


def assert_same(plain, ours):
    assert plain.parameters.keys() == ours.parameters.keys()
    for name, value in plain.parameters.items():
        assert torch.equal(value, ours.parameters[name]), name
    assert plain.logged == ours.logged
    assert plain.step == ours.step == 8
    assert sorted(plain.hooks) == sorted(ours.hooks)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_equals_plain_lightning_bit_for_bit(optimizer, scheduler):
    module = Module(optimizer, scheduler)
    memsave = MemSave(optimizer_state=RELEASE)
    plain, ours = fit(module, batches()), fit(module, batches(), memsave)
    assert_same(plain, ours)
    assert all(seen for seen in plain.gradients)
    assert not any(seen for seen in ours.gradients)
    assert memsave.report.loss_class == "exact"
    assert any("inside of backward" in applied.summary for applied in memsave.report.applied)


@pytest.mark.parametrize("precision", [None, "bf16-sr", "bf16+8", "bf16-kahan"])
@pytest.mark.parametrize("settings", [RELEASE_8BIT, RELEASE_4BIT, RELEASE])
def test_with_low_precision_and_8bit_state(settings, precision):
    kept = False if settings is RELEASE else dataclasses.replace(settings, gradients="keep")
    module = Module()
    assert_same(*(fit(module, batches(), MemSave(precision=precision, optimizer_state=s)) for s in (kept, settings)))


@pytest.mark.parametrize(
    "settings",
    [{"activations": "exact"}, {"checkpointing": Checkpointing(modules="Net")}],
    ids=str,
)
def test_with_what_computes_again_in_backward(settings):
    memsave, module = MemSave(optimizer_state=RELEASE, **settings), Module()
    assert_same(fit(module, batches()), fit(module, batches(), memsave))


@pytest.mark.filterwarnings("ignore:checkpointing='sqrt' had no effect")
@pytest.mark.parametrize("activations", [False, "exact"])
def test_a_rehearsed_batch_steps_nothing(activations):
    memsave, module = MemSave(optimizer_state=RELEASE, checkpointing="sqrt", activations=activations), Module()
    assert_same(fit(module, batches()), fit(module, batches(), memsave))


class Tied(Module):
    """A weight that is used twice, in two regions."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(5, 5), nn.Tanh()), nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.second[0].weight = self.first[0].weight

    def training_step(self, batch, batch_idx):
        return super().training_step((self.second(self.first(batch[0])), batch[1]), batch_idx)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


@pytest.mark.parametrize("settings", [{}, {"checkpointing": Checkpointing(modules=nn.Sequential)}], ids=str)
def test_tied_weights_step_once(settings):
    memsave, module = MemSave(optimizer_state=RELEASE, **settings), Tied()
    assert_same(fit(module, batches()), fit(module, batches(), memsave))


def test_clipping_by_value_is_exact():
    options = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}
    module = Module()
    plain = fit(module, batches(), **options)
    assert_same(plain, fit(module, batches(), MemSave(optimizer_state=RELEASE), **options))
    unclipped = fit(module, batches())
    assert all(seen for seen in plain.gradients)
    assert any(not torch.equal(plain.parameters[n], unclipped.parameters[n]) for n in plain.parameters)


class Unfreezes(Callback):
    """The head's bias, in the second epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.head.bias.requires_grad_(True)


def test_what_is_unfrozen_later_steps_as_without_but_is_not_clipped():
    def bias(*callbacks, **options):
        torch.manual_seed(0)
        module = Module("SGD", "exponential")
        trainer = L.Trainer(callbacks=[*callbacks, Unfreezes()], max_epochs=2, **options, **QUIET)
        trainer.fit(module, DataLoader(batches(), batch_size=None))
        return module.head.bias

    assert torch.equal(bias(MemSave(optimizer_state=RELEASE)), bias())
    with pytest.raises(RuntimeError, match="unfrozen during the run and stepped without clipping"):
        bias(MemSave(optimizer_state=RELEASE), gradient_clip_val=0.002, gradient_clip_algorithm="value")


def train(memsave, *, epochs=2, ckpt=None, callbacks=()):
    torch.manual_seed(0)
    module = Module()
    trainer = L.Trainer(callbacks=[memsave, *callbacks] if memsave else [*callbacks], max_epochs=epochs, **QUIET)
    trainer.fit(module, DataLoader(batches(), batch_size=None), ckpt_path=ckpt)
    return trainer, module


@pytest.mark.parametrize("state", [RELEASE, RELEASE_8BIT, RELEASE_4BIT])
@pytest.mark.parametrize("precision", [None, "bf16-sr"])
def test_resume_is_bit_equal_and_plain_lightning_goes_on(state, precision, tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "four.ckpt")

    def memsave():
        return MemSave(optimizer_state=state, precision=precision)

    _, straight = train(memsave(), epochs=3, callbacks=[Save()])
    trainer, resumed = train(memsave(), epochs=3, ckpt=tmp_path / "four.ckpt")
    assert trainer.global_step == 12
    assert trainer.optimizers[0].param_groups[0]["lr"] != OPTIMIZERS["AdamW"](resumed.parameters()).defaults["lr"]
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    _, plain = train(None, epochs=3, ckpt=tmp_path / "four.ckpt")
    for name, value in plain.state_dict().items():
        if state is RELEASE and precision is None:
            assert torch.equal(value, resumed.state_dict()[name]), name
        assert value.isfinite().all()


def test_the_model_is_given_back():
    _, module = train(MemSave(optimizer_state=RELEASE))
    nn.functional.cross_entropy(module.head(module.net(batches()[0][0])), batches()[0][1]).backward()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)


def test_one_gradient_at_a_time():
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    x, one = torch.randn(1, 64), 4 * 64 * 64
    peaks = []
    for config in (None, RELEASE):
        twin = copy.deepcopy(model)
        optimizer = torch.optim.SGD(twin.parameters(), 0.1)
        if config:
            apply_optimizer_state(optimizer, config, twin)
        with Ledger().watching(twin, [optimizer]) as ledger:
            twin(x).sum().backward()
            optimizer.step()
        peaks.append(ledger.measurement.peak_bytes - ledger.measurement.held_bytes)
    assert peaks[0] > 6 * one
    assert peaks[1] < 3 * one


# ------------------------------------------------------------------------------- plain torch
def test_plain_torch_and_undo():
    models = [nn.Linear(4, 4) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in models]
    applied = apply_optimizer_state(optimizers[1], RELEASE, models[1])
    assert applied.loss_class == "exact"
    for step in range(5):
        if step == 3:
            applied.undo()
            applied.undo()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert torch.equal(models[0].weight, models[1].weight)
        assert (models[1].weight.grad is None) == (step < 3)


def test_a_second_backward_before_the_step_is_an_error():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    apply_optimizer_state(optimizer, RELEASE, model)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"A second backward before `optimizer.step\(\)`"):
        model(torch.ones(2, 4)).sum().backward()


def test_an_optimizer_dies_without_the_garbage_collector():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    apply_optimizer_state(optimizer, RELEASE, model).keep()
    gone = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert gone() is None
        model(torch.ones(2, 4)).sum().backward()
    finally:
        gc.enable()


# ------------------------------------------------------------------------------- refused
class ClipsItself(Module):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.1, "value")


class ByHand(Module):
    automatic_optimization = False


@pytest.mark.parametrize(
    ("module", "options", "word"),
    [
        (
            Module,
            {"gradient_clip_val": 1.0},
            "gradient clipping by norm.*the norm is known only after.*two-pass.*algorithm",
        ),
        (Module, {"accumulate_grad_batches": 2}, "accumulate_grad_batches.*keep"),
        (ClipsItself, {}, "configure_gradient_clipping"),
        (ByHand, {}, "manual optimization"),
        (
            Module,
            {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]},
            "fp16 with a GradScaler: an overflow",
        ),
    ],
    ids=["norm", "accumulate", "own clipping", "manual", "scaler"],
)
def test_what_cannot_work_is_refused_by_name(module, options, word):
    trainer = L.Trainer(callbacks=[MemSave(optimizer_state=RELEASE)], max_steps=1, **QUIET, **options)
    with pytest.raises(ValueError, match=f"release.* cannot be combined with {word}"):
        trainer.fit(module(), DataLoader(batches(), batch_size=None))


@pytest.mark.parametrize("microbatch", [2, "auto"])
def test_microbatches_are_refused_at_construction(microbatch):
    with pytest.raises(ValueError, match="each microbatch would be a step of its own"):
        MemSave(optimizer_state=RELEASE, microbatch=microbatch)


@pytest.mark.parametrize("settings", [{"gradients": "drop"}, {"first_moment": "32bit"}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=r"OptimizerState\.gradients|must change something"):
        OptimizerState(**settings)


def test_accumulation_that_begins_later_is_refused_at_once():
    with pytest.raises(ValueError, match="gradient release cannot be combined with accumulate_grad_batches"):
        train(MemSave(optimizer_state=RELEASE), callbacks=[GradientAccumulationScheduler({1: 2})])
    train(MemSave(optimizer_state=RELEASE), callbacks=[GradientAccumulationScheduler({1: 1})])


def test_who_reads_gradients_is_named(info):
    class Reads(Callback):
        def on_after_backward(self, trainer, pl_module):
            pass

    train(MemSave(optimizer_state=RELEASE), callbacks=[Reads()])
    assert "Reads.on_after_backward finds no gradients" in info.text
