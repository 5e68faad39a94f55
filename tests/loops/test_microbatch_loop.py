"""Microbatches against whole batches in float64: everything that a user can see is the same to 1e-12."""

from __future__ import annotations

import dataclasses
import gc
import math
import random
import warnings
import weakref
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.regression import MeanSquaredError
from transformers import BatchEncoding

from lightning_memsave import (
    Checkpointing,
    MemSave,
    Microbatching,
    MicrobatchWarning,
    NoEffectWarning,
    NotLosslessWarning,
    microbatches,
)
from lightning_memsave.loops import batch_cutter
from lightning_memsave.loops.batch_cutter import BatchCutter
from lightning_memsave.loops.microbatch_record import MicrobatchRecord
from lightning_memsave.techniques.microbatching.reduction import ReductionRule
from tests.harness import Net, assert_same_run, fit, largest_difference

CALLS = weakref.WeakKeyDictionary()
"""How often the step of each module was called; no attribute, which microbatches would be seen to change."""
EXACT = 1e-12


@dataclasses.dataclass
class Sample:
    x: Tensor
    y: Tensor
    names: list[str]


Pair = namedtuple("Pair", "x y")
SHAPES = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"x": x, "y": y, "names": [f"s{i}" for i in range(len(x))], "scale": torch.tensor(1.0)},
    "nested": lambda x, y: {"in": {"x": x}, "out": (y, [y.clone()])},
    "namedtuple": Pair,
    "dataclass": lambda x, y: Sample(x, y, [f"s{i}" for i in range(len(x))]),
    "BatchEncoding": lambda x, y: BatchEncoding({"x": x, "y": y}),
}


def unpack(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, (tuple, list)):
        return batch[0], batch[1]
    if isinstance(batch, Sample):
        assert len(batch.names) == len(batch.x)
        return batch.x, batch.y
    if "in" in batch:
        return batch["in"]["x"], batch["out"][0]
    if "names" in batch:
        assert len(batch["names"]) == len(batch["x"])
    return batch["x"], batch["y"]


