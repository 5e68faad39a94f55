"""What measuring costs: CPU time of a tracked step, of an untracked one, and of a run with the default sampling."""

from __future__ import annotations

import statistics
import time

import torch

from benchmarks.harness.measurement import environment, write_rows
from benchmarks.models.subjects import gpt, wide_resnet
from lightning_memsave.measuring.meter import Meter

NUM_STEPS = 200
NUM_TRACKED = 3  # steps 2, 3 and 200


def cpu_seconds(subject, meter: Meter | None) -> float:
    start = time.process_time()
    if meter is not None:
        meter.begin(subject.model, [subject.optimizer], subject.batch, torch.device("cpu"))
    subject.step()
    if meter is not None:
        meter.end()
    return time.process_time() - start


def cpu_seconds_untracked(subject, num_calls: int = 2000) -> float:
    """What `begin` and `end` take around a step that is not tracked."""
    meter = Meter(every=10**9)
    start = time.process_time()
    for number in range(num_calls):
        meter.begin(
            subject.model, [subject.optimizer], subject.batch, torch.device("cpu"), num_updates=number // num_calls
        )
        meter.end()
    return (time.process_time() - start) / num_calls


def row(model: str, subject, repeats: int) -> dict[str, object]:
    tracking = Meter(every=1)
    cpu_seconds(subject, tracking)  # the first one is never tracked
    plain, tracked = [], []
    for _ in range(repeats):
        plain.append(cpu_seconds(subject, None))
        tracked.append(cpu_seconds(subject, tracking))
    extra = statistics.median(t - p for t, p in zip(tracked, plain, strict=True))
    step, untracked = statistics.median(plain), cpu_seconds_untracked(subject)
    run = NUM_TRACKED * extra + (NUM_STEPS - NUM_TRACKED) * untracked
    return {
        "benchmark": "ledger",
        "model": model,
        "cpu_time_ratio_tracked_step": 1 + extra / step,
        "cpu_seconds_untracked_begin_end": untracked,
        f"cpu_time_ratio_run_of_{NUM_STEPS}_steps": 1 + run / (NUM_STEPS * step),
        **environment(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    rows = [
        row("WideResNet-28-2, batch 2 (little compute: the worst case)", wide_resnet("", batch_size=2), 41),
        row("GPT-2, 4 layers, width 256, batch 8 x 128", gpt(""), 21),
    ]
    write_rows("ledger", rows)
