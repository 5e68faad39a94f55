"""Write to whatever loggers a trainer has."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info

from lightning_memsave.core.report import Applied, MemoryReport, worst_loss_class
from lightning_memsave.core.units import format_bytes
from lightning_memsave.reporting import wandb_run


def _global_step(trainer: Any) -> int:
    """Return the x-axis that Lightning's own logging uses (private, seen in Lightning 2.6)."""
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step


def log_config(trainer: Any, config: Mapping[str, Any]) -> None:
    """Record the resolved settings where a logger keeps a configuration.

    Other loggers than W&B get them with the hyperparameters of the run; of a run without any they get none, as they
    would make files and metrics (`hparams.yaml`, `hp_metric`) that plain Lightning does not.
    """
    if not trainer.is_global_zero:
        return
    own = _hyperparameters(trainer)
    for logger in trainer.loggers:
        try:
            if wandb_run.is_wandb(logger):
                wandb_run.record_config(logger.experiment, config)
            elif getattr(trainer, "enable_autolog_hparams", True) and own:  # not in Lightning 2.5
                # With the run's own: TensorBoard shows the first that it is told, and Lightning tells them after this.
                logger.log_hyperparams({**own, "memsave": dict(config)})
        except Exception as error:  # MLflow's, for one, do not change; settings must not end a run
            rank_zero_info(f"memsave: {type(logger).__name__} did not accept the settings: {error}")


def _hyperparameters(trainer: Any) -> dict[str, Any]:
    """Return the hyperparameters of module and data that Lightning will log (private: `_log_hyperparams`)."""
    sources = [s for s in (trainer.lightning_module, trainer.datamodule) if s is not None and s._log_hyperparams]
    return {k: v for source in sources for k, v in source.hparams_initial.items() if k != "_class_path"}


def log_metrics(trainer: Any, metrics: Mapping[str, float]) -> None:
    """Log one row of metrics at the current step; no row when there are none."""
    for logger in trainer.loggers if metrics else ():
        logger.log_metrics(dict(metrics), step=_global_step(trainer))


def log_step(trainer: Any, step: MemoryReport, report: MemoryReport) -> None:
    """Log a row for a measured step; wandb's summary, which follows rows, gets those of the whole run again."""
    log_metrics(trainer, step.metrics())
    _record_summary(trainer, report)


def _record_summary(trainer: Any, report: MemoryReport) -> None:
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if wandb_run.is_wandb(logger):
            wandb_run.record_summary(logger.experiment, report)


def log_summary(trainer: Any, report: MemoryReport) -> None:
    """Log the final figures."""
    measured = {"memsave/num_steps_measured": report.num_steps_measured} if report.num_steps_measured else {}
    log_metrics(trainer, {**report.metrics(), **measured})
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            if wandb_run.is_wandb(logger):
                wandb_run.record_charts(logger.experiment, report, _global_step(trainer))
    _record_summary(trainer, report)


def of_the_largest_rank(trainer: Any, report: MemoryReport) -> MemoryReport:
    """Return the report with the highest peak of all processes, which is what has to fit; all of them have to ask.

    The peak of validation is the highest of all as well, which may be another process's. Of each technique the worst
    loss class is taken, with all reasons: what changes the gradients of one process changes the weights of all.
    """
    if trainer.world_size == 1 or not dist.is_available() or not dist.is_initialized():
        return report
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, report.as_dict())
    reports = [MemoryReport.from_dict(each) for each in found]
    largest = max(reports, key=lambda each: each.peak_bytes or 0)
    evaluated = max((each.evaluation_peak_bytes or 0 for each in reports), default=0) or None
    return dataclasses.replace(largest, evaluation_peak_bytes=evaluated, applied=_of_all(largest, reports))


def _of_all(largest: MemoryReport, reports: Sequence[MemoryReport]) -> tuple[Applied, ...]:
    """Return what techniques did, where a process says more against one of them than the largest, with its words."""
    found = {applied.technique: applied for applied in largest.applied}
    said: defaultdict[tuple[str, str], list[int]] = defaultdict(list)  # by technique and reason, in which processes
    for number, report in enumerate(reports):
        for applied in report.applied:
            known = found.setdefault(applied.technique, dataclasses.replace(applied, reasons=()))
            worse = applied if worst_loss_class((known.loss_class, applied.loss_class)) != known.loss_class else known
            found[applied.technique] = dataclasses.replace(worse, reasons=known.reasons)
            for reason in applied.reasons:
                said[applied.technique, reason].append(number)
    for (technique, reason), numbers in said.items():
        known = found[technique]
        if reason not in known.reasons:
            who = f"process {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} processes"
            text = reason if len(numbers) == len(reports) else f"{who}: {reason}"
            found[technique] = dataclasses.replace(known, reasons=(*known.reasons, text))
    return tuple(found.values())


def agreed(trainer: Any, figures: Mapping[str, float]) -> dict[str, float]:
    """Keep only figures that every process has, to avoid a collective deadlock."""
    if trainer.world_size == 1 or not dist.is_available() or not dist.is_initialized():
        return dict(figures)
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, set(figures))
    return {name: figure for name, figure in figures.items() if name in set.intersection(*names)}


def one_line(report: MemoryReport) -> str:
    """Return the report in one line.

    >>> one_line(MemoryReport(peak_bytes=2**20, by_category={"weights": 2**19, "data": 2**19}, num_steps_measured=2))
    'memsave: peak 1.0 MiB (weights 512.0 KiB, data 512.0 KiB), exact, 2 steps measured'
    """
    if report.peak_bytes is None:
        return "memsave: no step was measured (the first is never; a run of at least 2 steps has one)"
    largest = sorted(report.by_category.items(), key=lambda item: -item[1])
    split = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest if size)
    factor = f", {report.factor:.2f}x below the baseline" if report.factor is not None else ""
    return (
        f"memsave: peak {format_bytes(report.peak_bytes)} ({split}){factor}, {report.loss_class}, "
        f"{report.num_steps_measured} steps measured"
    )