class Module(L.LightningModule):
    def __init__(self, reduction: str = "mean", optimizer: str = "sgd", output: str = "loss", **flags: bool) -> None:
        super().__init__()
        self.net, self.reduction, self.kind, self.output, self.flags = Net(), reduction, optimizer, output, flags
        self.accuracy, self.error = MulticlassAccuracy(3, average="micro"), MeanSquaredError()
        self.error.set_dtype(torch.float64)
        CALLS[self] = 0

    def training_step(self, batch, batch_idx):
        CALLS[self] = CALLS.get(self, 0) + 1
        x, y = unpack(batch)
        logits = self.net(x)
        loss = F.cross_entropy(logits, y, reduction=self.reduction)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", logits.max(), on_step=True, on_epoch=True, reduce_fx="max")
        self.log("smallest", logits.min(), on_epoch=True, on_step=False, reduce_fx="min")
        self.log("count", torch.tensor(float(len(y))), on_epoch=True, on_step=False, reduce_fx="sum")
        self.log("sized", logits.mean(), on_epoch=True, on_step=True, batch_size=len(y))
        self.log("constant", logits.mean(), on_epoch=True, on_step=True, batch_size=64)
        if self.flags.get("metrics", True):
            self.accuracy(logits.argmax(1), y)
            self.error(logits[:, 0], y.to(logits.dtype))
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
            self.log("error", self.error, on_step=True, on_epoch=True)
        if self.output == "dict":
            return {"loss": loss, "logits": logits, "n": torch.tensor(2.0), "tag": "t", "ids": list(range(len(y)))[:0]}
        return loss

    def configure_optimizers(self):
        optimizer: Any = {
            "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
            "adamw": lambda p: torch.optim.AdamW(p, 0.01),
            "lbfgs": lambda p: torch.optim.LBFGS(p, 0.5, max_iter=5, line_search_fn="strong_wolfe"),
        }[self.kind](self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def batches(shape: str = "tuple", sizes: tuple[int, ...] = (10, 10, 4)) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for n in sizes:
        x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
        made.append(SHAPES[shape](x, torch.randint(0, 3, (n,), generator=generator)))
    return made


def both(module: Module, data: list[Any], memsave: MemSave, **options: Any) -> tuple[Any, Any]:
    module = module.double()
    return fit(module, data, precision="64-true", **options), fit(module, data, memsave, precision="64-true", **options)


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


@pytest.mark.parametrize("factor", [2, 7, 11])  # x / 7 * 7 is not x for each of them
def test_a_summed_loss_is_known_in_the_logs_under_accumulation(factor):
    plain, ours = both(
        Module(reduction="sum"), batches(sizes=(10, 9, 8, 7)), MemSave(microbatch=3), accumulate_grad_batches=factor
    )
    assert_same_run(plain, ours, EXACT)


def test_lbfgs_calls_the_closure_many_times():
    plain, ours = both(Module(optimizer="lbfgs", metrics=False), batches(), MemSave(microbatch=3))
    # Round-off is amplified by the line search, so the bar is lower; the number of evaluations is the same.
    assert len(plain.hooks) == len(ours.hooks)
    assert_same_run(plain, ours, 1e-8)


def test_a_token_weighted_mean_is_found_and_honours_weight_fn():
    class Tokens(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 6)

        def training_step(self, batch, batch_idx):
            logits = self.net(batch["x"])  # [B, T, V]
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 6, (8, 7), generator=generator)
    for row in range(8):
        labels[row, row % 6 :] = -100 if row % 6 else labels[row, 0]
    data = [{"x": torch.randn(8, 7, 4, generator=generator, dtype=torch.float64), "labels": labels}]
    module = Tokens().double()
    plain = fit(module, data, precision="64-true")
    weighted = Microbatching(size=3, weight_fn=lambda part: (part["labels"] != -100).sum())
    assert_same_run(plain, fit(module, data, MemSave(microbatch=weighted), precision="64-true"), EXACT)
    by_itself = MemSave(microbatch=3)
    assert_same_run(plain, fit(module, data, by_itself, precision="64-true"), EXACT)
    assert "LabelCount()" in by_itself.report.applied[1].summary


def test_in_batch_negatives_are_detected_and_run_whole():
    class Contrastive(Module):
        def training_step(self, batch, batch_idx):
            x, _ = unpack(batch)
            z = F.normalize(self.net(x), dim=1)
            return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))

    memsave = MemSave(microbatch=3)
    with pytest.warns(MicrobatchWarning, match="in-batch negatives.*weight_fn.*split_fn"):
        plain, ours = both(Contrastive(), batches(), memsave)
    assert_same_run(plain, ours, 0.0)
    assert memsave.report.microbatch_size is None


def test_processes_that_wait_for_each_other_refuse_uneven_parts(monkeypatch):
    """Under FSDP a process with more microbatches would wait for the others for ever."""
    cutter = BatchCutter(Microbatching(size=4), warns=True)
    cutter.rules.known, cutter.rules.is_due = (ReductionRule("mean"),), lambda *_, **__: False
    strategy = SimpleNamespace(root_device=torch.device("cpu"), reduce=lambda counts, reduce_op: torch.tensor([3, -2]))
    trainer = SimpleNamespace(world_size=2, strategy=strategy, lightning_module=Module(), current_epoch=0)
    kwargs = {"batch": torch.zeros(8, 4)}
    monkeypatch.setattr(batch_cutter, "ways_of_training", lambda trainer: ["DDP"])
    assert len(cutter.microbatches(trainer, kwargs)) == 2
    monkeypatch.setattr(batch_cutter, "ways_of_training", lambda trainer: ["model parallel (FSDP2)"])
    with pytest.raises(ValueError, match=r"into as many parts.*got '2 here, and 2 to 3'"):
        cutter.microbatches(trainer, kwargs)
    strategy.reduce = lambda counts, reduce_op: counts
    assert len(cutter.microbatches(trainer, kwargs)) == 2


