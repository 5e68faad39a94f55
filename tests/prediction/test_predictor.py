"""Predicted steps against measured ones: the same bytes, in every category; and what is not known is said."""

import copy
import functools
import json

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from lightning_memsave import (
    Checkpointing,
    LowPrecision,
    MemSave,
    Microbatching,
    OptimizerState,
    Prediction,
    SparseUpdate,
    Sparsity,
    predict,
)
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.prediction.predictor import Predictor, largest_batch
from lightning_memsave.torch_internals.fake_tensors import is_fake
from tests.prediction.prediction_program import BATCH, Module


class Net(L.LightningModule):
    """Convolutions, normalisation, dropout, pooling and a wide head: something for every codec."""

    def __init__(self, optimizer="AdamW", dropout=0.1):
        super().__init__()
        self.body = nn.Sequential(
            *(self.block(channels, 16, dropout) for channels in (3, 16, 16)),
        )
        self.head = nn.Sequential(
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 8 * 8, 256), nn.GELU(), nn.Linear(256, 10)
        )
        self.optimizer = optimizer

    @staticmethod
    def block(before, after, dropout):
        return nn.Sequential(nn.Conv2d(before, after, 3, 1, 1), nn.BatchNorm2d(after), nn.ReLU(), nn.Dropout(dropout))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.head(self.body(images)), labels)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        options = {"momentum": 0.9} if self.optimizer == "SGD" else {}
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=1e-3, **options)


def image_batch(num_samples=48):
    return torch.randn(num_samples, 3, 16, 16), torch.randint(0, 10, (num_samples,))


