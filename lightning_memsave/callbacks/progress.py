"""`MemoryProgressBar`: Lightning's progress bar, with the memory beside it."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console
from rich.progress import ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from lightning_memsave.callbacks.monitor import MemoryMonitor
from lightning_memsave.core.errors import setting_error
from lightning_memsave.reporting.progress_text import memory_line, memory_text


class MemoryProgressBar(RichProgressBar):
    """Show the peak and the last measured step, by category, with microbatch and factor, beside the progress.

    The letters in the bars are the categories': weights, gradients, optimizer state, activations, temporary, data. It
    shows what a `MemSave` or `MemoryMonitor` of the same trainer measures. Where the output is no terminal, a line is
    printed for each epoch and for each higher peak instead.

    Args:
        options: as for Lightning's `RichProgressBar`.

    Raises:
        ValueError: at the start of training, when nothing in the trainer measures, or it is `pytorch_lightning`'s.

    Example:
        >>> import lightning as L, torch
        >>> from lightning_memsave import MemSave
        >>> trainer = L.Trainer(callbacks=[MemSave(microbatch=2), MemoryProgressBar()], accelerator="cpu", logger=False)
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._console_options = options.get("console_kwargs") or {}
        self._monitor: MemoryMonitor | None = None
        self._prints_lines = False
        self._peak_bytes: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Find who measures, and whether there is a terminal."""
        if not isinstance(trainer, Trainer):
            raise setting_error(
                "callbacks",
                "may hold a MemoryProgressBar only in a Trainer of `lightning.pytorch`",
                type(trainer).__module__,
                "Import the Trainer from there, or leave the bar out.",
            )
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it from outside
        self._monitor = next((c for c in callbacks if isinstance(c, MemoryMonitor)), None)
        if self._monitor is None:
            names = [type(c).__name__ for c in callbacks]
            raise setting_error(
                "callbacks",
                "must hold a MemSave or MemoryMonitor",
                names,
                "A MemoryProgressBar displays what one of them measures.",
            )
        self._peak_bytes = None
        self._prints_lines = self.is_enabled and not Console(**self._console_options).is_terminal
        if self._prints_lines:
            self.disable()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave the bar as it was."""
        super().teardown(trainer, pl_module, stage)
        self._enable_again()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Leave the bar as it was, as Lightning calls no `teardown` then."""
        super().on_exception(trainer, pl_module, exception)
        self._enable_again()

    def _enable_again(self) -> None:
        if self._prints_lines:
            self._prints_lines = False
            self.enable()

    def configure_columns(self, trainer: L.Trainer) -> list[Any]:
        """Return Lightning's columns, and the memory's."""
        return [*super().configure_columns(trainer), _MemoryColumn(self)]

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Return the user's metrics; ours have their own column."""
        metrics = super().get_metrics(trainer, pl_module)
        return {name: value for name, value in metrics.items() if not name.startswith("memsave/")}

    def on_train_batch_end(self, *arguments: Any, **named: Any) -> None:
        """Advance; without a terminal, say when the peak has grown."""
        super().on_train_batch_end(*arguments, **named)
        if self._prints_lines and self._monitor is not None:
            peak_bytes = self._monitor.report.peak_bytes
            if peak_bytes is not None and peak_bytes > (self._peak_bytes or 0):
                self._peak_bytes = peak_bytes
                self._print_line(f"step {self.trainer.global_step}")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Advance; without a terminal, a line with the user's metrics."""
        super().on_train_epoch_end(trainer, pl_module)
        if self._prints_lines:
            metrics = self.get_metrics(trainer, pl_module)
            named = [f"{name} {value:.4g}" for name, value in metrics.items() if isinstance(value, (int, float))]
            of = "" if trainer.max_epochs in (None, -1) else f" of {trainer.max_epochs}"  # as with `max_steps`
            self._print_line(", ".join([f"epoch {trainer.current_epoch}{of}", *named]))

    def _print_line(self, what: str) -> None:
        if self._monitor is not None:
            print(f"{what}: {memory_line(self._monitor.report, self._monitor.current)}", flush=True)


class _MemoryColumn(ProgressColumn):
    def __init__(self, bar: MemoryProgressBar) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._bar = bar

    def render(self, task: Task) -> Text:
        monitor = self._bar._monitor
        if monitor is None or task.id != self._bar.train_progress_bar_id:
            return Text()
        return memory_text(monitor.report, monitor.current)
