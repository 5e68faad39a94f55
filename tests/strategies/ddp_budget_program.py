"""Two processes of DDP on CPU (gloo) with a budget, then with a bound of noise; run by `test_distributed.py`."""

from __future__ import annotations

import sys
import warnings

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_memsave import ActivationCompression, BudgetWarning, MemSave, predict


class Module(L.LightningModule):
    """Its processes wait for each other in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 64), *(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=False)


def train(memsave, loader=None):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(1024, 6, generator=generator), torch.randint(0, 64, (1024,), generator=generator)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        strategy="ddp",
        callbacks=[memsave] if memsave else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(*rows), batch_size=128) if loader is None else loader)
    return module


class Uneven(IterableDataset):
    """The second process has batches of twice as many samples."""

    def __iter__(self):
        generator, num = torch.Generator().manual_seed(1), 64 * (1 + dist.get_rank())
        for _ in range(4):
            yield torch.randn(num, 6, generator=generator), torch.randint(0, 64, (num,), generator=generator)


def check_that_the_largest_batch_counts():
    memsave = MemSave(budget="0.8x")
    with warnings.catch_warnings():
        warnings.simplefilter("error", BudgetWarning)
        train(memsave, DataLoader(Uneven(), batch_size=None))
    peaks = [None, None]
    dist.all_gather_object(peaks, (memsave.plan.baseline_bytes, memsave.report.peak_bytes))
    assert peaks[0][0] == peaks[1][0]
    assert max(peaks[0][1], peaks[1][1]) <= memsave.plan.budget_bytes
    alone = predict(Module(), next(iter(Uneven())), MemSave("measure")).peak_bytes
    assert (dist.get_rank() == 1) == (alone > 0.8 * memsave.plan.baseline_bytes)


def main():
    torch.set_num_threads(1)
    plain = train(None)
    memsave = MemSave(budget="0.8x")
    planned = train(memsave)
    texts = [None, None]
    dist.all_gather_object(texts, memsave.plan.to_json())
    assert texts[0] == texts[1]
    assert memsave.report.peak_bytes <= memsave.plan.budget_bytes
    assert abs(memsave.report.peak_bytes - memsave.plan.peak_bytes) <= 0.01 * memsave.plan.peak_bytes
    assert memsave.plan.steps
    for a, b in zip(plain.parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    again = MemSave(memsave.plan)
    replayed = train(again)
    assert all(torch.equal(a, b) for a, b in zip(replayed.parameters(), planned.parameters(), strict=True))
    bounded = MemSave(activations=ActivationCompression(codecs=("int4",), min_numel=64), max_gradient_noise=0.03)
    train(bounded)  # each process measures on samples of its own; all take the same codecs
    dist.all_gather_object(texts, bounded.state_dict()["chosen_codecs"])
    assert texts[0] == texts[1]
    assert 0 < bounded.report.gradient_noise <= 0.03
    check_that_the_largest_batch_counts()
    if dist.get_rank() == 0:
        print("ok", file=sys.stderr)


if __name__ == "__main__":
    main()