def measured(module, batch, memsave, **options):
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        callbacks=[memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    num_batches = 3 * options.get("accumulate_grad_batches", 1)
    trainer.fit(copy.deepcopy(module), DataLoader([batch] * num_batches, batch_size=None))
    return memsave.report


UPDATE = SparseUpdate(layers={"body.1.0": 0.5, "head.2": 0.25, "head.4": 1.0})
ONE_BY_ONE = {
    "plain": lambda: MemSave("measure"),
    "lossless": lambda: MemSave(),
    "microbatch": lambda: MemSave(microbatch=5),
    "blocks": lambda: MemSave("measure", checkpointing=Checkpointing(modules="body.*")),
    "sqrt": lambda: MemSave("measure", checkpointing="sqrt"),
    "exact": lambda: MemSave("measure", activations="exact"),
    "int4": lambda: MemSave("measure", activations=["exact", "int4"]),
    "chain": lambda: MemSave("measure", activations="int4-chain"),
    "bf16": lambda: MemSave("measure", activations="bf16"),
    "topk": lambda: MemSave("measure", activations=["topk-0.1", "int4"]),
    "rows": lambda: MemSave("measure", activations=["rows-0.3", "fewbit-3"]),
    "sparsity": lambda: MemSave("measure", sparsity=0.9),
    "very sparse": lambda: MemSave("measure", sparsity=0.97),
    "2:4": lambda: MemSave("measure", sparsity="2:4"),
    "low rank": lambda: MemSave("measure", low_rank=2),
    "low rank, microbatch": lambda: MemSave("measure", low_rank=0.3, microbatch=5, activations=["exact", "int4"]),
    "update": lambda: MemSave("measure", sparse_update=UPDATE),
    "update, microbatch": lambda: MemSave(
        "measure", sparse_update=UPDATE, microbatch=5, activations=["exact", "int4"], precision="bf16+8"
    ),
    "bf16-sr": lambda: MemSave("measure", precision="bf16-sr"),
    "bf16+8": lambda: MemSave("measure", precision="bf16+8"),
    "4bit": lambda: MemSave("measure", optimizer_state="4bit"),
    "release": lambda: MemSave("measure", optimizer_state=OptimizerState(first_moment="32bit", gradients="release")),
}
EVERYTHING = {
    "sparsity": Sparsity(sparsity=0.9),
    "precision": LowPrecision(),
    "microbatch": 4,
    "activations": ["exact", "int4"],
    "checkpointing": "sqrt",
    "optimizer_state": "4bit",
}


@pytest.mark.filterwarnings("ignore::lightning_memsave.NotLosslessWarning", "ignore::lightning_memsave.NoEffectWarning")
@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_prediction_equals_measurement(name):
    module, batch = Net(), image_batch()
    prediction = predict(module, batch, ONE_BY_ONE[name]())
    report = measured(module, batch, ONE_BY_ONE[name]())
    assert prediction.source == "fake"
    assert dict(prediction.by_category) == dict(report.by_category)
    assert prediction.peak_bytes == report.peak_bytes == sum(prediction.by_module.values())


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_codes_of_derivatives_take_what_is_predicted_where_they_are_the_peak(codec):
    prediction = predict(Module(is_sharded=False), BATCH, MemSave(activations=codec))
    report = measured(Module(is_sharded=False), BATCH, MemSave(activations=codec))
    assert dict(prediction.by_category) == dict(report.by_category)


@pytest.mark.parametrize(
    ("num_samples", "size", "settings"),
    [
        (14, 1, {}),
        pytest.param(61, 2, {}, marks=pytest.mark.slow),
        pytest.param(40, 2, {"checkpointing": "blocks"}, marks=pytest.mark.slow),
        (28, 2, {"activations": "int4", "optimizer_state": "8bit"}),
    ],
)
def test_many_microbatches_take_what_a_few_of_them_show(monkeypatch, num_samples, size, settings):
    predictor = Predictor(Net(), image_batch(num_samples))
    recipe = MemSave(microbatch=Microbatching(size=size, batchnorm="ghost"), **settings).recipe
    run, whole_fake = [], Predictor._fake
    monkeypatch.setattr(Predictor, "_fake", lambda self, recipe, num: run.append(num) or whole_fake(self, recipe, num))
    found = predictor(recipe)
    assert 2 <= len(run) <= 3
    assert 2 * sum(run) <= num_samples
    monkeypatch.setattr("lightning_memsave.prediction.predictor.few_of_many", lambda sizes: None)
    whole = predictor(recipe)
    assert found.by_category == whole.by_category
    assert found.by_module == whole.by_module
    assert found.num_operations == whole.num_operations
    assert max(found.timeline.total_bytes) == found.peak_bytes


def test_many_microbatches_on_cuda_take_what_a_few_show_but_for_a_kib_each(monkeypatch):
    predictor = Predictor(Net(), image_batch(40), target="cuda")
    recipe = MemSave(microbatch=2).recipe
    found = predictor(recipe)
    monkeypatch.setattr("lightning_memsave.prediction.predictor.few_of_many", lambda sizes: None)
    whole = predictor(recipe)
    assert found.by_category == whole.by_category
    assert 0 <= whole.cuda.allocated_bytes - found.cuda.allocated_bytes <= 1024 * (20 - 3)  # of 20, three are run
    assert whole.cuda.reserved_bytes == found.cuda.reserved_bytes


def test_a_batch_that_is_not_cut_is_run_whole():
    class ByHand(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    predictor = Predictor(ByHand(), image_batch(40))
    whole, not_cut = predictor(MemSave("measure").recipe), predictor(MemSave("measure", microbatch=2).recipe)
    assert not_cut.by_category == whole.by_category


@pytest.mark.filterwarnings("ignore::lightning_memsave.NotLosslessWarning")
def test_everything_together():
    module, batch = Net(), image_batch()
    prediction = predict(module, batch, MemSave(**EVERYTHING))
    report = measured(module, batch, MemSave(**EVERYTHING))
    assert prediction.source == "fake"
    assert prediction.peak_bytes == pytest.approx(report.peak_bytes, rel=0.01)


def test_8bit_state():
    pytest.importorskip("bitsandbytes")
    module, batch = Net(), image_batch()
    prediction = predict(module, batch, MemSave("measure", optimizer_state="8bit"))
    report = measured(module, batch, MemSave("measure", optimizer_state="8bit"))
    assert prediction.source == "fake"
    assert prediction.peak_bytes == report.peak_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 1.0},
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
    ],
)
def test_settings_of_the_trainer(options):
    module, batch = Net("SGD"), image_batch()
    prediction = predict(module, batch, MemSave(), **options)
    report = measured(module, batch, MemSave(), **options)
    assert prediction.source == "fake"
    assert prediction.peak_bytes == report.peak_bytes


