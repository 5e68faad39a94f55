"""Two processes of DDP on CPU (gloo) whose gradients end in backward. Rank 0 prints `ok`.

The referee is DDP that keeps its gradients, in the same run.
"""

from __future__ import annotations

import sys
import warnings

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave, OptimizerState, Recipe
from lightning_memsave.lightning_compat import is_overridden
from tests.strategies.ddp_program import assert_ranks_agree


class Net(L.LightningModule):
    """Layers of which a process may leave out some; with running statistics."""

    left_out: tuple[tuple[int, ...], ...] = ((), ())
    """Numbers of blocks that each rank leaves out, in every second batch."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 80), nn.BatchNorm1d(80)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(80, 80), nn.Tanh()) for _ in range(4))
        self.last, self.optimizer = nn.Linear(80, 3), optimizer

    def training_step(self, batch, batch_idx):
        self.was_wrapped = self.trainer.strategy.model is not self
        h = self.norm(self.first(batch[0]))
        order = range(4) if batch_idx != 1 else range(4)[::-1]
        for number in order:
            if batch_idx % 2 or number not in self.left_out[self.global_rank]:
                h = h + self.blocks[number](h)
        loss = F.cross_entropy(self.last(h), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(self.parameters(), 1e-2)
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Partly(Net):
    left_out = ((1, 2), (2, 3))


class NeverAll(Net):
    left_out = ((2,), (2,))


def train(module, memsave, strategy="ddp", batch_size=8, **options):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        strategy=strategy,
        callbacks=[memsave] if memsave else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    torch.manual_seed(trainer.global_rank)  # weights differ until rank 0's are sent
    made = module()
    loader = DataLoader(data, batch_size=batch_size)
    trainer.fit(made, loader, loader if is_overridden(made, "validation_step") else None)
    return made, trainer


def small_buckets():
    """DDP with buckets of one block."""
    return DDPStrategy(bucket_cap_mb=0.026)


def assert_same_bits(a, b):
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


def check_equal_to_ddp() -> None:
    """Bits of DDP that keeps gradients, with running statistics, clipping by value, and low-bit state."""
    clip = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    for module in (Net, lambda: Net("SGD")):
        for options in ({}, clip):
            kept = OptimizerState(first_moment="8bit", min_size=1)
            released = OptimizerState(first_moment="8bit", min_size=1, gradients="release")
            low_bit, _ = train(module, MemSave(microbatch=False, optimizer_state=kept), **options)
            for strategy in ("ddp", "memsave_ddp", small_buckets()):
                ours, _ = train(module, MemSave(optimizer_state=released), strategy, **options)
                assert low_bit.was_wrapped
                assert not ours.was_wrapped
                assert_same_bits(ours, low_bit)
            plain, plain_trainer = train(module, None, **options)
            released = OptimizerState(first_moment="32bit", gradients="release")
            ours, trainer = train(module, MemSave(optimizer_state=released), **options)
            assert_same_bits(ours, plain)
            assert trainer.callback_metrics["loss"] == plain_trainer.callback_metrics["loss"]


def check_clipped_by_norm() -> None:
    """By the norm of the averages, which two passes exchange."""
    options = {"gradient_clip_val": 0.01}
    plain, _ = train(Net, None, **options)
    released = OptimizerState(first_moment="32bit", gradients="release", norm_clipping="two-pass")
    for strategy in ("ddp", small_buckets()):
        assert_same_bits(train(Net, MemSave(optimizer_state=released), strategy, **options)[0], plain)


def check_unused() -> None:
    """What one process uses is averaged with zeros, what none uses keeps its moments, and else it raises."""
    released = OptimizerState(first_moment="32bit", gradients="release")
    plain, _ = train(Partly, None, "ddp_find_unused_parameters_true")
    ours, _ = train(Partly, MemSave(optimizer_state=released), "ddp_find_unused_parameters_true")
    assert_same_bits(ours, plain)
    with pytest.raises(RuntimeError, match=r"had no gradient in a backward.*find_unused"):
        train(NeverAll, MemSave(optimizer_state=released))


def check_bytes() -> None:
    """No copy of all gradients: of buckets that are full, averaged and on their way."""
    plain = MemSave("measure")
    module, _ = train(Net, plain, small_buckets())
    gradients = sum(p.nbytes for p in module.parameters())
    assert plain.report.by_category["gradients"] >= gradients
    released = MemSave(optimizer_state=OptimizerState(first_moment="32bit", gradients="release"))
    train(Net, released, small_buckets())
    most = 3 * sum(p.nbytes for p in module.blocks[0].parameters())
    split = released.report.by_category
    assert split["gradients"] + split["temporary"] <= most + 16 * 80 * 80
    assert released.report.peak_bytes < plain.report.peak_bytes - gradients // 2, (released.report, plain.report)


def check_into_state() -> None:
    """Into the momentum of SGD: as microbatches whose gradients are kept. Different counts are refused."""
    into = OptimizerState(first_moment="32bit", gradients="into-state")
    for options in ({}, {"accumulate_grad_batches": 2}):
        kept, _ = train(lambda: Net("SGD"), MemSave(microbatch=4), **options)
        ours, _ = train(lambda: Net("SGD"), MemSave(microbatch=4, optimizer_state=into), **options)
        assert not ours.was_wrapped
        assert_ranks_agree(ours)
        for a, b in zip(kept.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    low = OptimizerState(first_moment="8bit", min_size=1, gradients="into-state")
    assert_ranks_agree(train(Net, MemSave(microbatch=4, optimizer_state=low))[0])


class Shuffled(Net):
    """Its optimizer has the parameters in another order in each process."""

    def configure_optimizers(self):
        parameters = list(self.parameters())
        return torch.optim.AdamW(parameters[:: -1 if self.global_rank else 1], 1e-2)


class Sliced(Net):
    """A parameter and a buffer whose elements do not lie side by side; running statistics differ in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("part", torch.randn(6, 9)[:, ::2])
        self.first.weight = nn.Parameter(torch.randn(80, 12)[:, ::2])

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0] * self.part.sum(1).tanh(), batch[1]), batch_idx)

    def validation_step(self, batch, batch_idx):
        mean = self.norm.running_mean
        means = [torch.zeros_like(mean) for _ in range(2)]
        torch.distributed.all_gather(means, mean)
        assert torch.equal(*means), "running statistics are those of the first process"
        self.log("mean", mean.sum(), sync_dist=True)