@pytest.mark.filterwarnings("ignore::lightning_memsave.NotLosslessWarning")
@pytest.mark.parametrize("draws", ["like", "size", "in place", "numbers"])
def test_a_loss_that_draws_noise_is_known_for_a_mean(draws):
    """As in diffusion and variational autoencoders; what is drawn differs from that of the whole batch."""

    class Noisy(Module):
        def training_step(self, batch, batch_idx):
            x, _ = unpack(batch)
            noise = {
                "like": lambda: torch.randn_like(x),
                "size": lambda: torch.rand(len(x), 1) * torch.randint(1, 9, (len(x), 1)),
                "in place": lambda: torch.empty(x.shape).normal_(),
                "numbers": lambda: random.random() + np.random.rand(),  # noqa: NPY002  # as mixup does,
            }[draws]()
            return (self.net(x) - self.net(x + noise)).square().mean()

    memsave = MemSave(microbatch=3)
    state = random.getstate()
    both(Noisy(), batches(), memsave)
    assert "(loss: mean over samples)" in memsave.report.applied[1].summary
    assert memsave.report.microbatch_size == 3
    random.setstate(state)


def test_samples_that_meet_through_their_noise_are_still_detected():
    class Diverse(Module):
        def training_step(self, batch, batch_idx):
            x = unpack(batch)[0]
            return self.net(torch.randn_like(x)).std(0).mean()

    with pytest.warns(MicrobatchWarning, match="neither the mean nor the sum"):
        both(Diverse(), batches(), MemSave(microbatch=3))


def test_activations_with_noise_are_no_noise():
    class Random(Module):
        def training_step(self, batch, batch_idx):
            return F.rrelu(self.net(unpack(batch)[0]), training=False).square().mean()

    memsave = MemSave(microbatch=3)
    both(Random(), batches(), memsave)
    assert "(loss: mean over samples)" in memsave.report.applied[1].summary


def test_a_loss_that_takes_gradients_is_known_for_a_mean():
    """As in networks of energies and forces, and in gradient penalties."""

    class Forces(Module):
        def training_step(self, batch, batch_idx):
            x = unpack(batch)[0].clone().requires_grad_()
            energy = self.net(x).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force.square().mean()

    memsave = MemSave(microbatch=3)
    plain, ours = both(Forces(), batches(), memsave)
    assert_same_run(plain, ours, EXACT)
    assert "(loss: mean over samples)" in memsave.report.applied[1].summary


def test_layers_that_pack_their_weights_in_eval_mode_are_not_asked_to():
    class Packs(nn.Linear):
        support_avx512bf16_for_cpu = True  # as bitsandbytes' layers of 4 bits

        def forward(self, x):
            assert self.training
            return super().forward(x)

    module = Module()
    module.net = nn.Sequential(nn.Flatten(), Packs(5, 3))
    fit(module, [(torch.randn(8, 5), torch.arange(8) % 3)], MemSave(microbatch=4))


@pytest.mark.parametrize("size", ["auto", 4])
@pytest.mark.parametrize("name", ["weight_fn", "split_fn"])
def test_a_function_that_fails_is_told_in_the_first_batch(size, name):
    def fails(batch, size=None):
        return batch["label"]

    with pytest.raises(ValueError, match=rf"Microbatching.{name}` must work .*got .KeyError"):
        fit(Module(), [{"x": torch.zeros(8, 4)}], MemSave(microbatch=Microbatching(size=size, **{name: fails})))


