"""Low precision through real trainers."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import LowPrecision, MemSave, OptimizerState

FORMATS = ("bf16-sr", "bf16+8", "bf16-kahan")
every_format = pytest.mark.parametrize("weight_format", FORMATS)
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 2))
        self.register_buffer("scale", torch.full((2,), 1.001))
        self.lr, self.seen, self.losses = lr, set(), []

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.net(x)
        self.seen.add((x.dtype, y.dtype, hidden.dtype, (hidden * self.scale).dtype))
        loss = F.mse_loss(hidden * self.scale, y)
        self.losses.append(loss.item())
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        self.seen.add(("validation", self.net(batch[0]).dtype))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


def loader():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 6, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :2].sin() + x[:, 2:4] ** 2), batch_size=16)


def fit(memsave, module=None, *, callbacks=(), ckpt=None, epochs=2, **options):
    torch.manual_seed(0)
    module = module or Net()
    settings = {"enable_checkpointing": False, "max_epochs": epochs, **QUIET, **options}
    trainer = L.Trainer(callbacks=[*([memsave] if memsave else []), *callbacks], **settings)
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt)
    return trainer, module


class During(Callback):
    """What holds while it trains."""

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.parameters = {name: p.dtype for name, p in pl_module.named_parameters()}
        self.gradients = {p.grad.dtype for p in pl_module.parameters()}
        self.buffers = {name: b.dtype for name, b in pl_module.named_buffers() if "correction" not in name}
        self.plugin = trainer.precision_plugin


@every_format
def test_inputs_targets_and_buffers_stay_and_weights_come_back(weight_format):
    during = During()
    trainer, module = fit(MemSave(precision=weight_format), callbacks=[during])
    is_norm = {name: name.startswith("net.1") for name in during.parameters}
    assert during.parameters == {n: torch.float32 if norm else torch.bfloat16 for n, norm in is_norm.items()}
    assert during.gradients == {torch.bfloat16, torch.float32}
    assert set(during.buffers.values()) == {torch.float32, torch.int64}
    assert module.seen == {
        (torch.float32, torch.float32, torch.bfloat16, torch.float32),
        ("validation", torch.bfloat16),
    }
    assert during.plugin.precision == "bf16-mixed"
    assert trainer.precision_plugin.precision == "32-true"
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert not any("correction" in name for name, _ in module.named_buffers())
    assert int(module.net[1].num_batches_tracked) == 12


@pytest.mark.parametrize("precision", ["bf16-true", "64-true", "16-true"])
def test_another_precision_of_the_trainer_is_refused_by_name(precision):
    with pytest.raises(ValueError, match=rf"Trainer\(precision='{precision}'\)"):
        fit(MemSave(precision="bf16-sr"), precision=precision)


def test_lightnings_own_bf16_mixed_is_kept():
    class Same(Callback):
        def on_train_start(self, trainer, pl_module):
            assert trainer.precision_plugin is plugin

    trainer = L.Trainer(
        precision="bf16-mixed",
        callbacks=[MemSave(precision="bf16-sr"), Same()],
        max_steps=1,
        enable_checkpointing=False,
        **QUIET,
    )
    plugin = trainer.precision_plugin
    trainer.fit(Net(), loader(), loader())
    assert trainer.precision_plugin is plugin


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 3}, {"strategy": "memsave"}],
    ids=["plain", "clip", "accumulate", "strategy"],
)
@every_format
def test_training_is_as_in_float32(weight_format, options):
    _, expected = fit(None, epochs=6, **options)
    memsave = MemSave(precision=weight_format)
    _, found = fit(memsave, epochs=6, **options)
    ours, plain = (sum(m.losses[-6:]) for m in (found, expected))
    assert ours == pytest.approx(plain, rel=0.02)
    assert plain < 0.95 * sum(expected.losses[:6])
    assert memsave.report.loss_class == "changed"
    assert "bfloat16" in memsave.report.loss_class_reasons[0]


class SaveAt(Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("optimizer_state", [False, "8bit", "4bit"])
@every_format
def test_a_checkpoint_in_the_middle_resumes_bit_for_bit_and_loads_without(weight_format, optimizer_state, tmp_path):
    path = tmp_path / "middle.ckpt"
    state = OptimizerState(format=optimizer_state, min_size=1000) if optimizer_state else False

    def memsave():
        return MemSave(precision=LowPrecision(format=weight_format, seed=5), optimizer_state=state)

    _, straight = fit(memsave(), epochs=4, callbacks=[SaveAt(path, 12)])
    _, resumed = fit(memsave(), epochs=4, ckpt=path)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    saved = torch.load(path, weights_only=True)
    expected = torch.float32 if weight_format != "bf16-sr" else torch.bfloat16
    assert saved["state_dict"]["net.0.weight"].dtype == expected
    assert list(saved["state_dict"]) == list(Net().state_dict())
    Net().load_state_dict(saved["state_dict"])
    _, plain = fit(None, epochs=4, ckpt=path)
    assert sum(plain.losses[-6:]) == pytest.approx(sum(resumed.losses[-6:]), rel=0.05)


@every_format
def test_a_plain_checkpoint_is_taken_up(weight_format, tmp_path):
    fit(None, callbacks=[SaveAt(tmp_path / "plain.ckpt", 12)])
    _, plain = fit(None, epochs=4, ckpt=tmp_path / "plain.ckpt")
    _, ours = fit(MemSave(precision=weight_format), epochs=4, ckpt=tmp_path / "plain.ckpt")
    assert sum(ours.losses[-6:]) == pytest.approx(sum(plain.losses[-6:]), rel=0.02)


def test_manual_optimization():
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    (_, ours), (_, plain) = fit(MemSave(precision="bf16+8"), Manual(), epochs=4), fit(None, Manual(), epochs=4)
    assert sum(ours.losses[-6:]) == pytest.approx(sum(plain.losses[-6:]), rel=0.02)


ZOO = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ConvTranspose1d(4, 1, 1)
    ),
    "gru": lambda: nn.GRU(6, 6, batch_first=True),
    "rnn": lambda: nn.RNN(6, 6, batch_first=True),
    "lstm cell": lambda: nn.LSTMCell(6, 6),
    "transformer": lambda: nn.TransformerEncoderLayer(6, 2, 12, batch_first=True),
    "attention": lambda: nn.MultiheadAttention(6, 2, batch_first=True),
    "prelu": lambda: nn.Sequential(nn.PReLU(), nn.RMSNorm(6), nn.InstanceNorm1d(1, affine=True)),
    "bilinear": lambda: nn.Bilinear(6, 6, 6),
    "embedding bag": lambda: nn.EmbeddingBag(9, 6),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's RMSNorm under autocast
@pytest.mark.parametrize("kind", ZOO)
def test_any_module_computes(kind):
    class Any(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(6, 6), ZOO[kind]()

        def training_step(self, batch, batch_idx):
            x = self.first(batch[0])[:, None]
            match kind:
                case "bilinear":
                    x = self.inner(x, x)
                case "attention":
                    x = self.inner(x, x, x)
                case "lstm cell":
                    x = self.inner(x[:, 0])
                case "embedding bag":
                    x = x + self.inner(torch.arange(len(x))[:, None] % 9)[:, None]
                case _:
                    x = self.inner(x)
            return (x[0] if isinstance(x, tuple) else x).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    module = Any()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    trainer = L.Trainer(callbacks=[MemSave(precision="bf16+8")], max_steps=2, enable_checkpointing=False, **QUIET)
    trainer.fit(module, loader())
    assert all(p.isfinite().all() for p in module.parameters())
    moved = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert "first.weight" in moved
    assert any(name.startswith("inner") for name in moved)


def test_a_batch_that_runs_out_of_memory_is_run_again():
    class Full(Net):
        failed = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2 and not self.failed:
                Full.failed = True
                raise torch.OutOfMemoryError("out of memory, on purpose")
            return loss

    torch.manual_seed(0)
    memsave = MemSave("measure", precision="bf16+8", microbatch="auto", activations=False, checkpointing=False)
    full = Full()
    fit(memsave, full)
    assert memsave.report.num_oom_recovered == 1
    assert all(p.isfinite().all() for p in full.parameters())


def loss_of(module):
    with torch.no_grad():
        return sum(F.mse_loss(module.net(x) * module.scale, y).item() for x, y in loader())


@pytest.mark.parametrize("state", [False, "8bit", "4bit", OptimizerState(format="32bit", gradients="release")])
@pytest.mark.parametrize(
    "average", [lambda: EMAWeightAveraging(decay=0.9), lambda: StochasticWeightAveraging(1e-3, swa_epoch_start=2)]
)
def test_averages_of_weights(average, state):
    _, expected = fit(None, callbacks=[average()], epochs=4)
    _, found = fit(MemSave(precision="bf16-sr", optimizer_state=state), callbacks=[average()], epochs=4)
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert loss_of(found) == pytest.approx(loss_of(expected), rel=0.03)


def test_an_average_of_weights_and_corrections_is_refused():
    with pytest.raises(ValueError, match="which EMAWeightAveraging cannot average"):
        fit(MemSave(precision="bf16+8"), callbacks=[EMAWeightAveraging()])


def test_a_run_that_fails_gives_the_module_back():
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise KeyError("on purpose")

    module = Fails()
    with pytest.raises(KeyError, match="on purpose"):
        fit(MemSave(precision="bf16+8"), module)
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_a_second_fit_starts_again():
    memsave, module = MemSave(precision="bf16+8"), Net()
    fit(memsave, module)
    during = During()
    fit(memsave, module, callbacks=[during])
    assert during.parameters["net.0.weight"] == torch.bfloat16
    assert module.net[0].weight.dtype == torch.float32
