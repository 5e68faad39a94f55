"""Gradients that go into the optimizer's state, through real trainers."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import MemSave, OptimizerState
from lightning_memsave.techniques.optimizer_state.quantized import is_quantized
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME
from tests.harness import Net, WeightAveraging, fit

INTO = OptimizerState(first_moment="32bit", gradients="into-state")
INTO_8BIT = OptimizerState(gradients="into-state", min_size=0)
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


class Module(L.LightningModule):
    def __init__(self, build=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01)):
        super().__init__()
        self.net, self._build = Net(), build

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = self._build(self.parameters())
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)}]


class ByHand(Module):
    automatic_optimization = False


class ClipsItself(Module):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, 0.1, "value")


def batches():
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(6, 5, generator=generator), torch.randint(0, 3, (6,), generator=generator)) for _ in range(4)]


def assert_close(plain, ours):
    assert plain.parameters.keys() == ours.parameters.keys()
    for name, value in plain.parameters.items():
        torch.testing.assert_close(ours.parameters[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert plain.step == ours.step


@pytest.mark.parametrize("microbatch", [False, 2, 3])
def test_sgd_equals_plain_lightning_with_any_microbatch(microbatch):
    memsave = MemSave(optimizer_state=INTO, microbatch=microbatch)
    module = Module()
    plain, ours = fit(module, batches()), fit(module, batches(), memsave)
    assert_close(plain, ours)
    assert not any(ours.gradients)
    assert memsave.report.loss_class == "exact"
    assert any("adds its gradients to the moments" in applied.summary for applied in memsave.report.applied)


def test_accumulation_adds_up():
    options, module = {"accumulate_grad_batches": 2}, Module()
    plain = fit(module, batches(), **options)
    assert_close(plain, fit(module, batches(), MemSave(optimizer_state=INTO, microbatch=2), **options))


@pytest.mark.filterwarnings("ignore:checkpointing='sqrt' had no effect")
@pytest.mark.parametrize("settings", [{"activations": "exact"}, {"checkpointing": "sqrt"}], ids=str)
def test_with_what_runs_the_batch_again(settings):
    memsave, module = MemSave(optimizer_state=INTO, microbatch=3, **settings), Module()
    assert_close(fit(module, batches()), fit(module, batches(), memsave))


def test_recovery_by_default_steps_aside():
    memsave = MemSave(optimizer_state=INTO)
    assert memsave.recipe.stems() == ("early_zero_grad", "optimizer_state")
    with pytest.raises(ValueError, match="into-state gradients cannot be combined with out-of-memory recovery"):
        MemSave(optimizer_state=INTO, microbatch="auto")


def train(memsave, *, epochs=2, ckpt=None, callbacks=(), module=None, **options):
    torch.manual_seed(0)
    module = module or Module()
    trainer = L.Trainer(
        callbacks=[*([memsave] if memsave else []), *callbacks], max_epochs=epochs, **{**QUIET, **options}
    )
    trainer.fit(module, DataLoader(batches(), batch_size=None), ckpt_path=ckpt)
    return trainer, module


@pytest.mark.parametrize("state", [INTO, INTO_8BIT], ids=["32bit", "8bit"])
@pytest.mark.parametrize("precision", [None, "bf16-sr"])
def test_resume_is_bit_equal_and_plain_lightning_goes_on(state, precision, tmp_path):
    class Save(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "four.ckpt")

    def memsave():
        return MemSave(optimizer_state=state, precision=precision, microbatch=3)

    _, straight = train(memsave(), epochs=3, callbacks=[Save()])
    _, resumed = train(memsave(), epochs=3, ckpt=tmp_path / "four.ckpt")
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    _, plain = train(None, epochs=3, ckpt=tmp_path / "four.ckpt")
    assert all(value.isfinite().all() for value in plain.state_dict().values())


def test_the_model_is_given_back_and_trains_again():
    memsave = MemSave(optimizer_state=INTO)
    trainer, module = train(memsave)
    assert is_quantized(trainer.optimizers[0])
    nn.functional.cross_entropy(module.net(batches()[0][0]), batches()[0][1]).backward()
    assert all(p.grad is not None for p in module.parameters())
    module.zero_grad()
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, DataLoader(batches(), batch_size=None))
    assert trainer.global_step == 16


@pytest.mark.parametrize("average", [lambda: StochasticWeightAveraging(0.01, 1), WeightAveraging], ids=["swa", "ema"])
@pytest.mark.parametrize(
    "state",
    [*(OptimizerState(**BY_NAME[f], min_size=0) for f in ("8bit", "4bit", "fp8", "offload")), INTO_8BIT],
    ids=str,
)
def test_averages_of_weights(state, average):
    trainer, module = train(MemSave(optimizer_state=state), callbacks=[average()], epochs=3)
    assert trainer.global_step == 12
    assert all(value.isfinite().all() for value in module.state_dict().values())


@pytest.mark.parametrize(
    ("module", "options", "word"),
    [
        (Module, {"gradient_clip_val": 1.0}, "gradient clipping by norm.*the norm is known only after"),
        (Module, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "gradient clipping by value.*the sum"),
        (ClipsItself, {}, "configure_gradient_clipping"),
        (ByHand, {}, "manual optimization"),
        (
            Module,
            {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))]},
            "fp16 with a GradScaler: an overflow",
        ),
    ],
    ids=["norm", "value", "own clipping", "manual", "scaler"],
)
def test_what_cannot_work_is_refused_by_name(module, options, word):
    trainer = L.Trainer(callbacks=[MemSave(optimizer_state=INTO)], max_steps=1, **QUIET, **options)
    with pytest.raises(ValueError, match=f"into-state gradients cannot be combined with {word}"):
        trainer.fit(module(), DataLoader(batches(), batch_size=None))


@pytest.mark.parametrize("written_by", ["8bit", "factored", "4bit-factored", "5bit-factored", "fp8"])
@pytest.mark.parametrize("read_by", [None, "4bit", "offload"])
def test_compact_checkpoints_load_under_any_other_state(written_by, read_by, tmp_path):
    def adamw(p):
        return torch.optim.AdamW(p, 1e-2)

    def state(name):
        checkpoint = "plain" if name == "offload" else "compact"
        return name and MemSave(optimizer_state=OptimizerState(**BY_NAME[name], min_size=0, checkpoint=checkpoint))

    trainer, _ = train(state(written_by), module=Module(adamw))
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)
    assert isinstance(saved["optimizer_states"][0]["state"][0]["exp_avg"], dict)
    trainer, module = train(
        state(read_by) or MemSave("measure"), module=Module(adamw), epochs=4, ckpt=tmp_path / "two.ckpt"
    )
    assert trainer.global_step == 16
    assert all(value.isfinite().all() for value in module.state_dict().values())


class SkipsSteps(BoringModel):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


class SkipsZeroing(BoringModel):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 2:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)


@pytest.mark.parametrize("gradients", ["release", "into-state"])
@pytest.mark.parametrize(("module", "hook"), [(SkipsSteps, "optimizer_step"), (SkipsZeroing, "optimizer_zero_grad")])
def test_hooks_of_stepping_that_would_not_be_asked_are_refused_by_name(module, hook, gradients):
    slots = {"optimizer_state": OptimizerState(first_moment="32bit", gradients=gradients), "microbatch": False}
    trainer = L.Trainer(
        max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[MemSave(**slots)],
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"{hook} of the module"):
        trainer.fit(module())
