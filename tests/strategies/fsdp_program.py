"""Two processes of FSDP2 on CPU (gloo), plain and with MemSave; run by `test_distributed.py`. Rank 0 prints `ok`."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import ActivationCompression, MemSave, OptimizerState


class Module(L.LightningModule):
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        self.net = nn.Sequential(nn.Linear(6, 32), *blocks)
        self.head = nn.Linear(32, 3)

    def configure_model(self) -> None:
        if not isinstance(self.head, FSDPModule):
            norms = (block[0] for block in self.net[1:])
            for part in (*norms, *self.net[1:], self.net, self.head):
                fully_shard(part, mesh=self.device_mesh["data_parallel"], **self.options)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.head(self.net(batch[0])), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self.head(self.net(batch[0])), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Dtypes(L.Callback):
    """The dtypes of the weights, and of those in the model's norms, while it trains."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        self.found = {p.dtype for p in module.parameters()}
        self.are_shards = all(isinstance(p, DTensor) for p in module.parameters())


def train_after_validation() -> None:
    """Validation leaves parameters gathered, and a fit leaves gradients: the next fit lowers shards all the same."""
    torch.manual_seed(0)
    module, data = Module(), DataLoader(TensorDataset(torch.randn(28, 6), torch.randint(0, 3, (28,))), batch_size=7)
    for _ in range(2):
        dtypes, memsave = Dtypes(), MemSave(precision="bf16+8", optimizer_state=OptimizerState(min_size=1))
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            max_epochs=1,
            strategy="memsave_fsdp",
            callbacks=[memsave, dtypes],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.validate(module, data, verbose=False)
        trainer.fit(module, data)
        assert dtypes.found == {torch.bfloat16, torch.float32}
        assert dtypes.are_shards
        assert {p.dtype for p in module.parameters()} == {torch.float32}


def train(memsave, strategy, equal_rows=(), accumulated=1, max_norm=None):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 6, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    for number in equal_rows:
        x[number], y[number] = x[0], y[0]
    dataset = TensorDataset(x, y)
    module = Module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=max_norm,
        strategy=strategy,
        callbacks=[memsave] if memsave else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(dataset, batch_size=7, shuffle=False))
    parameters = [p.detach() for p in module.parameters()]
    assert sum(p.to_local().numel() for p in parameters) < 0.6 * sum(p.numel() for p in parameters)
    return [p.full_tensor() for p in parameters], trainer


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    plain, plain_trainer = train(None, ModelParallelStrategy(2, 1))
    for strategy in (ModelParallelStrategy(2, 1), "memsave_fsdp"):
        memsave = MemSave(microbatch=3, checkpointing="blocks")
        ours, trainer = train(memsave, strategy)
        for a, b in zip(plain, ours, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert abs(float(plain_trainer.callback_metrics["loss"] - trainer.callback_metrics["loss"])) < 1e-5
        assert memsave.report.microbatch_size == 3
        assert sum(memsave.report.by_category.values()) == memsave.report.peak_bytes > 0

    # Batches of equal samples tell little of the loss; of the third ones, only that of rank 0 is one.
    equal_rows = (*range(28), *range(28, 40, 2))
    plain_of_equal, _ = train(None, ModelParallelStrategy(2, 1), equal_rows)
    cut, _ = train(MemSave(microbatch=3), "memsave_fsdp", equal_rows)
    for a, b in zip(plain_of_equal, cut, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    exact, _ = train(MemSave(activations=ActivationCompression(min_numel=1)), "memsave_fsdp")
    assert all(torch.equal(a, b) for a, b in zip(plain, exact, strict=True))
    memsave = MemSave(activations=ActivationCompression(codecs=("int8",), min_numel=1))
    coded, _ = train(memsave, "memsave_fsdp")
    assert 0 < max(float((a - b).abs().max()) for a, b in zip(plain, coded, strict=True)) < 0.05
    assert "int8" in memsave.report.applied[-1].summary

    with pytest.raises(ValueError, match=r"fully_shard.*memsave_fsdp"):  # Lightning's sizes: one shard on one node
        train(MemSave(), ModelParallelStrategy())
    with pytest.raises(ValueError, match=r"loss scaling.*skip the same steps"):
        train(MemSave(precision="fp16-scaled"), "memsave_fsdp")
    low_bit = OptimizerState(min_size=1, keep_norms_32bit=False)
    ends = {}
    for gradients in ("keep", "release"):
        memsave = MemSave(optimizer_state=replace(low_bit, gradients=gradients))
        ends[gradients], trainer = train(memsave, "memsave_fsdp")
        (state, *_) = trainer.optimizers[0].state.values()
        assert type(state["momentum_buffer"]).__name__ == "QuantizedMoment"
        assert any("8-bit state for 12 of 12 parameters" in each.summary for each in memsave.report.applied), (
            memsave.report.applied
        )
    assert all(torch.equal(a, b) for a, b in zip(ends["keep"], ends["release"], strict=True))
    Module.options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}  # on CPU it changes nothing
    in_host_memory, _ = train(memsave, "memsave_fsdp")
    assert all(torch.equal(a, b) for a, b in zip(in_host_memory, ends["release"], strict=True))
    Module.options = {}
    assert 0 < max(float((a - b).abs().max()) for a, b in zip(plain, ends["keep"], strict=True)) < 0.05
    clipped, _ = train(None, ModelParallelStrategy(2, 1), max_norm=0.1)
    two_pass = OptimizerState(first_moment="32bit", gradients="release", norm_clipping="two-pass")
    released, _ = train(MemSave(optimizer_state=two_pass), "memsave_fsdp", max_norm=0.1)
    assert all(torch.equal(a, b) for a, b in zip(clipped, released, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(plain, released, strict=True))
    into_state, _ = train(
        MemSave(optimizer_state=replace(low_bit, gradients="into-state"), microbatch=3), "memsave_fsdp"
    )
    assert max(float((a - b).abs().max()) for a, b in zip(plain, into_state, strict=True)) < 0.05
    train_after_validation()
    with pytest.raises(ValueError, match=r"into-state.*under FSDP2.*microbatch="):
        train(MemSave(optimizer_state=OptimizerState(gradients="into-state")), "memsave_fsdp", accumulated=2)
    if torch.distributed.get_rank() == 0:
        print("ok", file=sys.stderr)


if __name__ == "__main__":
    main()
