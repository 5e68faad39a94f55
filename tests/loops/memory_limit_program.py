"""Trains under limits of the address space, one process each; prints what came of it, one line of JSON per limit.

Run as `python -m tests.loops.memory_limit_program START STOP STEP`, in MiB above what the process has.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings
from pathlib import Path

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave import MemSave
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError, is_out_of_memory

SAMPLES, DIM = 16384, 256


class Deep(L.LightningModule):
    """Its weights take 2 MiB, its activations 272."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(8))
        self.net = nn.Sequential(nn.Linear(256, DIM), *blocks, nn.Linear(DIM, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-2)


def train(num_mebibytes: int) -> str:
    """The error, or nothing."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(2 * SAMPLES, 256), torch.randint(10, (2 * SAMPLES,)))
    module, loader = Deep(), DataLoader(data, SAMPLES)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=[MemSave(summary=False)], **dict.fromkeys(off, False)
    )
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + num_mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        trainer.fit(module, loader)
    except Exception as error:
        is_known = isinstance(error, OutOfMemoryUnrecoverableError) or is_out_of_memory(
            error
        )  # as the loader may raise
        return f"{'out of memory' if is_known else 'ANOTHER ERROR'}: {type(error).__name__}: {error}"
    return ""


def main(start: int, stop: int, step: int) -> None:
    """Each limit in a process of its own."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for num_mebibytes in range(start, stop + 1, step):
        reader, writer = os.pipe()
        if not (child := os.fork()):
            os.close(reader)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            error = train(num_mebibytes)
            os.write(writer, error[:2000].encode() or b"trained")
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            text = file.read().decode()
        _, status = os.waitpid(child, 0)
        signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        print(json.dumps({"limit": num_mebibytes, "signal": signal, "text": text}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