# ---------------------------------------------------------------------- kernels, values
class Recurrent(Net):
    def __init__(self, steps=20):
        super().__init__("SGD")
        self.body, self.head = nn.LSTM(32, 64, num_layers=2, batch_first=True), nn.Linear(64, 10)
        self.steps = steps

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.head(self.body(batch[0])[0][:, -1]), batch[1])


def test_what_an_lstm_keeps_is_asked_of_its_kernel():
    module, batch = Recurrent(), (torch.randn(8, 20, 32), torch.randint(0, 10, (8,)))
    prediction = predict(module, batch, MemSave("measure"))
    report = measured(module, batch, MemSave("measure"))
    assert (prediction.source, prediction.peak_bytes) == ("fake", report.peak_bytes)


class Reading(Net):
    """Looks at a value, as code does that cannot be run for its shapes."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss.item() > 0 else loss


@pytest.mark.parametrize("as_factory", [False, True])
def test_a_step_that_reads_values_is_measured_and_says_so(as_factory):
    module, batch = Reading(dropout=0.0), image_batch(64)
    make = functools.partial(Reading, dropout=0.0)
    prediction = predict(make if as_factory else module, batch, MemSave("measure"))
    report = measured(module, batch, MemSave("measure"))
    assert prediction.source == "measured"
    assert any("8, 16 and 24 samples" in flag for flag in prediction.flags)
    assert prediction.peak_bytes == report.peak_bytes
    assert sum(prediction.by_category.values()) == prediction.peak_bytes == sum(prediction.by_module.values())


class ReadingPairs(Reading):
    """In-batch negatives: each sample is told from all others of its batch."""

    def training_step(self, batch, batch_idx):
        found = self.body(batch[0]).flatten(1)
        return super().training_step(batch, batch_idx) + (found @ found.T).exp().mean()


def test_what_compares_all_samples_is_extended_by_the_square():
    module, batch = ReadingPairs(dropout=0.0), image_batch(512)
    prediction = predict(module, batch, MemSave("measure"))
    report = measured(module, batch, MemSave("measure"))
    assert any("64, 128 and 192 samples" in flag for flag in prediction.flags)
    assert prediction.peak_bytes == report.peak_bytes
    assert prediction.by_category == report.by_category


class Masked(Net):
    """Takes another way where a mask is all ones: known from the batch, without reading a value of the model."""

    def training_step(self, batch, batch_idx):
        images, labels, mask = batch
        if not mask.eq(1).all():
            images = torch.cat([images] * 8)[: len(labels)]
        return F.cross_entropy(self.head(self.body(images)), labels)


@pytest.mark.parametrize("fill", [0, 1])
def test_what_the_batch_tells_is_known(fill):
    module, batch = Masked(), (*image_batch(), torch.full((48,), fill))
    prediction = predict(module, batch, MemSave("measure"))
    report = measured(module, batch, MemSave("measure"))
    assert (prediction.source, prediction.peak_bytes) == ("fake", report.peak_bytes)


# ---------------------------------------------------------------------- nothing is touched, nothing is taken
def test_the_module_stays_as_it_is():
    module, batch = Net(), image_batch()
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    parameters = [id(p) for p in module.parameters()]
    predict(module, batch, MemSave(**EVERYTHING))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert [id(p) for p in module.parameters()] == parameters
    assert not any(is_fake(t) for t in (*module.parameters(), *module.buffers(), *batch))
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not module._forward_hooks
    assert module._trainer is None


class Huge(Net):
    def __init__(self):
        super().__init__("SGD")
        self.body, self.head = nn.Identity(), nn.Linear(2**20, 2**20, bias=False)

    def training_step(self, batch, batch_idx):
        return self.head(batch).mean()


def test_a_factory_takes_no_memory():
    prediction = predict(Huge, lambda: torch.ones(4, 2**20), MemSave("measure"))
    assert prediction.by_category["weights"] == 4 * 2**40
    assert prediction.by_category["optimizer_state"] == 4 * 2**40


@pytest.mark.parametrize(
    "convert", [nn.Module.bfloat16, nn.Module.half, nn.Module.double, lambda module: module.to(torch.bfloat16)]
)
def test_a_factory_that_converts_its_module_takes_none_either(convert):
    predictor = Predictor(lambda: convert(Huge()), lambda: torch.ones(4, 2**20))
    assert all(map(is_fake, predictor._module.parameters()))
    assert {p.dtype for p in predictor._module.parameters()} == {convert(nn.Linear(1, 1)).weight.dtype}


class Scaled(Huge):
    """Its scale is known to be ones, so that its values are followed."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))


