"""Two processes of DDP on CPU (gloo) of which one or both run out of memory; run by `test_distributed.py`."""

from __future__ import annotations

import sys
import warnings

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave, Microbatching
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError


class Record(list):
    """What happened, which a try that failed does not take back: it cannot be pickled in a run."""

    def __reduce_ex__(self, protocol):
        if torch.distributed.is_initialized():
            raise TypeError("this record stays as it is")
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return type(self)(self)


class Hungry(nn.Module):
    """Fails above a number of samples on some ranks, in forward or in the middle of backward."""

    def __init__(self):
        super().__init__()
        self.ranks, self.limit, self.where, self.failures = (), 10**9, "forward", Record()

    def fail(self):
        self.failures.append(torch.distributed.get_rank())
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def forward(self, x):
        if torch.distributed.get_rank() in self.ranks and len(x) > self.limit and torch.is_grad_enabled():
            if self.where == "forward":
                self.fail()
            x = x * 1
            x.register_hook(lambda gradient: self.fail())
        return x


class Module(L.LightningModule):
    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.first, self.norm, self.last, self.hungry = nn.Linear(6, 16), norm(16), nn.Linear(16, 3), Hungry()
        self.unused, self.exchanges = nn.Linear(3, 3), False

    def training_step(self, batch, batch_idx):
        z = self.norm(self.first(batch[0]).relu())
        if self.exchanges:
            torch.distributed.all_reduce(torch.zeros(1))
        loss = F.cross_entropy(self.last(self.hungry(z)), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for n, p in self.named_parameters() if "unused" not in n], 0.1, momentum=0.9)


def train(module, memsave, **options):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(46, 6, generator=generator, dtype=torch.float64)
    dataset = TensorDataset(x, torch.randint(0, 3, (46,), generator=generator))
    options = {"strategy": DDPStrategy(find_unused_parameters=True), "max_epochs": 2, **options}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        precision="64-true",
        callbacks=[memsave] if memsave else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(dataset, batch_size=7))
    return trainer


def make(norm=nn.LayerNorm, ranks=(), where="forward", limit=2):
    torch.manual_seed(0)
    module = Module(norm)
    module.hungry.ranks, module.hungry.where, module.hungry.limit = ranks, where, limit
    return module


def assert_same(first, second, rtol=1e-12):
    for (name, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-14, msg=lambda m, name=name: f"{name}: {m}")


def auto(**options):
    return MemSave(microbatch=Microbatching(reduction="mean", **options))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = None
    for options in ({}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}):
        plain = make()
        plain_trainer = train(plain, None, **options)
        rank = plain_trainer.global_rank
        for ranks, where in (((1,), "forward"), ((1,), "backward"), ((0, 1), "backward")):
            module, memsave = make(ranks=ranks, where=where), auto()
            trainer = train(module, memsave, **options)
            assert_same(module, plain)
            difference = plain_trainer.callback_metrics["loss"] - trainer.callback_metrics["loss"]
            assert abs(float(difference)) < 1e-12
            # Each process cuts its own batches.
            assert memsave.report.microbatch_size == (2 if rank in ranks else None)
            assert bool(memsave.report.num_oom_recovered) == (rank in ranks) == bool(module.hungry.failures)

    # Nothing goes wrong: buffers go out from rank 0 as DDP would have sent them, with accumulation as well.
    for options in ({}, {"accumulate_grad_batches": 2}):
        plain, ours = make(nn.BatchNorm1d), make(nn.BatchNorm1d)
        train(plain, None, **options)
        train(ours, auto(), **options)
        assert_same(ours, plain)

    # A step that exchanges something cannot be run again by one process alone.
    module = make(ranks=(0, 1))
    module.exchanges = True
    with pytest.raises(OutOfMemoryUnrecoverableError, match="processes have exchanged something"):
        train(module, auto())

    # By default it stays off, as averaging late costs time; asked for, it is refused where it cannot work.
    memsave = MemSave()
    train(make(), memsave)
    assert memsave.report.num_oom_recovered is None
    hooked = DDPStrategy(ddp_comm_hook=fp16_compress_hook, find_unused_parameters=True)
    with pytest.raises(ValueError, match="a DDP communication hook"):
        train(make(), auto(), strategy=hooked)
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        train(make(nn.SyncBatchNorm), auto())
    if rank == 0:
        print("ok", file=sys.stderr)
    # Together, and before Python ends: once a process aborted while it ended, perhaps in a thread of gloo.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def spawned() -> None:
    """The same where Lightning starts processes by pickling the trainer."""
    warnings.simplefilter("ignore")
    plain, ours = make(), make(ranks=(1,))
    options = {"strategy": "ddp_spawn_find_unused_parameters_true", "max_epochs": 1}
    train(plain, None, **options)
    trainer = train(ours, auto(), **options)
    assert_same(ours, plain)
    assert trainer.callback_metrics["memsave/peak_bytes"] > 0
    print("ok", file=sys.stderr)


if __name__ == "__main__":
    spawned() if "spawn" in sys.argv else main()
