"""`on_before_zero_grad` in batches that are cut, beside plain Lightning: it runs between forward and backward."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
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


class Reads(Student):
    """Averages by how large the last gradients are."""

    def on_before_zero_grad(self, optimizer):
        if self.head.weight.grad is not None:
            self.teacher.weight.data.mul_(1 + self.head.weight.grad.norm())
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


def test_one_that_reads_gradients_runs_before_later_microbatches_and_says_so():
    plain, _ = train(Reads, None)
    memsave = MemSave(microbatch=3)
    with pytest.warns(NotLosslessWarning, match="reads gradients and edits the module"):
        ours, _ = train(Reads, memsave)
    assert not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, ours, strict=True))
    assert memsave.report.loss_class == "changed"
    assert any("`Reads.on_before_zero_grad` reads gradients" in each for each in memsave.report.loss_class_reasons)
    with pytest.raises(ValueError, match=r"on_before_zero_grad` reads gradients and edits the module"):
        train(Reads, MemSave(microbatch=Microbatching(size=3, strict=True)))


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
