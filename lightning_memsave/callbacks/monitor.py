"""`MemoryMonitor`: measures where the bytes of a run go and logs it; changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_memsave.core.errors import MemoryGrowthWarning, setting_error
from lightning_memsave.core.report import Applied, MemoryReport
from lightning_memsave.lightning_compat import Batch, callbacks_of, is_compiled
from lightning_memsave.loops.out_of_memory import is_out_of_memory
from lightning_memsave.loops.trainer_features import ways_of_training
from lightning_memsave.measuring.allocator_snapshot import Snapshot
from lightning_memsave.measuring.leak_detection import GrowthWatch
from lightning_memsave.measuring.ledger import Measurement
from lightning_memsave.measuring.live_tensors import alive
from lightning_memsave.measuring.meter import Meter
from lightning_memsave.reporting.loggers import agreed, log_config, log_step, log_summary, of_the_largest_rank, one_line
from lightning_memsave.reporting.messages import growth_text, miss_text, post_mortem_text
from lightning_memsave.simulation.predicted_step import Prediction
from lightning_memsave.techniques.microbatching.split import UnsplittableBatchError, batch_size

# Below Lightning's own logger, so that it is shown as Lightning's messages are; on every rank.
_log = logging.getLogger("lightning.pytorch.memsave")

PEAK = "memsave/peak_bytes"
HEADLINES = (PEAK, "memsave/factor", "memsave/step_seconds", "memsave/microbatch_size")
_LEAST = ("memsave/factor", "memsave/microbatch_size")  # of the rank that needs the most
_NUM_BATCHES_OF_SNAPSHOT = 3
IN_PROGRESS_BAR = ("memsave/peak_mib", "memsave/factor")


class MemoryMonitor(Callback):
    """Measure the peak of live bytes of training steps, by category, and log it to every logger of the trainer.

    Some steps are measured (the second, the third and every `every`-th); the rest run untouched. On an accelerator
    every step's allocator peak is read besides. What grows from measured step to measured step is warned of once, and
    when memory runs out the log says what was alive and what would help.

    Args:
        every: measure every this many steps.
        workspace: profile the step after each measured one as well, for `report.workspace_bytes` (CPU only; costs time
            and memory in that step).
        snapshot: a file for CUDA's own record of its allocator (`measuring.allocator_snapshot`) from the start of the
            fit to the end of the third batch, or to the error that ends it before; of ranks above 0 with the rank in
            its name.

    Raises:
        ValueError: `every` is below 1, or below 2 with `workspace`; a `snapshot` is asked for where there is no CUDA.

    Example:
        >>> import lightning as L
        >>> from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
        >>> data = torch.utils.data.DataLoader(RandomDataset(32, 64), batch_size=4)
        >>> monitor = MemoryMonitor()
        >>> L.Trainer(callbacks=[monitor], max_steps=3, logger=False, enable_checkpointing=False,
        ...           enable_progress_bar=False, enable_model_summary=False, accelerator="cpu").fit(BoringModel(), data)
        >>> sum(monitor.report.by_category.values()) == monitor.report.peak_bytes > 0
        True
    """

    def __init__(self, every: int = 200, workspace: bool = False, snapshot: str | Path | None = None) -> None:
        super().__init__()
        self._every, self._workspace = every, workspace
        self._snapshot_path = snapshot
        self._snapshot: Snapshot | None = None
        self._meter, self._evaluation_meter = Meter(every, workspace=workspace), _evaluation_meter(every)
        self._leader: MemoryMonitor | None = None
        self._followers: list[MemoryMonitor] = []
        self._has_figures_to_log = False
        self._baseline: MemoryReport | Prediction | None = None
        self._prediction: Prediction | None = None
        self._growth = GrowthWatch()
        self._batch: Any = None
        self._num_batches = 0
        self._trained: tuple[int, int | None] = (0, None)
        """Parameter groups of the optimizers, and parameters in them that are trained, when last counted."""
        self._applied_by_all: tuple[Applied, ...] | None = None
        """What techniques did in all processes, once a fit has ended in which another one's loss class is worse."""
        self._current: Mapping[str, int] = {}

    def compare_to(self, baseline: MemoryReport | Prediction) -> MemoryMonitor:
        """Compare with another run, measured or predicted; `report.factor` and `memsave/factor` then say by how much.

        Returns:
            This callback.

        Raises:
            ValueError: it is no report or prediction, or of a run that has measured nothing (yet).
        """
        if not isinstance(baseline, MemoryReport | Prediction):
            raise setting_error(
                "baseline", "must be a report or a prediction", baseline, "For example `.compare_to(other.report)`."
            )
        if baseline.peak_bytes is None:
            raise setting_error("baseline", "must have a measured peak", None, "Fit the baseline first.")
        self._baseline = baseline
        return self

    def with_prediction(self, prediction: Prediction) -> MemoryMonitor:
        """Hold the run against what was predicted for it: `report.miss`, and a line when the fit ends.

        Returns:
            This callback.
        """
        self._prediction = prediction
        return self

    @property
    def report(self) -> MemoryReport:
        """What was measured so far, with the baseline and prediction of this callback, or of one that reads it."""
        measured = self._leader.report if self._leader is not None else self._measured()
        for told in (*reversed(self._followers), self):
            measured = told._held_against(measured)
        return measured if self._applied_by_all is None else dataclasses.replace(measured, applied=self._applied_by_all)

    def _held_against(self, measured: MemoryReport) -> MemoryReport:
        if self._baseline is not None:
            measured = with_baseline(measured, self._baseline)
        if (predicted := self._prediction) is not None:
            measured = dataclasses.replace(
                measured,
                predicted_peak_bytes=predicted.peak_bytes,
                predicted_by_category=dict(predicted.by_category),
            )
        return measured

    @property
    def current(self) -> Mapping[str, int]:
        """Bytes by category at the peak of the step that was measured last; empty before the first."""
        return self._leader.current if self._leader is not None else self._current

    def _measured(self) -> MemoryReport:
        evaluated = self._evaluation_meter.highest
        evaluation_peak_bytes = None if evaluated is None else evaluated.peak_bytes
        return dataclasses.replace(self._meter.report(), evaluation_peak_bytes=evaluation_peak_bytes)

    # ------------------------------------------------------------------ hooks
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start a fresh measurement. One callback measures, a `MemSave` if there is one; others read its figures."""
        if stage != "fit":
            return
        monitors = [c for c in callbacks_of(trainer) if isinstance(c, MemoryMonitor)]
        leader = min(monitors, key=lambda c: type(c) is MemoryMonitor)  # the first one, a subclass before others
        self._leader = None if leader is self else leader
        self._followers = [c for c in monitors if c is not self] if leader is self else []
        # How to measure is said by the first plain monitor, beside a MemSave as well.
        settings = next((c for c in monitors if type(c) is MemoryMonitor), self)
        self._meter = Meter(settings._every, workspace=settings._workspace)
        self._evaluation_meter = _evaluation_meter(settings._every)
        self._current = {}
        self._growth = GrowthWatch()
        self._batch, self._num_batches = None, 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell the loggers how this run is configured."""
        self._has_figures_to_log = self._leader is None
        self._trained, self._applied_by_all = (0, None), None
        if self._leader is None:
            log_config(trainer, self._config())
        if self._snapshot_path is not None:
            path, rank = Path(self._snapshot_path), trainer.global_rank
            path = path.with_stem(f"{path.stem}-rank{rank}") if rank else path
            self._snapshot = Snapshot(path, trainer.strategy.root_device)

    def _save_snapshot(self) -> None:
        recorded, self._snapshot = self._snapshot, None
        if recorded is not None:
            _log.info(f"memsave: allocator snapshot in {recorded.save()}; open it at https://pytorch.org/memory_viz")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Begin a step."""
        if self._leader is None:
            strategy, self._batch = trainer.strategy, batch
            assert strategy.model is not None, "it trains"
            self._meter.begin(
                strategy.model,
                trainer.optimizers,
                batch,
                strategy.root_device,
                num_updates=trainer.global_step,
                num_samples=_num_samples(batch),
                is_compiled=is_compiled(pl_module),
            )

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        """End a step and log what was measured in it."""
        self._batch = None
        self._num_batches += 1
        if self._num_batches >= _NUM_BATCHES_OF_SNAPSHOT:
            self._save_snapshot()
        if self._leader is None and (measured := self._meter.end()) is not None:
            self._current = measured.by_category
            step = dataclasses.replace(
                self.report,
                peak_bytes=measured.peak_bytes,
                by_category=measured.by_category,
                step_seconds=None,
                samples_per_second=None,
            )
            log_step(trainer, step, self.report)
            is_tracked = self._meter.tracked is not None
            if is_tracked and (growth := self._growth.observe(measured)) is not None:
                rank_zero_warn(growth_text(growth), category=MemoryGrowthWarning)

        if self._has_grown(trainer, is_first=batch_idx == 0):
            self._meter.measure_next()
            self._on_growth()

    def _has_grown(self, trainer: L.Trainer, *, is_first: bool) -> bool:
        """Return whether more is trained than before, as where layers are unfrozen; asked when an epoch begins."""
        groups = [group["params"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if not is_first and len(groups) == self._trained[0]:
            return False
        before, num_parameters = self._trained[1], sum(p.requires_grad for group in groups for p in group)
        self._trained = len(groups), num_parameters
        return before is not None and num_parameters > before

    def _on_growth(self) -> None:
        """Bring up to date what depends on the parameters that are trained."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the headlines through `self.log`, for checkpoints and sweeps; of the rank that needs the most."""
        self._meter.end_step()
        self._log_headlines(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the headlines for callbacks that read them after validation; loggers have them already."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._log_headlines(trainer, pl_module, logger=False)

    def _log_headlines(self, trainer: L.Trainer, pl_module: L.LightningModule, **options: Any) -> None:
        if self._leader is not None or trainer.barebones:
            return
        figures = agreed(trainer, self._headlines())
        if PEAK in figures:
            self._log_one(pl_module, "memsave/peak_mib", round(figures[PEAK] / 2**20, 1), logger=False)  # for bars
        for name, figure in figures.items():
            self._log_one(pl_module, name, figure, **options)

    @staticmethod
    def _log_one(pl_module: L.LightningModule, name: str, figure: float, **options: Any) -> None:
        # float64: `self.log` would round a Python float to float32.
        value = torch.tensor(figure, dtype=_widest(pl_module.device), device=pl_module.device)
        in_bar = name in IN_PROGRESS_BAR
        reduce_fx = "min" if name in _LEAST else "max"
        pl_module.log(name, value, prog_bar=in_bar, reduce_fx=reduce_fx, sync_dist=True, batch_size=1, **options)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop measuring a batch that Lightning skipped."""
        self._meter.abandon()

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Begin a validation batch of a fit, of which some are measured as well; not those before it."""
        if self._leader is None and trainer.state.fn == "fit" and not trainer.sanity_checking:
            strategy, is_whole = trainer.strategy, is_compiled(pl_module)
            assert strategy.model is not None, "it trains"
            meter = self._evaluation_meter
            meter.begin(strategy.model, trainer.optimizers, batch, strategy.root_device, is_compiled=is_whole)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """End it."""
        self._evaluation_meter.end()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the final figures to the loggers that keep summaries, and tell people."""
        self._has_figures_to_log = False
        report = of_the_largest_rank(trainer, self.report)
        if report.loss_class != self.report.loss_class:  # the gradients of one process are those of all
            self._applied_by_all = report.applied
        if self._leader is None:
            log_summary(trainer, report)
            self._tell(trainer, report)
        if (text := self._outcome(report)) is not None:
            rank_zero_info(text)

    def _tell(self, trainer: L.Trainer, report: MemoryReport) -> None:
        """Tell people what the fit took."""
        rank_zero_info(one_line(report))

    def _outcome(self, report: MemoryReport) -> str | None:
        """Return a line that compares the run with its prediction; `None` without one."""
        return None if self._prediction is None else miss_text(report)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Stop measuring and log what was measured; out of memory, say what is alive and what would help."""
        failing, evaluated = self._meter.abandon(), self._evaluation_meter.abandon()
        self._save_snapshot()
        if self._leader is None and is_out_of_memory(exception):
            try:
                _log.error(self._post_mortem(trainer, failing or evaluated, exception))
            except Exception as error:  # nothing may take the place of the run's own error
                _log.error(f"memsave: out of memory, and looking where it went failed as well: {error}")
        if self._has_figures_to_log:
            self._has_figures_to_log = False
            try:
                with contextlib.suppress(Exception):  # a device that has failed has no clock
                    self._meter.end_step(trainer.global_step)
                if self.report.peak_bytes is not None:
                    log_summary(trainer, self.report)
                    rank_zero_info(one_line(self.report))
            except Exception as error:  # the run's own error is the one to be raised
                _log.error(f"memsave: the final figures could not be logged: {error}")
        self._batch = None

    def _post_mortem(self, trainer: L.Trainer, failing: Measurement | None, exception: BaseException) -> str:
        strategy = trainer.strategy
        model = trainer.lightning_module if strategy.model is None else strategy.model
        applied, fixed = self._settings_on()
        return post_mortem_text(
            alive(model, trainer.optimizers, self._batch, strategy.root_device),
            applied,
            {*fixed, *ways_of_training(trainer)},
            failing or self._meter.highest,
            f"{type(exception).__name__}: {exception}",
        )

    def _settings_on(self) -> tuple[set[str], set[str]]:
        """Return what is on, by the names of the compatibility table, and what of it does not step aside for others."""
        return set(), set()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop measuring."""
        self._meter.abandon()
        self._evaluation_meter.abandon()
        self._save_snapshot()

    def _headlines(self) -> dict[str, float]:
        return {name: figure for name, figure in self.report.metrics().items() if name in HEADLINES}

    def _config(self) -> dict[str, Any]:
        return {"recipe": None, "every": self._meter.every}


def _evaluation_meter(every: int) -> Meter:
    return Meter(every, first=(1, 2), is_timed=False)


def with_baseline(measured: MemoryReport, baseline: MemoryReport | Prediction) -> MemoryReport:
    """Return a report that is held against another run."""
    held = dataclasses.replace(
        measured,
        baseline_peak_bytes=baseline.peak_bytes,
        baseline_source="predicted",
        baseline_by_category=dict(baseline.by_category),
    )
    if isinstance(baseline, Prediction):
        return held
    return dataclasses.replace(held, baseline_source="measured", baseline_step_seconds=baseline.step_seconds)


def _num_samples(batch: Batch) -> int | None:
    try:
        return batch_size(batch)
    except UnsplittableBatchError:
        return None


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