def test_an_ambiguous_batch_runs_whole_or_is_cut_by_split_fn():
    class Weighted(Module):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch["x"]), batch["y"], label_smoothing=float(batch["class_weights"][0]))

    data = [{"x": b[0], "y": b[1], "class_weights": torch.full((3,), 0.1)} for b in batches()]
    with pytest.warns(MicrobatchWarning, match=r"first dimensions \[3, 10\].*split_fn"):
        plain, ours = both(Weighted(), data, MemSave(microbatch=4))
    assert_same_run(plain, ours, 0.0)

    def split_fn(batch, size):
        return [
            {"x": x, "y": y, "class_weights": batch["class_weights"]}
            for x, y in zip(batch["x"].split(size), batch["y"].split(size), strict=True)
        ]

    # `batch_size` cannot tell these apart either, so the weights are given as well.
    cut = Microbatching(size=4, split_fn=split_fn, weight_fn=lambda part: len(part["x"]))
    plain, ours = both(Weighted(), data, MemSave(microbatch=cut))
    assert_same_run(plain, ours, EXACT)


@pytest.mark.filterwarnings("ignore::lightning_memsave.NotLosslessWarning")
def test_the_probe_leaves_no_trace():
    class Noisy(Module):
        def __init__(self):
            super().__init__()
            self.seen: list[float] = []
            self.register_buffer("count", torch.zeros(()))

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if not self.training:
                self.count += 1
            self.seen.append(float(torch.rand(())))
            return loss

    module = Noisy().double()
    calls = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            calls.append((CALLS[pl_module], len(pl_module.seen), float(pl_module.count), pl_module.seen[0]))

    for memsave in (None, MemSave(microbatch=3)):
        fit(module, batches(sizes=(6,)), memsave, precision="64-true", max_epochs=1, callbacks=[Count()])
    (_, _, _, first_random_number), ours = calls
    assert ours == (2 + 3, 2, 0.0, first_random_number)  # three evaluations


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


@pytest.mark.parametrize(("layer", "named"), [(nn.BatchNorm1d(5), "BatchNorm1d"), (nn.Dropout(0.5), "Dropout")])
def test_batchnorm_and_dropout_are_named_and_strict_refuses(layer, named):
    module = Module().double()
    module.net = nn.Sequential(layer, Net()).double()
    memsave = MemSave(microbatch=3)
    with pytest.warns(NotLosslessWarning, match=rf"net\.0 \({named}"):
        fit(module, batches(), memsave, precision="64-true")
    assert memsave.report.loss_class == "changed"
    assert named in memsave.report.loss_class_reasons[0]
    with pytest.raises(ValueError, match=rf"strict.*{named}"):
        fit(module, batches(), MemSave(microbatch=Microbatching(size=3, strict=True)), precision="64-true")


class Draws(Module):
    """By itself, as models that call `F.dropout`."""

    def training_step(self, batch, batch_idx):
        return super().training_step((F.dropout(batch[0], 0.1), batch[1]), batch_idx)


def test_what_the_step_draws_is_seen_when_it_is_cut():
    memsave = MemSave(microbatch=3)
    with pytest.warns(NotLosslessWarning, match="training_step .it draws random numbers"):
        fit(Draws().double(), batches(), memsave, precision="64-true")
    assert memsave.report.loss_class == "changed"
    with pytest.raises(ValueError, match=r"strict.*draws random numbers"):
        fit(Draws().double(), batches(), MemSave(microbatch=Microbatching(size=3, strict=True)), precision="64-true")
    memsave = MemSave(microbatch=1000)
    fit(Draws().double(), batches(), memsave, precision="64-true")
    assert memsave.report.loss_class == "exact"  # nothing was cut


def test_strict_is_not_forgotten_where_recovery_tries_again():
    record = MicrobatchRecord(Microbatching(size=3, strict=True), warns=True)
    record.begin(nn.Identity(), "batches run")
    module, device = Module(), torch.device("cpu")
    for _ in range(3):
        with pytest.raises(ValueError, match="strict"), record.watch(module, device)(0):
            torch.rand(1)
    with record.watch(module, device)(0):
        pass
    assert record.applied(3, None).loss_class == "exact"


