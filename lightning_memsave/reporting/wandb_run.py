"""Weights & Biases. wandb is imported when a run of it exists or is asked for, never before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_memsave.core.report import MemoryReport
from lightning_memsave.core.versions import require_package
from lightning_memsave.lightning_compat import kinds_of

STEP_METRIC = "trainer/global_step"
BREAKDOWN, TIMELINE = "memsave/breakdown", "memsave/timeline"  # wandb adds `_table` for what they are drawn from


def is_wandb(logger: object) -> bool:
    """Return whether `logger` is a `WandbLogger` of either Lightning namespace, without importing wandb."""
    return "WandbLogger" in kinds_of(logger)


def wandb_logger(
    project: str = "memsave", *, save_dir: str = ".", offline: bool = False, quiet: bool = False, **options: Any
) -> Any:
    """Make a `WandbLogger` that keeps its last figures when the process is killed, and needs no account or network.

    wandb writes its file every 15 seconds, so a run killed for memory loses its peak; here it is every second. Without
    an API key or a network the run is kept offline, with one warning; `wandb sync` uploads it later.

    Args:
        project: the project's name.
        save_dir: where the run is written.
        offline: do not try to connect.
        quiet: wandb prints nothing.
        options: further arguments of `lightning.pytorch.loggers.WandbLogger`.

    Raises:
        ValueError: wandb is not installed.
    """
    require_package("wandb", "`wandb_logger`")
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    options.setdefault(
        "settings", wandb.Settings(x_transaction_log_flush_interval=1.0, init_timeout=20.0, silent=quiet)
    )
    if offline:
        return _offline_logger(project, save_dir, options)
    logger = WandbLogger(project=project, save_dir=save_dir, **options)
    try:
        _ = logger.experiment
    except (wandb.errors.UsageError, wandb.errors.CommError) as error:
        reason = str(error).partition("\n")[0]
        left_out = " `log_model` needs a connection and is left out." if options.pop("log_model", False) else ""
        rank_zero_warn(
            f"wandb is not reachable ({reason}). The run is kept offline in {save_dir}; upload: `wandb sync`.{left_out}"
        )
        return _offline_logger(project, save_dir, options)
    return logger


def _offline_logger(project: str, save_dir: str, options: Mapping[str, Any]) -> Any:
    """Ask wandb itself too: Lightning only sets `WANDB_MODE`, which wandb no longer reads once it was started."""
    from lightning.pytorch.loggers import WandbLogger

    return WandbLogger(project=project, save_dir=save_dir, offline=True, **{**options, "mode": "offline"})


def record_config(run: Any, config: Mapping[str, Any]) -> None:
    """Record the resolved settings under `memsave` in the run's config, and each technique as a tag."""
    run.config.update({"memsave": dict(config)}, allow_val_change=True)
    techniques = [f"memsave:{name}" for name, settings in config.items() if isinstance(settings, Mapping)]
    run.tags = tuple(dict.fromkeys((*(run.tags or ()), *techniques)))


def record_charts(run: Any, report: MemoryReport, step: int) -> None:
    """Log two charts with their tables: the bytes of the peak by category, and live bytes through the step."""
    import wandb

    if report.peak_bytes is None:
        return
    table = wandb.Table(["category", "bytes"], [[name, size] for name, size in report.by_category.items()])
    charts = {BREAKDOWN: wandb.plot.bar(table, "category", "bytes", "Where the bytes of the peak were")}
    if (line := report.timeline) is not None:
        charts[TIMELINE] = wandb.plot.line_series(
            line.events,
            list(line.by_category.values()),
            keys=list(line.by_category),
            title="Live bytes in the step with the highest peak",
            xname="allocation or free",
        )
    run.log({**charts, STEP_METRIC: step})


def record_summary(run: Any, report: MemoryReport) -> None:
    """Record the figures so far, and what was applied, under their own names in the run's summary."""
    source = {} if report.factor is None else {"memsave/baseline_source": report.baseline_source}
    run.summary.update(
        {
            **report.metrics(),
            **source,
            "memsave/loss_class": report.loss_class,
            "memsave/applied": [f"{a.technique}: {a.summary}" for a in report.applied],
        }
    )
