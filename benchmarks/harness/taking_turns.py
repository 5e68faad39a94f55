"""Trainers that take turns, a batch each: CPU time of a batch in Lightning's own loop, with everything around it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch

Fit = Callable[[list[L.Callback]], Any]
"""Makes a trainer with these callbacks and fits."""


class _Turn(L.Callback):
    """One trainer's turns: from the start of a batch to that of the next one."""

    def __init__(self, mine: threading.Semaphore, following: threading.Semaphore) -> None:
        self.mine, self.following = mine, following
        self.seconds: list[float] = []
        self._start: float | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        if self._start is not None:
            self.seconds.append(time.thread_time() - self._start)
            self.following.release()
        self.mine.acquire()
        self._start = time.thread_time()


def seconds_of_batches(fit: Fit, settings: Mapping[str, Callable[[], list[L.Callback]]]) -> dict[str, list[float]]:
    """Return the CPU seconds of each batch but the last, by setting.

    Args:
        fit: called once for each setting, in a thread of its own; as many batches each time.
        settings: what makes the callbacks.
    """
    locks = [threading.Semaphore(int(number == 0)) for number in range(len(settings))]
    turns = [_Turn(mine, locks[(number + 1) % len(locks)]) for number, mine in enumerate(locks)]

    def run(turn: _Turn, make: Callable[[], list[L.Callback]]) -> None:
        torch.set_num_threads(1)  # of this thread
        fit([turn, *make()])
        turn.following.release()

    gc.disable()  # it would fall into whichever batch comes
    threads = [threading.Thread(target=run, args=each) for each in zip(turns, settings.values(), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.enable()
    return {name: turn.seconds for name, turn in zip(settings, turns, strict=True)}
