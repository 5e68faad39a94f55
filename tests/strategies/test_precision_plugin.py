"""Low precision through real trainers."""

from __future__ import annotations

import copy

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelPruning, StochasticWeightAveraging
from torch import nn
from torch.optim.swa_utils import get_swa_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import Ledger, LowPrecision, MemSave, OptimizerState
from lightning_memsave.techniques.optimizer_state.state_config import FORMATS as BY_NAME
from tests.harness import EMAWeightAveraging, WeightAveraging

FORMATS = ("bf16-sr", "bf16+8", "bf16-kahan", "int8-sr", "fp16-scaled")
WITH_CORRECTION = ("bf16+8", "bf16-kahan")
DTYPES = {name: torch.float16 if name == "fp16-scaled" else torch.bfloat16 for name in FORMATS}
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
    is_norm, short = {name: name.startswith("net.1") for name in during.parameters}, DTYPES[weight_format]
    expected = {n: torch.float32 if norm else short for n, norm in is_norm.items()}
    assert during.parameters == expected
    assert during.gradients == {short, torch.float32}
    assert set(during.buffers.values()) == {torch.float32, torch.int64}
    assert module.seen == {
        (torch.float32, torch.float32, short, torch.float32),
        ("validation", short),
    }
    assert during.plugin.precision == ("16-mixed" if weight_format == "fp16-scaled" else "bf16-mixed")
    assert trainer.precision_plugin.precision == "32-true"
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert not any("correction" in name for name, _ in module.named_buffers())
    assert int(module.net[1].num_batches_tracked) == 12


@pytest.mark.parametrize(
    ("weight_format", "precision"),
    [*(("bf16-sr", p) for p in ("bf16-true", "64-true", "16-true")), ("fp16-scaled", "bf16-mixed")],
)
def test_another_precision_of_the_trainer_is_refused_by_name(weight_format, precision):
    with pytest.raises(ValueError, match=rf"Trainer\(precision='{precision}'\)"):
        fit(MemSave(precision=weight_format), precision=precision)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true", "64-true"])
def test_lightnings_own_precisions_pass_through(precision):
    """Without `precision` of ours the trainer's is left alone: the same bits as without the callback."""

    class Own(Net):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return (self.net(x).float() - y.float()).square().mean()

        def validation_step(self, batch, batch_idx):
            pass

    start = Own()
    (_, plain), (trainer, ours) = (
        fit(memsave, copy.deepcopy(start), precision=precision, epochs=1) for memsave in (None, MemSave())
    )
    assert trainer.precision == precision
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert p.dtype == q.dtype
        assert torch.equal(p.nan_to_num(), q.nan_to_num()), name


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
    assert str(DTYPES[weight_format]).removeprefix("torch.") in memsave.report.loss_class_reasons[0]


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
    state = OptimizerState(**BY_NAME[optimizer_state], min_size=1000) if optimizer_state else False

    def memsave():
        return MemSave(precision=LowPrecision(format=weight_format, seed=5), optimizer_state=state)

    _, straight = fit(memsave(), epochs=4, callbacks=[SaveAt(path, 12)])
    _, resumed = fit(memsave(), epochs=4, ckpt=path)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    saved = torch.load(path, weights_only=True)
    expected = torch.float32 if weight_format in WITH_CORRECTION else DTYPES[weight_format]
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


@pytest.mark.parametrize("weight_format", ["bf16+8", "fp16-scaled"])
def test_manual_optimization(weight_format):
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    (_, ours), (_, plain) = fit(MemSave(precision=weight_format), Manual(), epochs=4), fit(None, Manual(), epochs=4)
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


AVERAGES = {
    "EMA": lambda: EMAWeightAveraging(decay=0.9),
    "SWA": lambda: StochasticWeightAveraging(1e-3, swa_epoch_start=2),
}


@pytest.mark.parametrize(
    ("average", "weight_format", "state"),
    [
        *(("SWA", weight_format, False) for weight_format in FORMATS if weight_format != "int8-sr"),
        *(("EMA", weight_format, False) for weight_format in ("bf16-sr", "fp16-scaled")),
        *((average, "bf16-sr", state) for average in AVERAGES for state in ("8bit", "4bit")),
        ("EMA", "bf16-sr", "release"),
        *((average, "fp16-scaled", "8bit") for average in AVERAGES),
    ],
)
def test_averages_of_weights(average, weight_format, state):
    optimizer_state = OptimizerState(first_moment="32bit", gradients="release") if state == "release" else state
    _, expected = fit(None, callbacks=[AVERAGES[average]()], epochs=4)
    memsave = MemSave(precision=weight_format, optimizer_state=optimizer_state)
    _, found = fit(memsave, callbacks=[AVERAGES[average]()], epochs=4)
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert loss_of(found) == pytest.approx(loss_of(expected), rel=0.03)


