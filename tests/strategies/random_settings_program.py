"""Random settings on several processes of DDP and FSDP2 (gloo, CPU): `random_settings_program.py SEED SECONDS`.

Every wait is bounded. After each training all ranks have the same finite weights, near those of plain training where
the loss class is exact. What cannot be combined is refused, by all ranks alike. Rank 0 prints each run and, at the end,
`ok`.
"""

from __future__ import annotations

import datetime
import random
import sys
import time
import warnings
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave, MemSaveFSDPStrategy, OptimizerState

WAIT = datetime.timedelta(seconds=60)
FORMATS = (
    {},
    {"first_moment": "4bit"},
    {"second_moment": "factored"},
    {"first_moment": "fp8"},
    {"first_moment": "32bit"},
)


class Net(nn.Module):
    """Blocks with norms, of which one may be left out."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(12, 48), nn.LayerNorm(48), dropout
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48)) for _ in range(3)
        )
        self.head = nn.Linear(48, 5)

    def forward(self, x: torch.Tensor, left_out: int | None) -> torch.Tensor:
        h = self.norm(self.first(x))
        for number, block in enumerate(self.blocks):
            if number != left_out:
                h = h + F.dropout(block(h), self.dropout, self.training)
        return self.head(h)


class Module(L.LightningModule):
    """Trains it; says where it is."""

    def __init__(self, drawn: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.drawn, self.phase = Net(drawn["dropout"]), drawn, "setup"

    def configure_model(self) -> None:
        if self.drawn["strategy"] == "fsdp" and not isinstance(self.net.head.weight, DTensor):
            for part in (*self.net.blocks, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        self.phase = f"batch {batch_idx}"
        left_out = 1 if self.drawn["unused"] and (batch_idx + self.global_rank) % 2 else None
        loss = F.cross_entropy(self.net(batch[0], left_out), batch[1])
        self.log("loss", loss, sync_dist=self.drawn["sync"], on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        kind = self.drawn["optimizer"]
        if kind == "SGD":
            return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), 1e-3, foreach=self.drawn["foreach"])


def draw(rng: random.Random) -> dict[str, Any]:
    gradients = rng.choice(("keep", "keep", "release", "into-state"))
    formats = FORMATS if gradients == "keep" else (*FORMATS, {"first_moment": "32bit"})
    state = rng.choice((None, {**rng.choice(formats), "gradients": gradients, "min_size": rng.choice((1, 1000))}))
    if state is not None and gradients == "release" and rng.random() < 0.4:
        state["norm_clipping"] = rng.choice(("two-pass", "previous-step"))
    drawn = {
        "strategy": (strategy := rng.choice(("ddp", "fsdp"))),
        "unused": strategy == "ddp" and rng.random() < 0.3,
        "dropout": rng.choice((0.0, 0.2)),
        "sync": rng.random() < 0.5,
        "optimizer": rng.choice(("AdamW", "AdamW", "SGD")),
        "foreach": rng.choice((None, False)),
        "max_norm": rng.choice((None, None, 0.1)),
        "accumulated": rng.choice((1, 1, 2)),
        "state": state,
        "slots": {
            "microbatch": rng.choice((None, False, 2, 3)),
            "activations": rng.choice((None, "exact", "int8", ["exact", "int4"])),
            "checkpointing": rng.choice((None, None, "blocks", "sqrt")),
            "precision": rng.choice((None, None, "bf16-sr", "bf16+8")),
        },
    }
    if gradients == "release" and rng.random() < 0.9:  # else it is refused
        drawn["accumulated"], drawn["slots"]["microbatch"] = 1, False
    if gradients == "into-state" and rng.random() < 0.9:
        drawn["max_norm"] = None
    return drawn


def train(drawn: dict[str, Any]) -> tuple[list[torch.Tensor], str]:
    """Return the weights and the loss class; of plain Lightning without slots."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    size, ranks = 6, dist.get_world_size()
    data = TensorDataset(
        torch.randn(4 * size * ranks, 12, generator=generator),
        torch.randint(0, 5, (4 * size * ranks,), generator=generator),
    )
    slots = {name: value for name, value in drawn["slots"].items() if value is not None}
    if drawn["state"] is not None:
        slots["optimizer_state"] = OptimizerState(**drawn["state"])
    memsave = MemSave(**slots, summary=False) if drawn["is_ours"] else None
    is_sharded = drawn["strategy"] == "fsdp"
    module = Module(drawn)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        max_epochs=2,
        strategy=MemSaveFSDPStrategy() if is_sharded else DDPStrategy(find_unused_parameters=drawn["unused"]),
        callbacks=[memsave] if memsave else [],
        gradient_clip_val=drawn["max_norm"],
        accumulate_grad_batches=drawn["accumulated"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(module, DataLoader(data, batch_size=size))
    except RuntimeError as error:
        raise RuntimeError(f"rank {dist.get_rank()}, {module.phase}: {drawn}") from error
    weights = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in module.parameters()]
    return weights, memsave.report.loss_class if memsave else "exact"


def check(drawn: dict[str, Any]) -> str:
    """Train with and without; return what came of it."""
    try:
        ours, loss_class = train({**drawn, "is_ours": True})
    except ValueError as error:
        texts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(texts, str(error))
        assert len(set(texts)) == 1, texts
        return f"refused: {error}"
    flat = torch.cat([w.flatten().float() for w in ours])
    assert flat.isfinite().all(), drawn
    every = [torch.zeros_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    assert all(torch.equal(each, flat) for each in every), f"ranks have drifted apart: {drawn}"
    if loss_class == "exact":
        plain, _ = train({**drawn, "is_ours": False})
        other = torch.cat([w.flatten().float() for w in plain])
        difference = float((flat - other).norm() / other.norm())
        cut = drawn["dropout"] and drawn["slots"]["microbatch"]  # masks of parts
        assert cut or difference < 1e-3, (difference, drawn)
        return f"exact, {difference:.1e} from plain"
    return loss_class


def main() -> None:
    seed, seconds = int(sys.argv[1]), float(sys.argv[2])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=WAIT)
    rng, start, num = random.Random(seed), time.monotonic(), 0
    while True:
        is_over = [time.monotonic() - start > seconds]
        dist.broadcast_object_list(is_over, 0)
        if is_over[0]:
            break
        drawn, num = draw(rng), num + 1
        found = check(drawn)
        if dist.get_rank() == 0:
            print(f"{num}: {found[:160]} | {drawn}", file=sys.stderr, flush=True)
    if dist.get_rank() == 0:
        print("ok", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