def test_a_frozen_batchnorm_is_exact():
    module = Module().double()
    module.net = nn.Sequential(nn.BatchNorm1d(5), Net()).double()
    memsave = MemSave(microbatch=3)

    class Freeze(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, *args):
            pl_module.net[0].eval()

    plain = fit(module, batches(), precision="64-true", callbacks=[Freeze()])
    ours = fit(module, batches(), memsave, precision="64-true", callbacks=[Freeze()])
    assert_same_run(plain, ours, EXACT)
    assert memsave.report.loss_class == "exact"


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


Two = namedtuple("Two", "a b")


@pytest.mark.parametrize(
    "extra",
    [
        lambda logits, y, i: {"array": logits.detach().numpy()},
        lambda logits, y, i: {"pair": (logits.detach(), None), "named": Two(logits.detach(), y)},
        lambda logits, y, i: {
            "flag": True,
            "count": 3,
            "tensor_count": torch.tensor(3),
            "tensor_flag": torch.tensor(True),
        },
        lambda logits, y, i: {"ids": ["i"] * len(y), "inner": {"y": y, "names": ["s"] * len(y)}},
    ],
    ids=["numpy", "tuples", "scalars", "lists"],
)
def test_outputs_of_any_kind_are_those_of_the_whole_batch(extra):
    class Returns(Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            x, y = unpack(batch)
            return {"loss": loss, **extra(self.net(x), y, batch_idx)}

        def on_train_batch_end(self, outputs, *args):
            for name, value in outputs.items():
                if isinstance(value, Tensor) and name != "loss":
                    assert not value.is_floating_point()  # counts and flags keep their type

    plain, ours = both(Returns(), batches(), MemSave(microbatch=3))
    for a, b in zip(plain.outputs, ours.outputs, strict=True):
        for name in a:
            if name == "array":
                assert abs(a[name] - b[name]).max() < EXACT
            elif name == "flag":
                assert b[name] is True
            else:
                assert largest_difference(a[name], b[name]) < EXACT, name


def test_outputs_that_differ_between_the_parts_become_lists():
    class Returns(Module):
        def training_step(self, batch, batch_idx):
            first = len(batch[0]) == 4
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "sometimes": loss.detach() if first else None, **({"once": "x"} if first else {})}

    ours = fit(Returns().double(), batches(sizes=(13,)), MemSave(microbatch=4), precision="64-true", max_epochs=1)
    assert ours.outputs[0]["once"] == "x"
    assert len(ours.outputs[0]["sometimes"]) == 4
    assert ours.outputs[0]["sometimes"][1:] == [None] * 3


def test_composite_metrics_have_the_value_of_the_batch():
    class Composite(Module):
        def __init__(self):
            super().__init__()
            self.both = MulticlassAccuracy(3, average="micro") + 2 * MulticlassAccuracy(3, average="macro")

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            x, y = unpack(batch)
            self.both(self.net(x).argmax(1), y)
            self.log("composite", self.both, on_step=True, on_epoch=True)
            return loss

    plain, ours = both(Composite(), batches(), MemSave(microbatch=3))
    assert_same_run(plain, ours, 1e-6)  # torchmetrics computes these in float32


def test_a_loss_that_starts_at_zero_is_not_taken_for_a_mean():
    class Hinge(Module):
        def training_step(self, batch, batch_idx):
            x, _ = unpack(batch)
            scale = 0.0 if self.trainer.global_step == 0 else 1e-2
            return (self.net(x).sum(1) + 3).relu().sum() * scale

    memsave = MemSave(microbatch=3)
    with pytest.warns(MicrobatchWarning, match="loss is zero, .* does not say which kind"):
        plain, ours = both(Hinge(), batches(), memsave)
    assert_same_run(plain, ours, EXACT)
    summary = memsave.report.applied[1].summary
    assert "(loss: sum)" in summary
    assert "1 batches ran whole" in summary


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("first", [lambda loss: None, lambda loss: loss * math.inf], ids=["none", "infinite"])
def test_a_first_batch_without_a_finite_loss_does_not_tell_of_the_others(first):
    class Late(Module):
        def training_step(self, batch, batch_idx):
            x, y = unpack(batch)
            loss = F.cross_entropy(self.net(x), y)
            return first(loss) if batch_idx == 0 else loss

        def on_after_backward(self):
            for p in self.parameters():
                p.grad.nan_to_num_(0, 0, 0)

    memsave = MemSave(microbatch=3)
    with pytest.warns(MicrobatchWarning, match="not finite, none, .* does not say which kind"):
        plain, ours = both(Late(), batches(), memsave)
    assert largest_difference(plain.parameters, ours.parameters) <= EXACT
    summary = memsave.report.applied[1].summary
    assert "(loss: mean over samples)" in summary
    assert "1 batches ran whole" in summary


@pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
def test_a_part_whose_loss_is_not_finite_is_no_part_of_a_mean():
    class Spread(Module):
        def training_step(self, batch, batch_idx):
            return self.net(unpack(batch)[0]).std(0).sum()

    memsave = MemSave(microbatch=2)
    with pytest.warns(MicrobatchWarning, match="neither the mean nor the sum"):
        plain, ours = both(Spread(), batches(), memsave)
    assert_same_run(plain, ours, EXACT)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("reduce_fx", ["max", "min", "sum"])
def test_a_logged_loss_is_the_whole_batchs_however_it_is_reduced_over_batches(reduce_fx, reduction):
    class Extremes(Module):
        def training_step(self, batch, batch_idx):
            x, y = unpack(batch)
            loss = F.cross_entropy(self.net(x), y, reduction=reduction)
            self.log("reduced", loss, on_step=True, on_epoch=True, reduce_fx=reduce_fx)
            return loss

    plain, ours = both(Extremes(), batches(), MemSave(microbatch=3))
    assert_same_run(plain, ours, EXACT)


def test_one_odd_batch_runs_whole_and_the_others_are_still_cut():
    sizes = []

    class Records(Module):
        def training_step(self, batch, batch_idx):
            sizes.extend([len(batch["x"])] * torch.is_grad_enabled())
            return F.cross_entropy(self.net(batch["x"]), batch["y"])

    data = [{"x": x, "y": y} for x, y in batches(sizes=(6, 6, 6))]
    data[1]["odd"] = torch.zeros(5)
    config = Microbatching(size=3)
    with pytest.warns(MicrobatchWarning, match=r"first dimensions \[5, 6\]"):
        fit(Records().double(), data, MemSave(microbatch=config), precision="64-true", max_epochs=1)
    assert sizes == [3, 3, 6, 3, 3]


@pytest.mark.parametrize("kind", ["coo", "csr", "jagged"])
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batches_that_cannot_be_sliced_run_whole(kind):
    x = torch.randn(6, 5, dtype=torch.float64)
    make = {
        "coo": lambda: x.to_sparse(),
        "csr": lambda: x.to_sparse_csr(),
        "jagged": lambda: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    }[kind]

    class Dense(Module):
        def training_step(self, batch, batch_idx):
            dense = batch["x"].to_dense() if kind != "jagged" else torch.stack(batch["x"].unbind())
            return self.net(dense).square().mean()

    with pytest.warns(MicrobatchWarning, match="layout"):
        plain, ours = both(Dense(), [{"x": make()}], MemSave(microbatch=3))
    assert_same_run(plain, ours, 0.0)


def test_numpy_arrays_and_model_outputs_are_cut_as_well():
    from transformers.modeling_outputs import BaseModelOutput

    from lightning_memsave.techniques.microbatching import split

    batch = {"x": torch.zeros(4, 2).numpy(), "out": BaseModelOutput(last_hidden_state=torch.arange(4.0))}
    parts = [part for part, _ in split(batch, 2)]
    assert [part["x"].shape for part in parts] == [(2, 2), (2, 2)]
    assert parts[1]["out"].last_hidden_state.tolist() == parts[1]["out"]["last_hidden_state"].tolist() == [2.0, 3.0]