def test_stochastic_weight_averaging_of_batchnorm_wants_gradients_kept():
    """Lightning's epoch for the statistics steps with what the last batch has left."""
    released = OptimizerState(first_moment="32bit", gradients="release")
    with pytest.raises(ValueError, match=r"gradient release.*stochastic weight averaging of BatchNorm"):
        fit(MemSave(optimizer_state=released), callbacks=[AVERAGES["SWA"]()], epochs=4)


@pytest.mark.parametrize("weight_format", WITH_CORRECTION)
def test_callbacks_that_do_not_know_corrections_are_refused(weight_format):
    for callback in (EMAWeightAveraging(), ModelPruning("l1_unstructured", amount=0.5)):
        with pytest.raises(ValueError, match=f"which {type(callback).__name__} does not know.*bf16-sr"):
            fit(MemSave(precision=weight_format), callbacks=[callback])


@pytest.mark.parametrize("callback", [*AVERAGES.values(), lambda: ModelPruning("l1_unstructured", amount=0.5)])
def test_callbacks_that_compute_with_weights_are_refused_where_these_are_codes(callback):
    with pytest.raises(ValueError, match=r"keeps weights as codes, which .* cannot compute with"):
        fit(MemSave(precision="int8-sr"), callbacks=[callback()])


def test_an_average_that_torch_cannot_add_to_is_refused_and_the_way_out_works():
    with pytest.raises(ValueError, match="which WeightAveraging cannot add to its own of 32 bits"):
        fit(MemSave(precision="fp16-scaled"), callbacks=[WeightAveraging()])
    fit(MemSave(precision="fp16-scaled"), callbacks=[WeightAveraging(avg_fn=get_swa_avg_fn())])
    fit(MemSave(precision="bf16-sr"), callbacks=[WeightAveraging()])


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


# ------------------------------------------------------------------------------- loss scaling
class Overflows(Net):
    """Its loss overflows float16 in one batch, so that gradients of that step are infinite."""

    at = 5

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (1e8 if self.global_step == self.at else 1.0)


SCALED = LowPrecision(format="fp16-scaled", initial_scale=2.0**10)  # small enough for these losses


class Steps(Callback):
    """Weights and scale after each batch, and what was logged of it."""

    def __init__(self):
        self.weights, self.scales, self.logged = [], [], []

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.weights.append(pl_module.net[3].weight.detach().clone())
        self.scales.append(trainer.precision_plugin.scaler.factor)
        self.logged.append(trainer.callback_metrics.get("memsave/num_steps_skipped"))


@pytest.mark.parametrize("microbatch", [False, 4])
def test_an_overflow_skips_the_step_and_training_goes_on(microbatch):
    steps = Steps()
    memsave = MemSave("measure", precision=SCALED, microbatch=microbatch)
    module = Overflows()
    module.net[1] = nn.Identity()
    _, module = fit(memsave, module, callbacks=[steps])
    assert torch.equal(steps.weights[5], steps.weights[4])
    assert not torch.equal(steps.weights[6], steps.weights[5])
    assert steps.scales[4] == 2.0**10
    assert steps.scales[5] == 2.0**9
    assert all(p.isfinite().all() for p in module.parameters())
    assert float(steps.logged[-1]) == 1


def test_the_momentum_of_a_fit_with_short_weights_is_long_again_in_the_next_one():
    class Keeps(Net):
        def configure_optimizers(self):
            if not hasattr(self, "kept"):
                self.kept = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
            return self.kept

    _, module = fit(MemSave("measure", precision=SCALED), Keeps())
    assert {state["momentum_buffer"].dtype for state in module.kept.state.values()} == {torch.float16, torch.float32}
    fit(MemSave("measure"), module)
    assert {state["momentum_buffer"].dtype for state in module.kept.state.values()} == {torch.float32}


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_as_in_float32(algorithm):
    """A step of SGD is as long as its gradient: clipped, both runs have moved equally far."""

    class Plain(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.5)

    options = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm, "epochs": 1}
    torch.manual_seed(0)
    start = Plain().net[3].weight.detach().clone()
    moved = []
    for memsave in (None, MemSave(precision="fp16-scaled")):
        _, module = fit(memsave, Plain(), **options)
        moved.append((module.net[3].weight.detach() - start).norm())
    assert float(moved[1]) == pytest.approx(float(moved[0]), rel=0.05)


def test_microbatches_accumulate_in_float16_to_what_the_whole_batch_gives():
    runs, start = [], Net()
    start.net[1] = nn.Identity()
    for microbatch in (False, 4):
        _, module = fit(MemSave("measure", precision=SCALED, microbatch=microbatch), copy.deepcopy(start))
        runs.append(module.losses)
    assert runs[0][-1] == pytest.approx(sum(runs[1][-4:]) / 4, rel=0.02)


