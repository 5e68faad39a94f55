"""Processes of FSDP2 on CPU (gloo) of which some run out of memory; run by `test_distributed.py`.

Rank 0 prints `ok`. With `end PHASE RANK`, that rank cannot go on, and each rank prints the error that ends it; `alone`
is a run of one process.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from dataclasses import replace
from typing import ClassVar

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import ActivationCompression, MemSave, Microbatching
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError
from lightning_memsave.torch_internals.sharded_parameters import free_gathered

NUM_BLOCKS, NUM_BATCHES = 3, 4


class Failing(torch.autograd.Function):
    """Raises in forward or in backward of one block, where it is armed; once, or above a number of samples."""

    armed: tuple[str, int] | None = None
    limit: int | None = None
    failures: ClassVar[list[tuple[str, int]]] = []

    @classmethod
    def raise_if_armed(cls, where, num_samples):
        if cls.armed != where or (cls.limit is not None and num_samples <= cls.limit):
            return
        if cls.limit is None:
            cls.armed = None
        cls.failures.append(where)
        raise torch.OutOfMemoryError("CUDA out of memory.")

    @staticmethod
    def forward(ctx, x, block):
        ctx.block = block
        if torch.is_grad_enabled() or x.requires_grad:
            Failing.raise_if_armed(("forward", block), len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        Failing.raise_if_armed(("backward", ctx.block), len(gradient))
        return gradient, None


class Block(nn.Module):
    def __init__(self, number: int, dropout: float) -> None:
        super().__init__()
        self.number, self.norm, self.layer = number, nn.LayerNorm(16), nn.Linear(16, 16)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.num_calls += 1
        return x + self.dropout(Failing.apply(torch.tanh(self.layer(self.norm(x))), self.number))


class Net(nn.Module):
    def __init__(self, dropout: float, norm: type[nn.Module], exchanges: bool) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), norm(16)
        self.blocks = nn.ModuleList(Block(i, dropout) for i in range(NUM_BLOCKS))
        self.last, self.exchanges = nn.Linear(16, 3), exchanges

    def forward(self, x):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
            if self.exchanges:
                dist.all_reduce(torch.ones(1))
        return self.last(x)


class Module(L.LightningModule):
    def __init__(
        self, dropout=0.0, norm=nn.LayerNorm, exchanges=False, is_relational=False, norms_apart=False, late=()
    ) -> None:
        super().__init__()
        self.net, self.hooks = Net(dropout, norm, exchanges).double(), 0
        self.is_relational, self.norms_apart, self.late = is_relational, norms_apart, late

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            norms = [block.norm for block in self.net.blocks] if self.norms_apart else []
            for part in (*norms, *self.net.blocks, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        if self.late:
            self.net.set_requires_gradient_sync(batch_idx not in self.late)
        z = self.net(batch[0])
        loss = F.cross_entropy(z @ z.T, torch.arange(len(z))) if self.is_relational else F.cross_entropy(z, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def on_after_backward(self):
        self.hooks += 1

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return Optimizer(self.parameters(), 0.01)


class Optimizer(torch.optim.AdamW):
    def step(self, closure=None):
        def fails():
            loss = closure()
            Failing.raise_if_armed(("step", 0), 1)
            return loss

        return super().step(fails)


class Fail(L.Callback):
    """Arms the failure on some ranks, from one batch on."""

    def __init__(self, places, batch_idx=0, limit=None) -> None:
        self.places, self.batch_idx, self.limit = places, batch_idx, limit

    def on_train_start(self, trainer, module) -> None:
        Failing.armed, Failing.limit, Failing.failures = None, self.limit, []

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if batch_idx == self.batch_idx and trainer.current_epoch == 0:
            Failing.armed = self.places.get(trainer.global_rank)

    def on_train_end(self, trainer, module) -> None:
        Failing.armed = None


def data(num_samples=44):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (num_samples,), generator=generator))


OF_MODULE = ("dropout", "norm", "exchanges", "is_relational", "norms_apart", "late")


def train(*callbacks, validates=False, **options):
    torch.manual_seed(0)
    Failing.armed = None
    module = Module(**{name: options.pop(name) for name in OF_MODULE if name in options})
    torch.manual_seed(2)
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"strategy": "memsave_fsdp", "devices": 2, "max_epochs": 1, **options},
    )
    val = DataLoader(data(8), batch_size=4) if validates else None
    trainer.fit(module, DataLoader(data(), batch_size=7, shuffle=False), val)
    free_gathered(module)  # as validation leaves them
    assert all(isinstance(p, DTensor) for p in module.parameters())
    return ends(module), trainer


def ends(module):
    found = {n: p.detach().full_tensor().clone() for n, p in module.named_parameters()}
    return found | {n: b.clone() for n, b in module.named_buffers()}


def assert_equal(first, second, case):
    for name, value in first.items():
        assert torch.equal(value, second[name]), (case, name, (value - second[name]).abs().max())


def assert_close(first, second, case):
    for name, value in first.items():
        if "num_calls" not in name:
            torch.testing.assert_close(value, second[name], rtol=1e-9, atol=1e-12, msg=lambda m: f"{case}: {m}")


def halves(**options):
    """Recovery by microbatches alone: the first measure is half of the batch."""
    return MemSave(microbatch=Microbatching(reduction="mean", **options), activations=False)


def start_cut():
    """Microbatches of half of the batch, from the start."""
    return MemSave(microbatch=Microbatching(size=4, reduction="mean"), activations=False)


def matrix(cut) -> None:
    """Memory runs out once, on some ranks in some block: the bits are those of a run that was cut from the start."""
    for ranks, phase, block in itertools.product(((0,), (1,), (0, 1)), ("forward", "backward"), range(NUM_BLOCKS)):
        memsave, case = halves(), (ranks, phase, block)
        got, trainer = train(memsave, Fail(dict.fromkeys(ranks, (phase, block))))
        assert_equal(cut, got, case)
        assert memsave.report.num_oom_recovered == 1, case
        assert len(Failing.failures) == (trainer.global_rank in ranks), case
        assert trainer.lightning_module.hooks == NUM_BATCHES
    for places in ({0: ("forward", 1), 1: ("backward", 2)}, {0: ("backward", 0), 1: ("backward", 2)}):
        got, _ = train(halves(), Fail(places))
        assert_equal(cut, got, places)
        assert len(Failing.failures) == 1


def several_measures(plain) -> None:
    """By default: without the ledger, then activations recomputed, then smaller microbatches until they fit."""
    memsave = MemSave(microbatch=Microbatching(growth_interval=2))
    got, trainer = train(memsave, Fail({1: ("backward", 1)}, limit=2), validates=True, max_epochs=2)
    twice, _ = train(strategy=ModelParallelStrategy(2, 1), validates=True, max_epochs=2)
    assert_close(twice, got, "limit")
    on_rank_1 = trainer.global_rank == 1
    # Recomputed activations, microbatches of 4 and 2 samples, and again once these have grown, in a measured batch.
    assert memsave.report.num_oom_recovered >= 5
    assert len(Failing.failures) == (memsave.report.num_oom_recovered if on_rank_1 else 0)
    memsave = MemSave()
    got, _ = train(memsave, Fail({0: ("forward", 2)}, batch_idx=2), validates=True)
    assert_equal(plain, got, "default")
    assert memsave.report.num_oom_recovered == 1
    assert memsave.report.loss_class == "exact"


def other_steps() -> None:
    """A step that draws random numbers and exchanges something itself, logs, and metrics."""
    for phase in ("forward", "backward"):
        cut, of_cut = train(start_cut(), dropout=0.3, exchanges=True)
        got, trainer = train(halves(), Fail({1: (phase, 1)}), dropout=0.3, exchanges=True)
        assert_equal(cut, got, "dropout")
        assert of_cut.callback_metrics["loss_epoch"] == trainer.callback_metrics["loss_epoch"]


def exact_activations() -> None:
    """Norms that are recomputed are gathered once more; one sample has too few elements for that."""
    for norms_apart, phase in itertools.product((False, True), ("forward", "backward")):
        options = {"norms_apart": norms_apart, "activations": ActivationCompression(min_numel=40)}
        microbatch = Microbatching(reduction="mean")
        activations = options.pop("activations")
        cut, _ = train(MemSave(microbatch=replace(microbatch, size=4), activations=activations), **options)
        memsave = MemSave(microbatch=microbatch, activations=activations)
        got, _ = train(memsave, Fail({1: (phase, 1)}), **options)
        assert_equal(cut, got, (norms_apart, phase))
        assert memsave.report.num_oom_recovered == 1


def accumulation() -> None:
    """Gradients of earlier batches come back from their copies; without these, a try that adds to them is final."""
    cut, _ = train(start_cut(), accumulate_grad_batches=3)
    for phase, batch_idx in itertools.product(("forward", "backward"), (0, 1, 2)):
        # Whole batches before that one are those of a run that is cut later.
        first, _ = train(halves(), Fail({0: ("forward", 0)}, batch_idx), accumulate_grad_batches=3)
        got, _ = train(halves(), Fail({1: (phase, 1)}, batch_idx), accumulate_grad_batches=3)
        assert_equal(first, got, (phase, batch_idx))
        if batch_idx == 0:
            assert_equal(cut, got, (phase, batch_idx))
    expected = r"cannot be run again in rank [01]: the failed try has added to gradients.*rank 1, in the backward pass"
    with pytest.raises(OutOfMemoryUnrecoverableError, match=expected):
        train(MemSave(), Fail({1: ("backward", 1)}, batch_idx=1), accumulate_grad_batches=3)


def late_reduction() -> None:
    """Gradients that are not reduced yet cannot be put back; batches that go well are those of plain Lightning."""
    options = {"late": (0, 2), "accumulate_grad_batches": 2}
    plain, _ = train(strategy=ModelParallelStrategy(2, 1), **options)
    got, _ = train(halves(), **options)
    assert_close(plain, got, "late")
    expected = r"cannot be run again in rank [01]: the step accumulates gradients that FSDP2 has not reduced"
    for phase, ranks, batch_idx in itertools.product(("forward", "backward"), ((1,), (0, 1)), (0, 1)):
        with pytest.raises(OutOfMemoryUnrecoverableError, match=expected):
            train(halves(), Fail(dict.fromkeys(ranks, (phase, 1)), batch_idx), **options)
    got, _ = train(halves(), Fail({1: ("forward", 1)}, batch_idx=2), late=(0,), accumulate_grad_batches=2)
    cut, _ = train(halves(), Fail({0: ("forward", 0)}, batch_idx=2), accumulate_grad_batches=2)
    assert_close(cut, got, "reduced since")


def refused() -> None:
    with pytest.raises(ValueError, match=r"measured peaks cannot be combined with model parallel"):
        train(MemSave(microbatch="smallest"))
    with pytest.raises(ValueError, match=r"out-of-memory recovery cannot be combined with tensor parallelism"):
        train(MemSave(microbatch="auto"), strategy=ModelParallelStrategy(1, 2))
    with pytest.raises(ValueError, match="recovery cannot be combined with SyncBatchNorm"):
        train(MemSave(microbatch="auto"), norm=nn.SyncBatchNorm)
    expected = (
        r"every measure that processes take together.*`checkpointing=.*rank 1, in the forward pass of part 1 of 1"
    )
    with pytest.raises(OutOfMemoryUnrecoverableError, match=expected):
        train(MemSave(), Fail({1: ("forward", 1)}, limit=1), is_relational=True)


def end(where: str, rank: int) -> None:
    """One process cannot go on: each of them says why."""
    places = {rank: ("step", 0) if where == "step" else (where, 1)}
    try:
        train(MemSave(), Fail(places, batch_idx=1, limit=0))
    except OutOfMemoryUnrecoverableError as error:
        print(f"ended: {os.environ['RANK']}: {error}", file=sys.stderr, flush=True)
        os._exit(0)  # an error would have the launcher stop the other process before it speaks


def alone() -> None:
    """FSDP2 of one process begins anew after an error as well."""
    cut, _ = train(start_cut(), devices=1)
    for phase in ("forward", "backward"):
        got, _ = train(halves(), Fail({0: (phase, 1)}), devices=1)
        assert_equal(cut, got, phase)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "end" in sys.argv:
        end(sys.argv[2], int(sys.argv[3]))
        return
    if "alone" in sys.argv:
        alone()
    else:
        plain, _ = train(strategy=ModelParallelStrategy(2, 1), validates=True)
        cut, _ = train(start_cut())
        memsave = MemSave()
        whole, _ = train(memsave, validates=True)
        assert_close(plain, cut, "cut")
        assert_equal(plain, whole, "nothing fails")
        assert memsave.report.num_oom_recovered == 0
        exact_activations()
        matrix(cut)
        several_measures(plain)
        other_steps()
        accumulation()
        late_reduction()
        refused()
    if dist.get_rank() == 0:
        print("ok", file=sys.stderr)


if __name__ == "__main__":
    main()
