"""Two processes of DDP on CPU (gloo), plain and with MemSave; run by `test_distributed.py`. Rank 0 prints `ok`."""

from __future__ import annotations

import sys
import warnings

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import ActivationCompression, Checkpointing, MemSave
from lightning_memsave.core.report import CATEGORIES


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.LayerNorm(80), nn.Linear(80, 80), nn.GELU()) for _ in range(2))
        self.net = nn.Sequential(nn.Linear(6, 80), *blocks, nn.Linear(80, 3))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def train(memsave, strategy, **options):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    precision = options.pop("precision", "64-true")
    dtype = torch.float64 if precision == "64-true" else torch.float32
    dataset = TensorDataset(
        torch.randn(46, 6, generator=generator, dtype=torch.float64).to(dtype),
        torch.randint(0, 3, (46,), generator=generator),
    )
    module = options.pop("module", None) or Module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        precision=precision,
        strategy=strategy,
        callbacks=[memsave] if memsave else [],
        logger=options.pop("logger", False),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(dataset, batch_size=7))
    return module, trainer


def assert_ranks_agree(module):
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    both = [torch.zeros_like(flat) for _ in range(2)]
    torch.distributed.all_gather(both, flat)
    assert torch.equal(*both), "ranks have drifted apart"


class Rows(Logger):
    name, version = "rows", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_hyperparams(self, *_, **__):
        pass

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)


class Uneven(Module):
    """The second process takes more."""

    def training_step(self, batch, batch_idx):
        more = torch.zeros(1000 * (1 + self.global_rank), 100)
        return super().training_step(batch, batch_idx) + 0 * more.sum()


def check_final_figures_are_those_of_the_largest_rank():
    memsave, rows = MemSave(), Rows()
    _, trainer = train(memsave, "ddp", logger=rows, module=Uneven())
    largest = trainer.callback_metrics["memsave/peak_bytes"].item()
    assert largest >= 8e5
    if trainer.is_global_zero:
        assert memsave.report.peak_bytes < largest
        assert rows.rows[-1]["memsave/peak_bytes"] == largest
        assert sum(rows.rows[-1][f"memsave/peak_{category}_bytes"] for category in CATEGORIES) == largest


def check_lean_weights_and_state():
    plain, _ = train(None, "ddp", precision="bf16-mixed")
    for settings in ({"precision": "bf16-sr"}, {"precision": "bf16+8", "optimizer_state": "8bit", "microbatch": 3}):
        lowered, _ = train(MemSave(**settings), "ddp", precision="32-true")
        assert_ranks_agree(lowered)
        for a, b in zip(plain.parameters(), lowered.parameters(), strict=True):
            assert (a - b).norm() < 0.01 * a.norm() + 1e-3
    for state in ("8bit", "4bit"):
        assert_ranks_agree(train(MemSave(optimizer_state=state), "ddp")[0])


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for options in ({}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}):
        plain, plain_trainer = train(None, "ddp", **options)
        for strategy in ("ddp", "memsave", "memsave_ddp"):
            memsave = MemSave(microbatch=3, checkpointing="blocks")
            ours, trainer = train(memsave, strategy, **options)
            for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
            difference = plain_trainer.callback_metrics["loss"] - trainer.callback_metrics["loss"]
            assert abs(float(difference)) < 1e-12
            assert memsave.report.microbatch_size == 3
            gradients = sum(p.numel() * 8 for p in ours.parameters())
            # One copy in DDP's buckets all the time; the other one comes and goes.
            assert memsave.report.by_category["gradients"] >= gradients, memsave.report
            # The headline is the maximum over the ranks.
            assert trainer.callback_metrics["memsave/peak_bytes"].item() >= memsave.report.peak_bytes

    for checkpointing in ("sqrt", "recursive", Checkpointing(budget=0.95)):
        memsave = MemSave(checkpointing=checkpointing)
        planned, trainer = train(memsave, "ddp")
        for a, b in zip(train(None, "ddp")[0].parameters(), planned.parameters(), strict=True):
            assert torch.equal(a, b)
        (summary,) = [a.summary for a in memsave.report.applied if a.technique == "checkpointing"]
        summaries = [""] * 2
        torch.distributed.all_gather_object(summaries, summary)
        assert summaries[0] == summaries[1], summaries

    exact, _ = train(MemSave(activations=ActivationCompression(min_numel=1)), "ddp")
    for a, b in zip(train(None, "ddp")[0].parameters(), exact.parameters(), strict=True):
        assert torch.equal(a, b)
    coded, _ = train(MemSave(activations=ActivationCompression(codecs=("int8",), min_numel=1)), "ddp")
    assert_ranks_agree(coded)

    check_lean_weights_and_state()
    check_final_figures_are_those_of_the_largest_rank()
    with pytest.raises(ValueError, match="static graph"):
        train(MemSave(microbatch=3), L.pytorch.strategies.DDPStrategy(static_graph=True))
    if torch.distributed.get_rank() == 0:
        print("ok", file=sys.stderr)


if __name__ == "__main__":
    main()
