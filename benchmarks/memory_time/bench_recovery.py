"""What it costs to be ready for memory to run out: a run that never does, and each of its guards.

The run: WideResNet-28-2 at batch 100 in Lightning's own loop, plain and with `MemSave()`, steps of both taking turns in
one process; measured steps are left out. The guards: each alone, as a share of that step.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness.measurement import environment, measure_memory, time_columns, write_rows
from benchmarks.models.subjects import wide_resnet
from lightning_memsave import MemSave
from lightning_memsave.core.report import CATEGORIES
from lightning_memsave.demo.model import ImageClassifier
from lightning_memsave.demo.run import _quiet
from lightning_memsave.loops.batch_snapshot import BatchStart
from lightning_memsave.loops.late_reduction import num_collectives
from lightning_memsave.loops.merged_metrics import MergedMetrics

MODEL = "WideResNet-28-2, batch 100, SGD momentum, Lightning's loop"
NUM_STEPS = 24
SKIPPED = 4  # warm-up and the steps that are measured


class TakingTurns(L.Callback):
    """Lets one of two trainers, each in a thread of its own, run one batch at a time; CPU seconds of each batch."""

    def __init__(self, mine: threading.Semaphore, other: threading.Semaphore) -> None:
        self._mine, self._other, self.seconds = mine, other, []

    def on_train_batch_start(self, *_: Any) -> None:
        self._mine.acquire()
        self._start = time.thread_time()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.thread_time() - self._start)
        self._other.release()


def paired_runs(settings: dict[str, Callable[[], list[L.Callback]]]) -> Iterator[tuple[str, list[float], Any]]:
    locks = [threading.Semaphore(1), threading.Semaphore(0)]
    turns, threads = [], []
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(100 * NUM_STEPS, 3, 32, 32, generator=generator)
    data = TensorDataset(images, torch.randint(0, 10, (len(images),), generator=generator))
    built = {name: make() for name, make in settings.items()}
    for number, callbacks in enumerate(built.values()):
        turn = TakingTurns(locks[number], locks[1 - number])
        # Its turn begins before every other callback's and ends after all of them.
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=1, enable_model_summary=False, callbacks=[turn, *callbacks], **options
        )
        module = ImageClassifier(wide_resnet("").model)
        turns.append(turn)
        threads.append(threading.Thread(target=_fit, args=(trainer, module, DataLoader(data, 100))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (name, callbacks), turn in zip(built.items(), turns, strict=True):
        yield name, turn.seconds[SKIPPED:], callbacks[0] if callbacks else None


def _fit(trainer: L.Trainer, module: Any, data: DataLoader) -> None:
    torch.set_num_threads(1)
    trainer.fit(module, data)


def seconds_of(call: Callable[[], object], repeats: int = 200) -> float:
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def enter_and_leave(module: Any) -> None:
    with MergedMetrics(module):
        pass


if __name__ == "__main__":
    torch.set_num_threads(1)
    with _quiet():
        (_, plain, _), (_, ready, memsave) = paired_runs({"plain": list, "MemSave()": lambda: [MemSave()]})
    sizes = measure_memory(wide_resnet("plain"))
    shared = {"benchmark": "recovery", "model": MODEL, "quality": "batches that ran out of memory"}
    rows: list[dict[str, Any]] = [
        {**shared, "setting": "plain", **sizes, "factor": 1.0, **time_columns(plain, plain), "quality_value": 0},
        {
            **shared,
            "setting": "MemSave()",
            "peak_bytes": memsave.report.peak_bytes,
            **{f"{category}_bytes": memsave.report.by_category[category] for category in CATEGORIES},
            "factor": sizes["peak_bytes"] / memsave.report.peak_bytes,
            **time_columns(ready, plain),
            "quality_value": memsave.report.num_oom_recovered,
        },
    ]
    module, step = ImageClassifier(wide_resnet("").model), statistics.median(plain)
    batch = torch.zeros(100, 3, 32, 32), torch.zeros(100)
    guards = {
        "what a batch starts with: random states, modes, attributes, BatchNorm's buffers": lambda: BatchStart(
            module, set(), "made", batch
        ),
        "metrics set aside and merged": lambda: enter_and_leave(module),
        "collectives counted": num_collectives,
    }
    for guard, call in guards.items():
        seconds = seconds_of(call)
        rows.append({**shared, "setting": guard, "cpu_seconds_p50": seconds, "cpu_time_ratio": 1 + seconds / step})
    write_rows("recovery", [row | environment() for row in rows])
