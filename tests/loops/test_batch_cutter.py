"""Which batches are cut into which parts, which run whole, and what is said of it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lightning_memsave import MemSave, Microbatching, MicrobatchWarning
from lightning_memsave.loops import batch_cutter
from lightning_memsave.loops.batch_cutter import BatchCutter
from lightning_memsave.techniques.microbatching.reduction import ReductionRule
from tests.harness import assert_same_run, fit, largest_difference
from tests.loops import loss_runs
from tests.loops.loss_runs import Base, applied, compare
from tests.loops.whole_batches import EXACT, Module, batches, both, unpack


class Reduced(Base):
    def __init__(self, reduction):
        super().__init__()
        self.reduction = reduction

    def loss(self, z, y):
        return F.cross_entropy(z, y, reduction=self.reduction, ignore_index=0)


@pytest.mark.parametrize(
    ("given", "true", "reason"),
    [
        ("mean", "mean", "average"),  # over labels
        ("mean", "sum", "average"),
        ("sum", "mean", "add up"),
        ("sum", "sum", None),
    ],
)
def test_a_rule_that_the_user_gave_is_used_and_looked_at(given, true, reason):
    report, apart, messages = compare(Reduced(true), loss_runs.batches(), Microbatching(size=5, reduction=given))
    assert f"(loss: {given}" in applied(report).summary
    if reason is None:
        assert (applied(report).loss_class, messages) == ("exact", [])
        assert apart < 1e-5
        return
    assert applied(report).reasons == (f"the losses of microbatches do not {reason} to that of the batch",)
    assert apart > 1e-4
    warned = [message for message in messages if "must say how the losses of microbatches" in message]
    assert len(warned) == 1
    assert "`Microbatching.reduction`" in warned[0]


def test_a_rule_that_the_user_gave_is_used_where_the_loss_tells_nothing():
    class Scaled(Base):
        def loss(self, z, y):
            return F.cross_entropy(z, y) * (self.batch_idx > 0)

    report, apart, messages = compare(Scaled(), loss_runs.batches(), Microbatching(size=5, reduction="mean"))
    assert (applied(report).loss_class, applied(report).reasons, messages) == ("exact", (), [])
    assert "ran whole" not in applied(report).summary
    assert apart < 1e-5


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
    session = SimpleNamespace(release=None)
    strategy = SimpleNamespace(
        root_device=torch.device("cpu"), reduce=lambda counts, reduce_op: torch.tensor([3, -2]), memsave=session
    )
    trainer = SimpleNamespace(world_size=2, strategy=strategy, lightning_module=Module(), current_epoch=0)
    kwargs = {"batch": torch.zeros(8, 4)}
    monkeypatch.setattr(batch_cutter, "ways_of_training", lambda trainer: ["DDP"])
    assert len(cutter.microbatches(trainer, kwargs)) == 2
    session.release = SimpleNamespace(is_exchanged=True)  # in every backward
    with pytest.raises(ValueError, match=r"into as many parts.*got '2 here, and 2 to 3'"):
        cutter.microbatches(trainer, kwargs)
    session.release = None
    monkeypatch.setattr(batch_cutter, "ways_of_training", lambda trainer: ["model parallel (FSDP2)"])
    with pytest.raises(ValueError, match=r"into as many parts.*got '2 here, and 2 to 3'"):
        cutter.microbatches(trainer, kwargs)
    strategy.reduce = lambda counts, reduce_op: counts
    assert len(cutter.microbatches(trainer, kwargs)) == 2


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


def test_a_loss_that_starts_at_zero_is_not_taken_for_a_mean():
    class Hinge(Module):
        def training_step(self, batch, batch_idx):
            x, _ = unpack(batch)
            scale = 0.0 if self.trainer.global_step == 0 else 1e-2
            return (self.net(x).sum(1) + 3).relu().sum() * scale

    memsave = MemSave(microbatch=3)
    with pytest.warns(MicrobatchWarning, match="loss is zero, .* does not show"):
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
    with pytest.warns(MicrobatchWarning, match="not finite, none, .* does not show"):
        plain, ours = both(Late(), batches(), memsave)
    assert largest_difference(plain.parameters, ours.parameters) <= EXACT
    summary = memsave.report.applied[1].summary
    assert "(loss: mean over samples)" in summary
    assert "1 batches ran whole" in summary


def test_one_odd_batch_runs_whole_and_the_others_are_still_cut():
    sizes = []

    class Records(Module):
        def training_step(self, batch, batch_idx):
            self.latest = len(batch["x"])
            return F.cross_entropy(self.net(batch["x"]), batch["y"])

        def backward(self, loss):
            sizes.append(self.latest)
            loss.backward()

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
