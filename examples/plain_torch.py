"""The techniques without Lightning, on a loop of one's own: python examples/plain_torch.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from lightning_memsave import (
    Checkpointing,
    Ledger,
    OptimizerState,
    apply_checkpointing,
    apply_optimizer_state,
    microbatches,
)
from lightning_memsave.core.units import format_bytes


def peak_bytes(size: int, low_memory: bool) -> int:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.TransformerEncoder(layer, 4), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if low_memory:
        apply_checkpointing(model, Checkpointing())
        apply_optimizer_state(optimizer, OptimizerState(), model)
    batch = torch.randn(32, 64, 64), torch.randint(0, 10, (32,))

    def step() -> None:
        optimizer.zero_grad()
        for (x, y), weight in microbatches(batch, size=size):
            (F.cross_entropy(model(x)[:, 0], y) * weight).backward()
        optimizer.step()

    step()
    with Ledger().watching(model, [optimizer], batch) as ledger:
        step()
    assert ledger.measurement is not None
    return ledger.measurement.peak_bytes


if __name__ == "__main__":
    before, after = peak_bytes(32, low_memory=False), peak_bytes(4, low_memory=True)
    print(f"{format_bytes(before)} -> {format_bytes(after)}: {before / after:.1f}x")
