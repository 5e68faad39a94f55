"""What measuring costs: CPU time of a tracked step, and of a run with the default sampling."""

from __future__ import annotations

import statistics
import time

import torch

from harness import environment, write_rows
from lightning_memsave.memory.meter import Meter
from models import gpt, wide_resnet


def cpu_seconds(subject, num_steps: int, meter: Meter | None) -> float:
    start = time.process_time()
    for _ in range(num_steps):
        if meter is not None:
            meter.begin(subject.model, [subject.optimizer], subject.batch, torch.device("cpu"))
        subject.step()
        if meter is not None:
            meter.end()
    return time.process_time() - start


def row(model: str, subject, num_steps: int, repeats: int) -> dict[str, object]:
    cpu_seconds(subject, 3, None)
    sampled, tracked = [], []
    for _ in range(repeats):
        plain = cpu_seconds(subject, num_steps, None)
        sampled.append(cpu_seconds(subject, num_steps, Meter()) / plain)
        plain_step = cpu_seconds(subject, 3, None)
        meter = Meter(every=1)
        cpu_seconds(subject, 1, meter)
        tracked.append(cpu_seconds(subject, 3, meter) / plain_step)
    return {
        "benchmark": "ledger",
        "model": model,
        "steps_of_the_run": num_steps,
        "cpu_time_ratio_default_sampling": statistics.median(sampled),
        "cpu_time_ratio_each_step_tracked": statistics.median(tracked),
        **environment(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = [
        row("WideResNet-28-2, batch 2 (little compute: the worst case)", wide_resnet("", batch_size=2), 200, 5),
        row("GPT-2, 4 layers, width 256, batch 8 x 128", gpt(""), 200, 1),
    ]
    write_rows("ledger", rows)