@pytest.mark.parametrize("convert", [nn.Module.bfloat16, nn.Module.float, lambda module: module.to("cpu")])
def test_parameters_whose_values_are_known_are_converted(convert):
    predictor = Predictor(lambda: convert(Scaled()), lambda: torch.ones(4, 2**20))
    assert all(map(is_fake, predictor._module.parameters()))
    assert predictor._module.scale.dtype == convert(nn.Linear(1, 1)).weight.dtype


def test_a_factory_that_needs_values_is_not_called_for_real_where_there_is_no_room():
    class Reads(Huge):
        def __init__(self):
            super().__init__()
            if float(torch.rand(())) > 2:
                raise AssertionError

    with pytest.raises(ValueError, match=r"without values \(ReadsValueError.*too large to be made"):
        Predictor(Reads, lambda: torch.ones(4, 2**20))


def test_refusals_are_those_of_the_run():
    with pytest.raises(ValueError, match="must be a LightningModule"):
        Predictor(nn.Linear(2, 2), torch.ones(2, 2))
    with pytest.raises(ValueError, match="target"):
        Predictor(Net(), image_batch(), target="tpu")
    with pytest.raises(ValueError, match="at least one layer"):
        Predictor(Net(), image_batch())([Sparsity(sparsity=0.9, modules="nothing")])


# ---------------------------------------------------------------------- what is made of it
def test_configs_of_a_planner_and_the_largest_batch():
    predictor = Predictor(Net("SGD"), image_batch())
    plain = predictor()
    small = predictor([Microbatching(size=4, reduction="mean")])
    assert small.peak_bytes < plain.peak_bytes
    assert plain.seconds > 0
    limit = predictor(num_samples=23).peak_bytes
    assert largest_batch(predictor, limit) == 23
    assert largest_batch(predictor, 1000) == 0
    assert predictor(num_samples=48).peak_bytes == plain.peak_bytes


def test_batches_that_were_cut_on_an_assumption_are_flagged():
    predictor = Predictor(Net("SGD"), image_batch())
    assert any("mean over its parts" in flag for flag in predictor([Microbatching(size=4)]).flags)
    assert not predictor([Microbatching(size=4, reduction="mean")]).flags


def test_tensors_and_modules_are_named():
    prediction = predict(Net("SGD"), image_batch(), MemSave("measure"))
    assert {"body.0.0", "head.2", "(batch)"} <= set(prediction.by_module)
    largest = prediction.top[0]
    assert largest.num_bytes == max(each.num_bytes for each in prediction.top)
    assert "test_predictor.py" in largest.line
    assert largest.category in CATEGORIES


