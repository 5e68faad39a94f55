"""Says how far planning is, and ends it: after its time, or with Ctrl-C, the best plan so far is taken.

Lightning ends the process when Ctrl-C arrives in one of the fits that planning runs, so the signal is only noted here,
and planning ends after the prediction at hand. A second Ctrl-C raises `KeyboardInterrupt` at once.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TextIO

import lightning as L
from lightning.pytorch.utilities import rank_zero_info
from lightning_utilities.core import rank_zero

from lightning_memsave.core.units import format_bytes
from lightning_memsave.planner.search import SearchWatch

LEAST_SECONDS = 60.0
"""Seconds that planning may take before any fit."""
SHARE = 0.1
"""Share of a long fit's estimated seconds that planning may take."""
_INTERRUPTED = "by Ctrl-C"
_LINE_SECONDS = 10.0  # between two lines of a log
_LEAST_LINE_SECONDS = 2.0  # planning that takes less says nothing


class PlanningWatch(SearchWatch):
    """Shows progress, and ends a search.

    Args:
        seconds: of wall time, after which the best plan so far is taken.
        plain_bytes: what the plain step needs.
        trainer: of the run; with several processes, rank 0's clock counts.
        stream: where a terminal may be.
    """

    def __init__(
        self, seconds: float, plain_bytes: int, trainer: L.Trainer | None = None, stream: TextIO | None = None
    ) -> None:
        self._seconds, self._plain_bytes, self._trainer = seconds, plain_bytes, trainer
        self._stream = stream or sys.stderr
        self._began = self._said = time.monotonic()
        self._is_interrupted = self._has_line = False

    def why_over(self, has_plan: bool) -> str:
        """Return why the search has to end, if it has a plan; empty while it may go on.

        Raises:
            KeyboardInterrupt: it was interrupted, and has no plan yet.
        """
        why = ""
        if self._is_interrupted:
            why = _INTERRUPTED
        elif has_plan and time.monotonic() - self._began > self._seconds:
            why = f"after the {self._seconds:.0f} s that it may take (`planning_seconds`)"
        if self._trainer is not None and self._trainer.world_size > 1:
            why = self._trainer.strategy.broadcast(why)
        if why == _INTERRUPTED and not has_plan:
            raise KeyboardInterrupt
        return why

    def tell(self, num_predictions: int, best_bytes: int | None) -> None:
        """Say how far the search is: on a terminal in one line that changes, else now and then.

        Args:
            num_predictions: so far.
            best_bytes: the smallest number of bytes that a step is predicted to need.
        """
        now = time.monotonic()
        best = ""
        if best_bytes is not None:
            best = f", least {format_bytes(best_bytes)} ({best_bytes / max(1, self._plain_bytes):.2f}x)"
        elapsed = now - self._began
        text = f"memsave: planning: {num_predictions} predictions in {elapsed:.0f} of {self._seconds:.0f} s{best}"
        if elapsed < _LEAST_LINE_SECONDS:
            return
        if not rank_zero.log.isEnabledFor(logging.INFO) or (self._trainer is not None and self._trainer.global_rank):
            return
        if self._stream.isatty():
            self._stream.write(f"\r\x1b[2K{text}")
            self._stream.flush()
            self._has_line = True
        elif now - self._said >= _LINE_SECONDS:
            self._said = now
            rank_zero_info(text)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Note Ctrl-C, the first time, instead of raising; the main thread's handler comes back.

        On every rank, as a terminal's Ctrl-C reaches all; rank 0's is what counts.
        """
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGINT)
        if is_main and before is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            if is_main and before is signal.default_int_handler:
                signal.signal(signal.SIGINT, before)
            if self._has_line:
                self._stream.write("\r\x1b[2K")
                self._stream.flush()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_interrupted:
            raise KeyboardInterrupt
        self._is_interrupted = True
        if self._trainer is None or not self._trainer.global_rank:  # not by the log, which predictions silence
            self._stream.write("\nmemsave: planning ends after this prediction; Ctrl-C once more ends the run\n")
