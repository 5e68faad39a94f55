"""Two processes on CPU (gloo) with microbatches, whose steps or logs exchange something; run by `test_distributed.py`.

A collective that one process begins and the other does not waits for its timeout, which is short here.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchmetrics.classification import MulticlassAccuracy

from lightning_memsave import MemoryReport, MemSave, Microbatching, NoEffectWarning, Tiling
from lightning_memsave.core.report import Applied
from lightning_memsave.reporting.loggers import of_the_largest_rank
from lightning_memsave.torch_internals.sharded_parameters import can_begin_anew

LONGEST = timedelta(seconds=60)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 6))

    def forward(self, x):
        return x + self.inside(x)


class Centred(nn.Module):
    """Subtracts the mean over all processes, in training."""

    def forward(self, x):
        if self.training:
            mean = x.detach().mean(0)
            dist.all_reduce(mean)
            x = x - mean / 2
        return x


class Module(L.LightningModule):
    """What exchanges: the log alone, a count, the mean over the samples of all processes, or a metric."""

    def __init__(self, what="log"):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.last, self.what, self.fails_in_parts = Block(), nn.Linear(6, 3), what, False
        self.accuracy = MulticlassAccuracy(3, dist_sync_on_step=True)
        if what == "centred":
            self.block.inside.append(Centred())

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.block, FSDPModule):
            for layer in (self.block, self.last):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.fails_in_parts and dist.get_rank() == 1 and len(x) < 8:
            raise KeyError("a part")
        scores = self.last(self.block(x))
        loss = F.cross_entropy(scores, y)
        count = torch.tensor(float(len(y)))
        if self.what in ("count", "mean over all") or (self.what == "later count" and batch_idx == 2):
            dist.all_reduce(count)
        if self.what == "mean over all":
            loss = loss * len(y) / count * 2
        if self.what == "metric":
            self.accuracy(scores, y)
        if self.what == "hinge":  # none of the other process's first batches
            loss = (loss * (0 if dist.get_rank() == 1 and batch_idx < 2 else 1)).relu()
        self.log("loss", loss, sync_dist=self.what != "silent")
        return loss

    def validation_step(self, batch, batch_idx):
        self.last(self.block(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Taught(Module):
    """Has a teacher that each step averages first."""

    def __init__(self, what):
        super().__init__(what)
        self.teacher = nn.Sequential(Block(), nn.Linear(6, 3)).requires_grad_(False)

    def configure_model(self):
        super().configure_model()
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.teacher, FSDPModule):
            fully_shard(self.teacher, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        if isinstance(self.teacher, FSDPModule):
            self.teacher.reshard()
        with torch.no_grad():
            for theirs, own in zip(
                self.teacher.parameters(), (*self.block.parameters(), *self.last.parameters()), strict=True
            ):
                theirs.mul_(0.9).add_(own, alpha=0.1)
            targets = self.teacher(batch[0]).softmax(-1)
        return super().training_step(batch, batch_idx) + F.cross_entropy(self.last(self.block(batch[0])), targets)


def batches(last=8):
    """Six batches of this process; those of the second process end with smaller ones."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    sizes = [8, 8, 8, 8, *([last if dist.get_rank() == 1 else 8] * 2)]
    return [(torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes]


def train(module, memsave, *, shards=False, last=8, **options):
    strategy = ModelParallelStrategy(2, 1, timeout=LONGEST) if shards else DDPStrategy(timeout=LONGEST)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        callbacks=[memsave] if memsave else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )

    class Batches:
        def __iter__(self):
            return iter(batches(last))

    trainer.fit(module, Batches(), Batches() if options else None)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in module.parameters()]
    return weights, float(trainer.callback_metrics["loss"])


def compared(what, memsave, **options):
    """How far weights and the logged loss are from those of plain Lightning."""
    plain, plain_loss = train(Module(what), None, **options)
    weights, loss = train(Module(what), memsave, **options)
    apart = max(float((a - b).abs().max()) for a, b in zip(plain, weights, strict=True))
    assert loss == pytest.approx(plain_loss, abs=1e-6), (what, options, loss, plain_loss)
    return apart


def whole_batches_log_as_cut_ones_do():
    """One process cuts its batch and the other runs it whole: smaller, or without a loss that tells."""
    for what, last in (("log", 3), ("log", 5), ("hinge", 8)):
        memsave = MemSave(microbatch=4)
        assert compared(what, memsave, last=last) < 1e-6
        assert memsave.report.microbatch_size == 4
        assert memsave.report.loss_class == "exact"
    for options in ({"val_check_interval": 1, "limit_val_batches": 1}, {"accumulate_grad_batches": 2}):
        memsave = MemSave(microbatch=4)  # DDP exchanges the order of its buckets in the second batch
        assert compared("silent", memsave, **options) < 1e-6
        assert memsave.report.loss_class == "exact"