def test_microbatches_that_nobody_makes_are_flagged():
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    prediction = predict(Manual("SGD"), image_batch(), MemSave("measure", microbatch=8))
    assert any(flag.startswith("microbatch had no effect") for flag in prediction.flags)


def test_json_holds_everything():
    prediction = predict(Net("SGD"), image_batch(), MemSave("measure"), target="cuda")
    assert Prediction.from_dict(json.loads(prediction.to_json())) == prediction


def test_cuda_takes_more_than_its_tensors():
    cpu = predict(Net("SGD"), image_batch(), MemSave("measure"))
    prediction = predict(Net("SGD"), image_batch(), MemSave("measure"), target="cuda")
    assert prediction.peak_bytes < cpu.peak_bytes, "dropout keeps bytes instead of floats"
    assert prediction.peak_bytes <= prediction.cuda.allocated_bytes <= prediction.cuda.reserved_bytes
    assert any("reserved bytes are a replay" in flag for flag in prediction.flags)
    low, high = prediction.needed_bytes
    assert (prediction.fits(high), prediction.fits(low), prediction.fits(low - 1)) == (True, None, False)


# ---------------------------------------------------------------------- held against the run
def test_a_run_is_held_against_its_prediction(info):
    module, batch = Net("SGD"), image_batch()
    right, wrong = (predict(module, batch, MemSave("measure"), num_samples=n) for n in (48, 24))
    report = measured(module, batch, MemSave("measure").with_prediction(right))
    assert report.predicted_peak_bytes == report.peak_bytes
    assert report.miss.fraction == 0
    memsave = MemSave("measure").with_prediction(wrong).compare_to(right)
    report = measured(module, batch, memsave)
    assert report.miss.category == "activations"
    assert report.miss.category_bytes > 0
    assert report.miss.fraction > 0
    assert report.baseline_source == "predicted"
    assert report.factor == 1
    assert "too little activations predicted" in info.text


def test_on_cuda_torchs_optimizers_step_all_parameters_together():
    """Which takes the size of all of them besides; a choice of the user stays."""

    class Wide(L.LightningModule):
        def __init__(self, foreach):
            super().__init__()
            self.layers, self.foreach = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), foreach

        def training_step(self, x):
            return self.layers(x).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), foreach=self.foreach)

    size = 4 * 4 * (512 * 512 + 512)  # of all parameters
    peaks = {
        f: predict(Wide(f), torch.ones(2, 512), MemSave("measure"), target="cuda").peak_bytes for f in (None, False)
    }
    assert peaks[None] >= peaks[False] + size // 2
    assert peaks[None] >= 5 * size  # weights, gradients, two moments, and one more


class Small(L.LightningModule):
    def __init__(self, net, make_optimizer):
        super().__init__()
        self.net, self.make_optimizer = net, make_optimizer

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return self.make_optimizer(self.parameters())


def test_lbfgs_whose_state_depends_on_values_is_measured():
    module = Small(nn.Linear(32, 32), lambda weights: torch.optim.LBFGS(weights, lr=0.1, max_iter=3))
    batch = (torch.randn(8, 32),)
    prediction = predict(module, batch, MemSave("measure"))
    assert prediction.source == "measured"
    assert prediction.peak_bytes == measured(module, batch, MemSave("measure")).peak_bytes
    assert any("LBFGS decides by values" in flag for flag in prediction.flags)


def test_group_norm_under_autocast_takes_what_is_predicted():
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Conv2d(16, 3, 3, padding=1))
    module, batch = Small(net, torch.optim.SGD), (torch.randn(4, 3, 32, 32),)
    prediction = predict(module, batch, MemSave("measure"), precision="bf16-mixed")
    assert prediction.peak_bytes == measured(module, batch, MemSave("measure"), precision="bf16-mixed").peak_bytes


def test_microbatches_that_grow_later_are_flagged():
    prediction = predict(Net("SGD"), image_batch(), MemSave("measure", microbatch="smallest"))
    assert any("later ones are doubled" in flag for flag in prediction.flags)
