"""What users put in the place of Lightning's and torch's own methods acts as in plain Lightning, or is refused."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from torchmetrics import MeanMetric

from lightning_memsave import MemSave, Microbatching, NoEffectWarning, NotLosslessWarning, OptimizerState
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError

RELEASE = OptimizerState(first_moment="32bit", gradients="release")
INTO_STATE = OptimizerState(first_moment="32bit", gradients="into-state")


def samples(num=24):
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(num, 8, generator=generator), torch.randn(num, 1, generator=generator))


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.hooks = []

    def loss(self, batch):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def fit(module, memsave=None, loader=None, **options):
    callbacks = [*([memsave] if memsave else []), *options.pop("callbacks", ())]
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"accelerator": "cpu", "max_epochs": 2, "logger": False, **quiet, **options}
    prepare = options.pop("prepare", lambda trainer: None)
    trainer = L.Trainer(callbacks=callbacks, **options)
    prepare(trainer)
    trainer.fit(module, loader or DataLoader(samples(), 8))
    return module, trainer


def assert_alike(first, second):
    for name, tensor in first[0].state_dict().items():
        torch.testing.assert_close(second[0].state_dict()[name], tensor, msg=lambda text, name=name: f"{name}: {text}")


# ------------------------------------------------------------------------------- zeroing, backward, the loop
class KeepsZeros(torch.optim.SGD):
    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none=False)


class Alternates(Net):
    """Uses each of two heads in every other step: with zeros for gradients, momentum still moves the other one."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        head = self.net if batch_idx % 2 else self.other
        return (head(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return KeepsZeros(self.parameters(), 0.05, momentum=0.9)


@pytest.mark.parametrize("settings", [{}, {"microbatch": 3}])
def test_an_optimizers_own_zero_grad(settings):
    assert_alike(fit(Alternates()), fit(Alternates(), MemSave(**settings)))


class ZeroesEverySecond(Net):
    """Adds the gradients of two batches up, or of one; memory runs out once, in the backward of the third batch."""

    every, left = 2, True

    def training_step(self, batch, batch_idx):
        self.batch_idx = batch_idx
        hidden = self.net[0](batch[0])
        hidden.register_hook(self.run_out)
        return (self.net[1:](hidden) - batch[1]).square().mean()

    def run_out(self, gradient):
        if self.batch_idx == 2 and self.left and self.trainer.callbacks:
            ZeroesEverySecond.left = False  # an attribute of the module would be put back
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % self.every == self.every - 1:
            optimizer.zero_grad()


class ZeroesEach(ZeroesEverySecond):
    every = 1


class KeepsZerosItself(ZeroesEverySecond):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("settings", [{}, {"microbatch": "auto"}], ids=str)
@pytest.mark.parametrize("module", [ZeroesEach, KeepsZerosItself])
def test_a_modules_own_zero_grad_zeroes_in_each_try(module, settings):
    ZeroesEverySecond.left = True
    memsave = MemSave(summary=False, **settings)
    found = fit(module(), memsave, max_epochs=1)
    assert not ZeroesEverySecond.left
    assert_alike(fit(module(), max_epochs=1), found)
    assert memsave.report.loss_class == "exact"


@pytest.mark.parametrize("settings", [{}, {"microbatch": "auto"}], ids=str)
def test_gradients_that_a_modules_own_zero_grad_leaves_are_not_lost_without_a_word(settings):
    ZeroesEverySecond.left = True
    with pytest.raises(OutOfMemoryUnrecoverableError, match="`optimizer_zero_grad` has left gradients"):
        fit(ZeroesEverySecond(), MemSave(summary=False, **settings), max_epochs=1)


class AveragesBeforeZeroing(ZeroesEach):
    """Keeps averages of a weight in a buffer and a list."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(16, 8))
        self.numbers = []

    def on_before_zero_grad(self, optimizer):
        self.average.lerp_(self.net[0].weight.detach(), 0.1)
        self.numbers.append(self.batch_idx)


class AveragesTheModules(L.Callback):
    """The same from outside, and a count of its own."""

    def __init__(self):
        self.num = 0

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        pl_module.average.lerp_(2 * pl_module.net[0].weight.detach(), 0.1)
        self.num += 1


class ReadsGradients(L.Callback):
    def __init__(self):
        self.norms = []

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        gradient = pl_module.net[0].weight.grad
        self.norms.append(0.0 if trainer.global_step == 0 else float(gradient.norm()))


def test_what_a_hook_before_zeroing_does_to_the_module_is_done_once():
    ZeroesEverySecond.left = True
    memsave = MemSave(summary=False)
    reads, plain_reads = ReadsGradients(), ReadsGradients()
    found = fit(AveragesBeforeZeroing(), memsave, max_epochs=1, callbacks=[reads])
    assert not ZeroesEverySecond.left
    plain = fit(AveragesBeforeZeroing(), max_epochs=1, callbacks=[plain_reads])
    assert_alike(plain, found)
    assert found[0].numbers == plain[0].numbers == [0, 1, 2]
    assert reads.norms == pytest.approx(plain_reads.norms)
    assert memsave.report.loss_class == "exact"


def test_a_callbacks_hook_before_zeroing_that_runs_twice_is_in_the_loss_class():
    ZeroesEverySecond.left = True
    memsave, callback = MemSave(summary=False), AveragesTheModules()
    with pytest.warns(NotLosslessWarning, match=r"calls once more `AveragesTheModules\.on_before_zero_grad`"):
        found = fit(AveragesBeforeZeroing(), memsave, max_epochs=1, callbacks=[callback])
    assert_alike(fit(AveragesBeforeZeroing(), max_epochs=1, callbacks=[AveragesTheModules()]), found)
    assert callback.num == 4
    assert memsave.report.loss_class == "changed"


class Scales(SingleDeviceStrategy):
    def backward(self, closure_loss, *args, **kwargs):
        return super().backward(3 * closure_loss, *args, **kwargs)


@pytest.mark.parametrize("settings", [{}, {"microbatch": 3}])
def test_a_strategys_own_backward(settings):
    options = {"accelerator": "auto"}
    plain = fit(Net(), strategy=Scales("cpu"), **options)
    assert_alike(plain, fit(Net(), MemSave(**settings), strategy=Scales("cpu"), **options))


class Doubles(_AutomaticOptimization):
    def _training_step(self, kwargs):
        result = super()._training_step(kwargs)
        result.closure_loss = 2 * result.closure_loss
        return result


def _own_loop(trainer):
    trainer.fit_loop.epoch_loop.automatic_optimization = Doubles(trainer)


def test_a_loop_of_somebodys_own_stays_and_microbatches_are_refused():
    assert_alike(fit(Net(), prepare=_own_loop), fit(Net(), MemSave(), prepare=_own_loop))
    with pytest.raises(ValueError, match="microbatching cannot be combined with an unknown training loop"):
        fit(Net(), MemSave(microbatch=3), prepare=_own_loop)


class SkipsTheLast(Net):
    def training_step(self, batch, batch_idx):
        used = batch[0][:, 0] < 9
        return self.loss([each[used] for each in batch]) if used.any() else None

    def on_before_backward(self, loss):
        self.hooks.append("before")

    def on_after_backward(self):
        self.hooks.append("after")


@pytest.mark.filterwarnings("ignore:Microbatches change the result of this model")
def test_hooks_of_backward_run_where_the_last_microbatch_has_no_loss():
    data = samples(8)
    data.tensors[0][4:, 0] = 9.0
    runs = [
        fit(SkipsTheLast(), memsave, DataLoader(data, 8))[0]
        for memsave in (None, MemSave(microbatch=Microbatching(size=4, reduction="mean")))
    ]
    assert runs[0].hooks == runs[1].hooks == ["before", "after"] * 2


# ------------------------------------------------------------------------------- gradients that end in backward
class Saliency(L.Callback):
    """Runs a backward of its own where a run may: none of these is a step."""

    def _look(self, module):
        x, y = samples(8).tensors
        with torch.inference_mode(False), torch.enable_grad():
            x = x.clone().requires_grad_()
            module.loss((x, y.clone())).backward()
        assert x.grad is not None

    def on_train_epoch_start(self, trainer, pl_module):
        self._look(pl_module)

    def on_train_end(self, trainer, pl_module):
        self._look(pl_module)


class Attacks(Net):
    """A backward inside of the step, whose gradients of weights Lightning drops."""

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        self.loss((x, batch[1])).backward()
        return self.loss((batch[0] + 0.01 * x.grad.sign(), batch[1]))


@pytest.mark.parametrize("state", [RELEASE, INTO_STATE], ids=["release", "into-state"])
@pytest.mark.parametrize(("kind", "callbacks"), [(Net, [Saliency]), (Attacks, [])])
def test_gradients_of_another_backward_are_left_alone(state, kind, callbacks):
    plain = fit(kind(), callbacks=[each() for each in callbacks])
    memsave = MemSave(optimizer_state=state, microbatch=False)
    assert_alike(plain, fit(kind(), memsave, callbacks=[each() for each in callbacks]))
    assert memsave.report.loss_class == "exact"


class AttacksByAnother(Attacks):
    """The attack also reaches weights that the loss does not."""

    def __init__(self):
        super().__init__()
        self.critic = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x = batch[0].clone().requires_grad_()
        self.critic(x).square().sum().backward()
        return self.loss((batch[0] + 0.01 * x.grad.sign(), batch[1]))


def test_the_norm_of_two_passes_is_of_the_runs_own_gradients():
    clipped = {"gradient_clip_val": 0.1}
    state = OptimizerState(first_moment="32bit", gradients="release", norm_clipping="two-pass")
    assert_alike(
        fit(AttacksByAnother(), **clipped),
        fit(AttacksByAnother(), MemSave(optimizer_state=state, microbatch=False), **clipped),
    )


class Clips(Precision):
    def clip_gradients(self, optimizer, *args, **kwargs):
        for p in self.main_params(optimizer):
            p.grad.clamp_(-0.01, 0.01)


class Shrinks(SingleDeviceStrategy):
    def post_backward(self, closure_loss):
        for p in self.lightning_module.parameters():
            p.grad.mul_(0.3)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"plugins": [Clips()]}, "Clips.clip_gradients"),
        ({"strategy": Shrinks("cpu"), "accelerator": "auto"}, "Shrinks.post_backward"),
    ],
)
def test_what_uses_gradients_after_backward_is_refused(options, name):
    with pytest.raises(ValueError, match=rf"`OptimizerState.gradients` cannot end gradients in backward.*{name}"):
        fit(Net(), MemSave(optimizer_state=RELEASE), **options)


class Halves(L.Callback):
    def on_after_backward(self, trainer, pl_module):
        for p in pl_module.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class FreezesARow(L.Callback):
    def on_after_backward(self, trainer, pl_module):
        for p in pl_module.parameters():
            if p.grad is not None:
                p.grad[:1] = 0


class HalvesElsewhere(Halves):
    def on_after_backward(self, trainer, pl_module):
        self._halve(pl_module)

    def _halve(self, module):
        for p in module.parameters():
            p.grad = None if p.grad is None else p.grad / 2


class Norms(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.norms = [p.grad.norm() for p in pl_module.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("callback", "loss_class"),
    [(Halves, "changed"), (FreezesARow, "changed"), (HalvesElsewhere, "changed"), (Norms, "exact")],
)
def test_hooks_that_may_change_gradients_are_in_the_loss_class(callback, loss_class):
    memsave = MemSave(optimizer_state=RELEASE)
    fit(Net(), memsave, callbacks=[callback()])
    assert memsave.report.loss_class == loss_class


class Clamped(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: [p.clamp_(-1, 1) for p in self.parameters() if p.grad is not None])
        return optimizer


def test_hooks_of_an_optimizer_that_look_for_gradients_are_in_the_loss_class():
    memsave = MemSave(optimizer_state=RELEASE)
    fit(Clamped(), memsave)
    assert any("a hook of SGD.step finds no gradients" in each for a in memsave.report.applied for each in a.reasons)


def test_a_learning_rate_that_changes_after_backward_is_an_error():
    class Late(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + trainer.global_step)

    with pytest.raises(RuntimeError, match="`lr` of the optimizer was changed between backward and"):
        fit(Net(), MemSave(optimizer_state=RELEASE), callbacks=[Late()])


class Decays(Net):
    """By a hook of the optimizer's step, for the next one."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda o, *_: o.param_groups[0].update(lr=0.9 * o.param_groups[0]["lr"]))
        return optimizer


def test_a_learning_rate_that_changes_after_the_step_is_none():
    assert_alike(fit(Decays()), fit(Decays(), MemSave(optimizer_state=RELEASE)))


def test_a_learning_rate_in_a_tensor_is_watched():
    class Tensors(Net):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), torch.tensor(1e-2), foreach=False)

    class Late(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            optimizer.param_groups[0]["lr"].mul_(0.5)

    assert_alike(fit(Tensors()), fit(Tensors(), MemSave(optimizer_state=RELEASE)))
    with pytest.raises(RuntimeError, match="`lr` of the optimizer was changed between backward and"):
        fit(Tensors(), MemSave(optimizer_state=RELEASE), callbacks=[Late()])


@pytest.mark.parametrize("state", [RELEASE, INTO_STATE], ids=["release", "into-state"])
def test_an_optimizer_that_is_replaced_is_an_error(state):
    class Replaces(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                trainer.strategy.optimizers = [pl_module.configure_optimizers()]

    with pytest.raises(RuntimeError, match="SGD has taken the place of another optimizer"):
        fit(Net(), MemSave(optimizer_state=state, microbatch=False), callbacks=[Replaces()])


# ------------------------------------------------------------------------------- what regions cannot hold
class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.mean = nn.Linear(8, 8), MeanMetric()

    def forward(self, x):
        out = self.linear(x).tanh()
        self.mean.update(out.detach().mean())
        return out


class CountsInBlocks(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Counted(), Counted(), Counted(), nn.Linear(8, 1))


def test_a_recipes_regions_step_aside_where_a_block_cannot_be_one(info):
    plain = fit(CountsInBlocks())
    memsave = MemSave("exact")
    ours = fit(CountsInBlocks(), memsave)
    assert_alike(plain, ours)
    assert all(a.mean.compute() == b.mean.compute() for a, b in zip(plain[0].net[:3], ours[0].net[:3], strict=True))
    assert "the model cannot be run that way; run again without" in info.text
    assert "checkpointing" not in [applied.technique for applied in memsave.report.applied]
    with pytest.raises(ValueError, match="`checkpointing` must not select a module that changes an attribute"):
        fit(CountsInBlocks(), MemSave(checkpointing="blocks"))


# ------------------------------------------------------------------------------- logs and samplers
class Logs(nn.Sequential):
    def forward(self, x):
        out = super().forward(x)
        self.owner[0].log("mean", out.mean(), on_step=False, on_epoch=True)
        return out


class LogsInside(Net):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Logs(*self.net[:2]), self.net[2])
        self.net[0].owner = (self,)


def test_modules_that_log_do_not_run_in_tiles():
    _, plain = fit(LogsInside())
    with pytest.warns(NoEffectWarning, match=r"LogsInsideError: `self.log` in it would log each tile") as caught:
        _, ours = fit(LogsInside(), MemSave(tiling="samples"))
    assert ours.callback_metrics["mean"] == plain.callback_metrics["mean"]
    assert sum(issubclass(each.category, NoEffectWarning) for each in caught) == 1


class Counts(Sampler):
    """Another order for each time that it is asked."""

    def __init__(self):
        self.num_asked = 0

    def __len__(self):
        return 24

    def __iter__(self):
        self.num_asked += 1
        return iter(torch.randperm(24, generator=torch.Generator().manual_seed(self.num_asked)).tolist())


def test_a_budget_reads_a_batch_and_a_sampler_counts_as_before():
    runs = [
        fit(Net(), memsave, DataLoader(samples(), 8, sampler=Counts())) for memsave in (None, MemSave(budget="1MiB"))
    ]
    assert_alike(*runs)
    assert runs[1][1].train_dataloader.sampler.num_asked == 2
