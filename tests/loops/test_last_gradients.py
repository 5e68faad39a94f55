"""`on_before_zero_grad` in batches that are cut, beside plain Lightning: it runs between forward and backward."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave, Microbatching, NotLosslessWarning


class Student(L.LightningModule):
    """Learns what a teacher says, which is averaged from it before gradients are zeroed (BYOL)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
        self.teacher = nn.Linear(6, 4).requires_grad_(False)
        self.head = nn.Linear(4, 4)
        self.fails = False

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = F.mse_loss(self.head(self.net(x)), self.teacher(x.flip(1)))
        if self.fails and len(x) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def average(self):
        with torch.no_grad():
            self.teacher.weight.lerp_(self.head.weight @ self.net[2].weight @ self.net[0].weight, 0.3)

    def on_before_zero_grad(self, optimizer):
        self.average()

    def configure_optimizers(self):
        return torch.optim.Adam([*self.net.parameters(), *self.head.parameters()], 1e-2)


class Averages(L.Callback):
    """The same in a callback."""

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        pl_module.average()


class Bare(Student):
    def on_before_zero_grad(self, optimizer):
        pass


class Edits(Student):
    """Scales a teacher by how large the last gradients are, as nobody counts."""

    def on_before_zero_grad(self, optimizer):
        if self.head.weight.grad is not None:
            self.teacher.weight.data.mul_(1 + self.norm())

    def norm(self):
        return self.head.weight.grad.norm()


class Zeroes(Bare):
    """Averages where it zeroes gradients."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)
        self.average()


def train(kind, memsave, callbacks=(), fails=False):
    module = kind()
    module.fails = fails
    generator = torch.Generator().manual_seed(1)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[*callbacks, *([memsave] if memsave else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(40, 6, generator=generator)), batch_size=8))
    return [p.detach() for p in module.parameters()], float(trainer.callback_metrics["loss"])


@pytest.mark.parametrize(("kind", "callbacks"), [(Student, []), (Bare, [Averages()])], ids=["module", "callback"])
@pytest.mark.parametrize("setting", [3, Microbatching(size=2, strict=True), "out of memory"], ids=str)
def test_a_teacher_that_follows_is_seen_by_no_later_microbatch(kind, callbacks, setting):
    fails = setting == "out of memory"
    memsave = MemSave() if fails else MemSave(microbatch=setting)
    plain, plain_loss = train(kind, None, callbacks)
    ours, loss = train(kind, memsave, callbacks, fails)
    assert memsave.report.microbatch_size in (2, 3, 4)
    assert memsave.report.loss_class == "exact"
    assert loss == pytest.approx(plain_loss, abs=1e-6)
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [Edits, Zeroes])
def test_what_is_edited_before_later_microbatches_is_named(kind):
    plain, _ = train(kind, None)
    memsave = MemSave(microbatch=3)
    with pytest.warns(NotLosslessWarning, match=r"changes `teacher.weight`, and later microbatches compute with that"):
        ours, _ = train(kind, memsave)
    assert not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, ours, strict=True))
    assert memsave.report.loss_class == "changed"
    with pytest.raises(ValueError, match=r"changes `teacher.weight`"):
        train(kind, MemSave(microbatch=Microbatching(size=3, strict=True)))


class Norms(L.Callback):
    """Notes how large the last gradients are, by a function of Lightning's."""

    def __init__(self):
        self.seen = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.seen.append(float(grad_norm(pl_module.head, 2).get("grad_2.0_norm_total", 0)))


def test_one_that_reads_gradients_reads_those_of_the_step_before():
    theirs, own, memsave = Norms(), Norms(), MemSave(microbatch=3)
    plain, _ = train(Bare, None, [theirs])
    ours, _ = train(Bare, memsave, [own])
    assert own.seen == pytest.approx(theirs.seen, rel=1e-4)
    assert own.seen[0] == 0.0 < min(own.seen[1:])
    assert memsave.report.loss_class == "exact"
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_hooks_that_are_set_on_an_object_count():
    callback = LambdaCallback(on_before_zero_grad=lambda trainer, module, optimizer: module.average())
    plain, _ = train(Bare, None, [callback])
    memsave = MemSave(microbatch=3)
    ours, _ = train(Bare, memsave, [callback])
    assert memsave.report.loss_class == "exact"
    assert "on_before_zero_grad" in vars(callback)  # as before
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_hook_is_told_the_loss_of_the_batch():
    class Logs(L.Callback):
        def __init__(self):
            self.seen = []

        def on_before_backward(self, trainer, pl_module, loss):
            self.seen.append(loss.item())

    plain, ours, memsave = Logs(), Logs(), MemSave("measure", microbatch=3)
    weights, _ = train(Student, None, [plain])
    others, _ = train(Student, memsave, [ours])
    assert ours.seen == pytest.approx(plain.seen, abs=1e-6)
    assert memsave.report.loss_class == "exact"
    for a, b in zip(weights, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_loss_that_a_hook_is_told_may_be_infinite():
    class Infinite(Student):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + float("inf")

    class Logs(L.Callback):
        seen = None

        def on_before_backward(self, trainer, pl_module, loss):
            self.seen = loss.item()

    plain, ours = Logs(), Logs()
    train(Infinite, None, [plain])
    train(Infinite, MemSave(microbatch=Microbatching(size=3, reduction="mean")), [ours])
    assert plain.seen == ours.seen == float("inf")
