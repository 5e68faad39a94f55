"""DDP and FSDP2 on several processes (gloo, CPU): peak, gradients, state, time, and how far weights end up.

Each setting trains the same GPT for some steps from the same weights on the same batches. Bytes are of one process.
Time is its CPU time over that of the plain setting of its strategy, medians of steps on one thread; gloo reduces on
threads of its own, which count. The distance is of all weights, over their length, from those of plain DDP.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from benchmarks.harness.measurement import environment, save_rows
from benchmarks.models.subjects import PlainGPT, next_token_loss
from lightning_memsave import MemSave, OptimizerState

LAYERS, WIDTH, BATCH = 4, 256, (4, 64)
NUM_STEPS = 12
MODEL = f"GPT of plain modules, {LAYERS} layers of {WIDTH}, batch {BATCH[0]} x {BATCH[1]} per process, AdamW"
NUM_PROCESSES = (2, 4)
RELEASED = OptimizerState(first_moment="32bit", gradients="release")
CLIPPED = OptimizerState(first_moment="32bit", gradients="release", norm_clipping="two-pass")
LATE = OptimizerState(first_moment="32bit", gradients="release", norm_clipping="previous-step")
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "DDP": {
        "plain": {},
        "release": {"optimizer_state": RELEASED},
        "8bit": {"optimizer_state": "8bit"},
        "8bit, release": {"optimizer_state": OptimizerState(gradients="release")},
        "microbatch 2": {"microbatch": 2},
        "microbatch 2, into-state": {
            "microbatch": 2,
            "optimizer_state": OptimizerState(first_moment="32bit", gradients="into-state"),
        },
        "clipped by norm": {"max_norm": 0.1},
        "clipped by norm, release in two passes": {"max_norm": 0.1, "optimizer_state": CLIPPED},
        "clipped by the previous norm, release": {"max_norm": 0.1, "optimizer_state": LATE},
    },
    "FSDP2": {
        "plain": {},
        "release": {"optimizer_state": RELEASED},
        "8bit": {"optimizer_state": "8bit"},
        "4bit-factored": {"optimizer_state": OptimizerState(first_moment="4bit", second_moment="factored")},
        "bf16+8, 8bit, release": {"precision": "bf16+8", "optimizer_state": OptimizerState(gradients="release")},
        "clipped by norm": {"max_norm": 0.1},
        "clipped by norm, release in two passes": {"max_norm": 0.1, "optimizer_state": CLIPPED},
    },
}


class Module(L.LightningModule):
    def __init__(self, is_sharded: bool) -> None:
        super().__init__()
        self.net, self.is_sharded = PlainGPT(LAYERS, WIDTH, 4, BATCH[1], dropout=0.0), is_sharded
        self.seconds: list[float] = []

    def configure_model(self) -> None:
        for part in (*self.net.blocks, self.net) if self.is_sharded else ():
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return next_token_loss(self.net(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.began = time.process_time()

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        self.seconds.append(time.process_time() - self.began)


def train(strategy: str, slots: dict[str, Any]) -> dict[str, Any]:
    slots = dict(slots)
    max_norm = slots.pop("max_norm", None)
    torch.manual_seed(0)
    module = Module(strategy == "FSDP2")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (NUM_STEPS * dist.get_world_size() * BATCH[0], BATCH[1]), generator=generator)
    memsave = MemSave("measure", **slots, summary=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        max_epochs=1,
        strategy="memsave_fsdp" if module.is_sharded else DDPStrategy(),
        callbacks=[memsave],
        gradient_clip_val=max_norm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(ids, batch_size=BATCH[0]))
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters()]
    split = memsave.report.by_category
    return {
        "peak_bytes": memsave.report.peak_bytes,
        **{f"{name}_bytes": split[name] for name in ("weights", "gradients", "optimizer_state", "temporary")},
        "cpu_seconds": statistics.median(module.seconds[5:]),  # those before are measured
        "loss_class": memsave.report.loss_class,
        "weights": torch.cat([p.detach().flatten().float() for p in whole]),
    }


def worker() -> None:
    """Train every setting in this process, which torchrun has started; rank 0 prints a row as JSON for each."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    plain: torch.Tensor | None = None
    for strategy, settings in SETTINGS.items():
        baseline: dict[str, Any] = {}
        for setting, slots in settings.items():
            found = train(strategy, slots)
            weights, seconds = found.pop("weights"), found.pop("cpu_seconds")
            plain = weights if plain is None else plain
            baseline = baseline or {"peak": found["peak_bytes"], "seconds": seconds}
            row = {
                "benchmark": "distributed",
                "model": MODEL,
                "setting": f"{strategy}, {setting}",
                "n": dist.get_world_size(),
                **found,
                "factor": baseline["peak"] / found["peak_bytes"],
                "cpu_time_ratio": seconds / baseline["seconds"],
                "quality": "distance of weights from plain DDP's, over their length",
                "quality_value": float((weights - plain).norm() / plain.norm()),
            }
            if dist.get_rank() == 0:
                print(f"row {json.dumps(row)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", action="store_true", help="one of the processes, by torchrun")
    if parser.parse_args().worker:
        worker()
        return
    rows: list[dict[str, Any]] = []
    for num in NUM_PROCESSES:
        launch = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num}", "-m", __spec__.name)
        command = [sys.executable, *launch, "--worker"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("row "):
                    rows.append({**json.loads(line.removeprefix("row ")), **environment()})
                    print({k: v for k, v in rows[-1].items() if k not in environment()}, flush=True)
        if process.returncode:
            sys.exit(process.returncode)
    save_rows("distributed", rows)


if __name__ == "__main__":
    main()
