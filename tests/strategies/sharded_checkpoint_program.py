"""Checkpoints of FSDP2 with low-bit state and 24-bit weights, run by `test_sharded_checkpoints.py`.

`save FOLDER NUM`: NUM processes train, with `MemSave` and as plain Lightning, and write sharded and whole checkpoints.
`load FOLDER NUM WRITERS`: NUM processes read what WRITERS wrote, each kind with `MemSave` and as plain Lightning.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave

NUM_STEPS = 4
MOMENTS = ("exp_avg", "exp_avg_sq")
NOISE_8BIT, NOISE_24BIT = 0.02, 2.0**-15
"""What a rounding may cost, of the largest moment of a parameter, and of a weight."""


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 101)) for _ in range(2))
        self.back = nn.ModuleList(nn.Linear(101, 64) for _ in range(2))
        self.gate, self.head = nn.Linear(64, 4096 // 64, bias=False), nn.Linear(64, 7)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.head.weight, DTensor):
            norms = (block[0] for block in self.blocks)  # by themselves, so that they stay float32
            for part in (*norms, *self.blocks, *self.back, self.gate, self.head):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        (x,) = batch
        for block, back in zip(self.blocks, self.back, strict=True):
            x = x + back(F.gelu(block(x)))
        return F.cross_entropy(self.head(x * torch.sigmoid(self.gate(x))).float(), batch[0].sum(1).long() % 7)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 3e-3)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def contents(trainer: L.Trainer) -> dict[str, dict[str, Tensor]]:
    """Weights in float32, corrections joined, and moments, by the names of parameters."""
    module, optimizer = trainer.lightning_module, trainer.optimizers[0]
    found = {"weight": {name: whole(value).float() for name, value in module.state_dict().items()}}
    if dist.is_initialized():
        options = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(trainer.strategy.model, optimizer, options=options)["state"]
    else:
        names = [name for name, _ in module.named_parameters()]
        state = {names[number]: values for number, values in optimizer.state_dict()["state"].items()}
    for moment in MOMENTS:
        found[moment] = {name: whole(values[moment]) for name, values in state.items()}
    return found


class Watch(L.Callback):
    """What was there before the first step and after the last one; writes a checkpoint at the end."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def on_train_start(self, trainer, module) -> None:
        self.at_start = contents(trainer) if trainer.global_step else None
        own = vars(trainer.optimizers[0]).values()
        self.num_steps = {each.num_steps for each in own if hasattr(each, "num_steps")}

    def on_train_end(self, trainer, module) -> None:
        if self.path is not None:
            trainer.save_checkpoint(self.path)
        self.at_end = contents(trainer)


def run(is_ours: bool, is_sharded: bool, num_processes: int, max_steps: int, save=None, load=None) -> Watch:
    L.seed_everything(0, verbose=False)
    watch = Watch(save)
    memsave = [MemSave(optimizer_state="8bit", precision="bf16+8", microbatch=False)] if is_ours else []
    strategy = ModelParallelStrategy(num_processes, 1, save_distributed_checkpoint=is_sharded)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_processes,
        strategy=strategy if num_processes > 1 else "auto",
        max_steps=max_steps,
        callbacks=[watch, *memsave],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
    trainer.fit(Module(), DataLoader(data, batch_size=8 // num_processes), ckpt_path=load)
    return watch


def forms(num_processes: int) -> tuple[bool, ...]:
    return (False, True) if num_processes > 1 else (False,)


def name_of(is_ours: bool, is_sharded: bool, num_processes: int) -> str:
    return f"{'ours' if is_ours else 'plain'}-{'sharded' if is_sharded else 'whole'}-{num_processes}"


def save(folder: Path, num_processes: int) -> None:
    for is_ours, is_sharded in itertools.product((True, False), forms(num_processes)):
        name = name_of(is_ours, is_sharded, num_processes)
        watch = run(is_ours, is_sharded, num_processes, NUM_STEPS, save=folder / name)
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            torch.save(watch.at_end, folder / f"{name}.contents")


def load(folder: Path, num_processes: int, written_by: int) -> None:
    sharded = forms(num_processes) if written_by > 1 else (False,)
    for was_ours, is_sharded, is_ours in itertools.product((True, False), sharded, (True, False)):
        name = name_of(was_ours, is_sharded, written_by)
        saved = torch.load(folder / f"{name}.contents", weights_only=True)
        watch = run(is_ours, is_sharded, num_processes, NUM_STEPS + 2, load=folder / name)
        assert watch.at_start is not None
        case = f"{name}, read by {'ours' if is_ours else 'plain'} in {num_processes}"
        is_exact = not is_ours or (was_ours and num_processes == written_by)
        for kind, values in saved.items():
            for key, value in values.items():
                found = watch.at_start[kind][key]
                if is_exact or (kind == "weight" and was_ours):
                    assert torch.equal(found, value), (case, kind, key)
                else:
                    allowed = NOISE_24BIT * value.abs() if kind == "weight" else NOISE_8BIT * value.abs().max()
                    off = float(((found - value).abs() - allowed).max())
                    assert off <= 1e-12, (case, kind, key, off)
        assert watch.num_steps == ({NUM_STEPS} if is_ours else set()), (case, watch.num_steps)
        assert all(value.isfinite().all() for values in watch.at_end.values() for value in values.values())


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    stage, folder, num_processes, *written_by = sys.argv[1:]
    if stage == "save":
        save(Path(folder), int(num_processes))
    else:
        load(Path(folder), int(num_processes), int(*written_by))
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        print("ok", file=sys.stderr)


if __name__ == "__main__":
    main()