def test_the_scale_is_saved_under_lightnings_name_and_resumed(tmp_path):
    path, steps = tmp_path / "middle.ckpt", Steps()
    fit(MemSave(precision=SCALED), Overflows(), callbacks=[SaveAt(path, 6)])
    saved = torch.load(path, weights_only=True)
    assert saved["MixedPrecision"]["scale"] == 2.0**9
    assert saved["MixedPrecision"].keys() == torch.amp.GradScaler("cpu").state_dict().keys()
    module = Overflows()
    module.at = -1
    fit(MemSave(precision=SCALED), module, callbacks=[steps], ckpt=path)
    assert steps.scales[0] == 2.0**9


def test_release_of_gradients_is_refused():
    state = OptimizerState(first_moment="32bit", gradients="release")
    with pytest.raises(ValueError, match="gradient release cannot be combined with loss scaling"):
        MemSave(precision="fp16-scaled", optimizer_state=state)


@pytest.mark.parametrize("precision", ["bf16-sr", "bf16+8", "fp16-scaled"])
def test_modules_that_stay_float32_under_lightning(precision):
    during = During()
    fit(MemSave(precision=LowPrecision(format=precision, keep_32bit=("net.4",))), callbacks=[during])
    kept = {name for name, dtype in during.parameters.items() if dtype == torch.float32}
    assert kept == {"net.1.weight", "net.1.bias", "net.4.weight", "net.4.bias"}


# ------------------------------------------------------------------------------- what writing and reading takes
class Saves(Callback):
    """What writing a checkpoint takes beyond what is held already."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == 3:
            optimizer = trainer.optimizers[0]
            with Ledger().watching(pl_module, [optimizer]) as ledger:
                trainer.save_checkpoint(self.path)
            self.extra = ledger.measurement.peak_bytes - ledger.measurement.held_bytes


@every_format
def test_a_checkpoint_takes_no_memory_but_float32_weights_where_they_are_made(weight_format, tmp_path):
    saves, memsave, module = Saves(tmp_path / "last.ckpt"), MemSave(precision=weight_format), Net()
    fit(memsave, module, callbacks=[saves])
    lowered = [p.numel() for name, p in module.named_parameters() if not name.startswith("net.1")]
    if weight_format in WITH_CORRECTION:
        # Each weight as float32; while the last is made, its correction in the width of the sum.
        assert 4 * sum(lowered) <= saves.extra <= 4 * sum(lowered) + 16 * max(lowered)
    else:
        assert saves.extra <= 4 * max(lowered)  # less than one parameter
    # Training itself takes more than that: a float32 copy of a parameter, its gradient and what the step needs.
    largest = 4 * max(lowered)
    held = memsave.report.by_category["weights"] + memsave.report.by_category["optimizer_state"]
    if weight_format not in WITH_CORRECTION:
        assert held + saves.extra <= memsave.report.peak_bytes + largest


# ------------------------------------------------------------------------------- bfloat16 gradients of float32 weights
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({}, {"gradient_clip_val": 0.1}),
        ({}, {"accumulate_grad_batches": 3}),
        ({}, {"precision": "bf16-mixed"}),
        ({"microbatch": 4, "recipe": "measure"}, {}),
        ({"microbatch": 4, "recipe": "measure", "checkpointing": "sqrt"}, {}),
        ({"optimizer_state": "8bit"}, {}),
        ({"optimizer_state": OptimizerState(first_moment="32bit", gradients="release"), "recipe": "measure"}, {}),
    ],
)
@pytest.mark.filterwarnings("ignore:Microbatches change the result", "ignore:checkpointing='sqrt' had no effect")
def test_bfloat16_gradients(settings, options):
    start, during = Net(), During()
    start.net[1] = nn.Identity()
    _, expected = fit(None, copy.deepcopy(start), epochs=4, **options)
    memsave = MemSave(precision="bf16-gradients", **settings)
    _, found = fit(
        memsave, copy.deepcopy(start), epochs=4, callbacks=[] if "recipe" in settings else [during], **options
    )
    assert loss_of(found) == pytest.approx(loss_of(expected), rel=0.02)
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    assert memsave.report.loss_class == "changed"
    if "recipe" not in settings:
        assert during.gradients == {torch.bfloat16}
        assert set(during.parameters.values()) == {torch.float32}
        assert during.plugin.precision == options.get("precision", "32-true")


def test_an_error_about_dtypes_names_the_setting():
    class Scatters(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def training_step(self, batch, batch_idx):
            sums = torch.zeros(3, 4)
            return sums.index_add_(0, torch.tensor([0, 1]), self.layer(batch)).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = L.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[MemSave(precision="bf16-sr")],
    )  # fmt: skip
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(Scatters(), torch.utils.data.DataLoader([torch.ones(2, 4)], batch_size=None))
    assert any("MemSave(precision=...)" in note and "keep_32bit" in note for note in raised.value.__notes__)
