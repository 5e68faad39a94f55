"""Two processes on CPU (gloo) with microbatches, whose steps or logs exchange something; run by `test_distributed.py`.

A collective that one process begins and the other does not waits for its timeout, which is short here.
"""

from __future__ import annotations

import sys
import warnings
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
from lightning_memsave.reporting.loggers import of_the_largest_rank

LONGEST = timedelta(seconds=60)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 6))

    def forward(self, x):
        return x + self.inside(x)


class Module(L.LightningModule):
    """What exchanges: the log alone, a count, the mean over the samples of all processes, or a metric."""

    def __init__(self, what="log"):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.last, self.what, self.fails_in_parts = Block(), nn.Linear(6, 3), what, False
        self.accuracy = MulticlassAccuracy(3, dist_sync_on_step=True)

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
        if self.what in ("count", "mean over all"):
            dist.all_reduce(count)
        if self.what == "mean over all":
            loss = loss * len(y) / count * 2
        if self.what == "metric":
            self.accuracy(scores, y)
        if self.what == "hinge":  # none of the other process's first batches
            loss = (loss * (0 if dist.get_rank() == 1 and batch_idx < 2 else 1)).relu()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def batches(last=8):
    """Six batches of this process; those of the second process end with smaller ones."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    sizes = [8, 8, 8, 8, *([last if dist.get_rank() == 1 else 8] * 2)]
    return [(torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes]


def train(module, memsave, *, shards=False, last=8):
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
    )

    class Batches:
        def __iter__(self):
            return iter(batches(last))

    trainer.fit(module, Batches())
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


def steps_that_exchange_run_whole():
    for what in ("count", "mean over all", "metric"):
        for shards, setting in ((False, 3), (False, Microbatching(start=3)), (True, 4), (False, "given")):
            setting = Microbatching(size=3, reduction="mean") if setting == "given" else setting
            memsave = MemSave(microbatch=setting)
            with pytest.warns(UserWarning, match=r"not cut.*exchanges something with other processes.*tiling"):
                apart = compared(what, memsave, shards=shards, last=8 if shards else 5)
            assert apart == 0.0, (what, shards, setting)
            assert memsave.report.microbatch_size is None


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
    none = of_the_largest_rank(SimpleNamespace(world_size=2), MemoryReport(peak_bytes=1))
    assert none.evaluation_peak_bytes is None


def main():
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", timeout=LONGEST)
    whole_batches_log_as_cut_ones_do()
    steps_that_exchange_run_whole()
    sharded_modules_have_the_name_of_their_class()
    a_head_whose_weight_is_freed_keeps_its_logits_and_says_so()
    the_highest_peaks_are_reported_of_all_processes()
    if dist.get_rank() == 0:
        print("ok", file=sys.stderr, flush=True)
    an_error_of_one_process_ends_both()


if __name__ == "__main__":
    main()