class Ignores(Net):
    """What DDP is told to leave alone: a buffer and a parameter of each process's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.randn(3))
        self._ddp_params_and_buffers_to_ignore = ["own", "last.bias"]


class Twice(Net):
    def backward(self, loss):
        loss.backward(retain_graph=True)
        loss.backward()


def check_what_is_exchanged() -> None:
    """As DDP does it, whatever the order, the strides and the exceptions; a second backward is refused."""
    released = OptimizerState(first_moment="32bit", gradients="release")
    for module in (Shuffled, Sliced, Ignores):
        plain, plain_trainer = train(module, None, small_buckets())
        ours, trainer = train(module, MemSave(optimizer_state=released), small_buckets())
        assert_same_bits(ours, plain)
        assert trainer.callback_metrics.get("mean") == plain_trainer.callback_metrics.get("mean")
        if module is not Ignores:
            assert_ranks_agree(ours)
    for gradients in ("release", "into-state"):
        state = OptimizerState(first_moment="32bit", gradients=gradients)
        with pytest.raises(RuntimeError, match=r"second (gradient|backward)"):
            train(Twice, MemSave(microbatch=False, optimizer_state=state))


class WithLBFGS(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.1)


def check_left_out() -> None:
    """A default that is left out leaves DDP around the model; a hook of DDP's is refused."""
    released = OptimizerState(first_moment="32bit", gradients="release")
    mine = Recipe("mine", (released,), by_default=(OptimizerState,))
    ours, _ = train(WithLBFGS, MemSave(mine))
    assert ours.was_wrapped
    assert_same_bits(ours, train(WithLBFGS, None)[0])
    hook = DDPStrategy(ddp_comm_hook=default_hooks.fp16_compress_hook)
    with pytest.raises(ValueError, match=r"gradient release cannot be combined with a DDP communication hook"):
        train(Net, MemSave(optimizer_state=released), hook)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for check in (
        *(check_equal_to_ddp, check_clipped_by_norm, check_unused, check_bytes, check_into_state),
        *(check_what_is_exchanged, check_left_out),
    ):
        check()
        if torch.distributed.get_rank() == 0:
            print(check.__name__, file=sys.stderr)
    if torch.distributed.get_rank() == 0:
        print("ok", file=sys.stderr)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