def steps_that_exchange_run_whole():
    for what in ("count", "mean over all", "metric"):
        for shards, setting in ((False, 3), (False, Microbatching(start=3)), (True, 4), (False, "given")):
            setting = Microbatching(size=3, reduction="mean") if setting == "given" else setting
            memsave = MemSave(microbatch=setting)
            with pytest.warns(UserWarning, match=r"not cut.*exchanges something with other processes.*tiling"):
                apart = compared(what, memsave, shards=shards, last=8 if shards else 5)
            assert apart == 0.0, (what, shards, setting)
            assert memsave.report.microbatch_size is None


def what_exchanges_later_is_found_in_the_first_batch_that_does():
    """No question has seen it. That batch has exchanged once for each part; later ones run whole."""
    memsave = MemSave(microbatch=4)
    with pytest.warns(UserWarning, match=r"not cut into microbatches any more.*exchanges something"):
        apart = compared("later count", memsave)
    assert apart < 1e-6
    assert memsave.report.loss_class == "changed"
    assert any("exchanges something for each microbatch" in each for each in memsave.report.loss_class_reasons)


def a_layer_that_exchanges_in_training_runs_whole():
    """The question ends in the middle of a forward pass, in which FSDP2 has gathered moved weights."""
    memsave = MemSave(microbatch=4)
    with pytest.warns(UserWarning, match=r"not cut.*exchanges something"):
        assert compared("centred", memsave, shards=True) == 0.0
    assert memsave.report.loss_class == "exact"


def a_teacher_that_a_step_averages_is_put_back_by_questions():
    """Also where FSDP2 has gathered it: the same as with DDP, once for each part, and said."""
    found = []
    for shards in (False, True):
        memsave = MemSave(microbatch=4)
        found.append(train(Taught("log"), memsave, shards=shards)[0])
        assert memsave.report.loss_class == "changed"
        assert any("`teacher" in each for each in memsave.report.loss_class_reasons)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def an_error_of_one_process_ends_both():
    module = Module()
    module.fails_in_parts = True
    if dist.get_rank() == 1:
        with pytest.raises(KeyError, match="a part") as found:
            train(module, MemSave(microbatch=4), shards=True)
        assert "microbatch=False" in "".join(found.value.__notes__)
    else:
        with pytest.raises(RuntimeError, match=r"closed by peer|reset by peer|Connection"):
            train(module, MemSave(microbatch=4), shards=True)


def sharded_modules_have_the_name_of_their_class():
    memsave = MemSave(tiling=Tiling(modules="Block", dim=0, size=2))
    assert compared("log", memsave, shards=True) < 1e-6
    assert any("Block" in applied.summary for applied in memsave.report.applied if applied.technique == "tiling")


def a_head_whose_weight_is_freed_keeps_its_logits_and_says_so():
    module = Module()
    module.last = nn.Linear(6, 1200)
    with pytest.warns(NoEffectWarning, match=r"linear-cross-entropy.*no effect under FSDP2"):
        train(module, MemSave(activations="linear-cross-entropy"), shards=True)


def the_highest_peaks_are_reported_of_all_processes():
    is_first = dist.get_rank() == 0
    own = MemoryReport(peak_bytes=3 if is_first else 2, evaluation_peak_bytes=4 if is_first else 5)
    found = of_the_largest_rank(SimpleNamespace(world_size=2), own)
    assert (found.peak_bytes, found.evaluation_peak_bytes) == (3, 5)
    whole = Applied(technique="microbatching", summary="")
    cut = replace(whole, loss_class="changed", reasons=("statistics",))
    found = of_the_largest_rank(SimpleNamespace(world_size=2), replace(own, applied=(whole if is_first else cut,)))
    assert (found.peak_bytes, found.loss_class, found.loss_class_reasons) == (3, "changed", ("process 1: statistics",))
    none = of_the_largest_rank(SimpleNamespace(world_size=2), MemoryReport(peak_bytes=1))
    assert none.evaluation_peak_bytes is None


def main():
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", timeout=LONGEST)
    whole_batches_log_as_cut_ones_do()
    steps_that_exchange_run_whole()
    what_exchanges_later_is_found_in_the_first_batch_that_does()
    if can_begin_anew():
        a_layer_that_exchanges_in_training_runs_whole()
    a_teacher_that_a_step_averages_is_put_back_by_questions()
    sharded_modules_have_the_name_of_their_class()
    a_head_whose_weight_is_freed_keeps_its_logits_and_says_so()
    the_highest_peaks_are_reported_of_all_processes()
    if dist.get_rank() == 0:
        print("ok", file=sys.stderr, flush=True)
    an_error_of_one_process_ends_both()


if __name__ == "__main__":
    main()
