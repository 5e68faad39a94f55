"""Trainers that only train, and programs in processes of their own."""

from __future__ import annotations

import subprocess
import sys

from lightning.pytorch.demos.boring_classes import RandomDataset
from torch.utils.data import DataLoader

QUIET = {
    "accelerator": "cpu",
    "max_steps": 3,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def fours() -> DataLoader:
    return DataLoader(RandomDataset(32, 64), batch_size=4)


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
