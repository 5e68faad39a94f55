"""Run the same training several times, each with more memory saving, and compare."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memsave.callbacks import MemSave
from lightning_memsave.core.errors import NotLosslessWarning, setting_error
from lightning_memsave.core.report import MemoryReport
from lightning_memsave.core.units import counted
from lightning_memsave.demo.data import load_cifar10, load_digits_32
from lightning_memsave.demo.limit import SimulatedLimit
from lightning_memsave.demo.model import ImageClassifier, WideResNet
from lightning_memsave.reporting.chart import draw_comparison
from lightning_memsave.reporting.comparison import compare
from lightning_memsave.reporting.console import print_comparison, show_summary
from lightning_memsave.reporting.dashboard import build_workspace, write_workspace
from lightning_memsave.reporting.page import write_page
from lightning_memsave.reporting.runs import run_of
from lightning_memsave.reporting.wandb_run import wandb_logger

_PROJECT = "memsave-demo"
RUNS: dict[str, dict[str, Any]] = {
    "plain Lightning": {"recipe": "measure"},
    "out of memory, survived": {"recipe": "lossless"},
    "exact": {"recipe": "exact"},
    "budget 0.35x": {"budget": "0.35x", "planning_seconds": 30},
    "balanced": {"recipe": "balanced"},
    "extreme": {"recipe": "extreme"},
}
"""The arguments of `MemSave` for each run; the first is what the others are compared with."""
LIMITS = {"out of memory, survived": 0.6}
"""Runs that have less memory, as a fraction of the first run's peak: a simulated limit raises torch's own error."""
_NEXT = """\
In your own project:

    trainer = L.Trainer(callbacks=[MemSave("exact")])          # the same result in less
    trainer = L.Trainer(callbacks=[MemSave(budget="8GiB")])    # the cheapest plan that fits
    lightning-memsave plan my_module:Model --batch my_module:batch    # the peak before a run
"""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Settings of the demo.

    Raises:
        ValueError: a number of epochs or a batch size below 1, or a momentum that is no fraction.
    """

    out: Path = Path("memsave-demo")
    """Folder of the table, the picture and the W&B runs."""
    data_dir: Path | None = None
    """A folder with CIFAR-10's binary version; without, scikit-learn's bundled digits."""
    epochs: int = 2
    batch_size: int = 100
    seed: int = 0
    batchnorm_momentum: float = 0.3
    """Momentum of running statistics: torch's 0.1 lags so far behind in 28 steps that the test measures little else."""
    wandb: bool = True
    """Log each run to W&B, offline."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise setting_error(name, "must be at least 1", getattr(self, name), "The default is a good start.")
        if not 0 < self.batchnorm_momentum <= 1:
            rule = "must be above 0 and at most 1"
            raise setting_error("batchnorm_momentum", rule, self.batchnorm_momentum, "The default is a good start.")


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """One run of the demo."""

    name: str
    report: MemoryReport
    test_accuracy: float
    """Fraction of test images, 0 to 1."""
    settings: dict[str, Any]
    """What was switched on."""
    weights_hash: str
    """Digest of all weights and buffers after training: equal for equal bits."""


def run_demo(config: DemoConfig, console: Console | None = None) -> list[DemoResult]:
    """Train each of `RUNS` from the same weights on the same batches; write table, picture, page and W&B runs.

    Returns:
        The runs, in order, each with its report against the first one.

    Raises:
        ValueError: the data folder does not hold what it should, or a batch is larger than the data.
    """
    console = console or Console()
    train, test = load_cifar10(config.data_dir) if config.data_dir else load_digits_32(config.seed)
    if config.batch_size > len(train):
        raise setting_error(
            "batch_size", f"must be at most {len(train)} (the training images)", config.batch_size, "Use a smaller one."
        )
    config.out.mkdir(parents=True, exist_ok=True)
    results: list[DemoResult] = []
    steps = config.epochs * (len(train) // config.batch_size)
    with _progress(console) as progress, _quiet():
        for name, settings in RUNS.items():
            bar = progress.add_task(name, total=steps)
            baseline = results[0].report if results else None
            results.append(_run(name, settings, config, (train, test), baseline, _Bar(progress, bar)))
    _present(results, config, console, num_test=len(test))
    return results


class _Bar(Callback):
    def __init__(self, progress: Progress, bar: Any) -> None:
        self._progress, self._bar = progress, bar

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._progress.advance(self._bar)


def _run(
    name: str,
    settings: dict[str, Any],
    config: DemoConfig,
    data: tuple[TensorDataset, TensorDataset],
    baseline: MemoryReport | None,
    bar: Callback,
) -> DemoResult:
    L.seed_everything(config.seed, verbose=False)
    module = ImageClassifier(WideResNet())
    for norm in module.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            norm.momentum = config.batchnorm_momentum
    memsave = MemSave(**settings, summary=name == [*RUNS][-1])
    callbacks: list[Callback] = [memsave, bar]
    if baseline is not None and baseline.peak_bytes is not None:
        memsave.compare_to(baseline)
        if name in LIMITS:
            limit = SimulatedLimit(int(LIMITS[name] * baseline.peak_bytes))
            callbacks = [limit, *callbacks, limit.after]
    logger: Any = False
    if config.wandb:
        logger = wandb_logger(_PROJECT, save_dir=str(config.out), offline=True, name=name, quiet=True)
    trainer = L.Trainer(
        max_epochs=config.epochs,
        accelerator="auto",
        devices=1,
        callbacks=callbacks,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    shuffled = torch.Generator().manual_seed(config.seed)
    trainer.fit(module, DataLoader(data[0], config.batch_size, shuffle=True, drop_last=True, generator=shuffled))
    scores = trainer.test(module, DataLoader(data[1], config.batch_size), verbose=False)
    if config.wandb:
        import wandb

        wandb.finish()
    return DemoResult(
        name=name,
        report=memsave.report,
        test_accuracy=scores[0]["test/accuracy"],
        settings=memsave.recipe.as_dict(),
        weights_hash=_hash(module),
    )


def _hash(module: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in module.state_dict().values():
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:12]


def _present(results: list[DemoResult], config: DemoConfig, console: Console, num_test: int) -> None:
    title = (
        f"WideResNet-28-2, {'CIFAR-10' if config.data_dir else 'digits'}, batch {config.batch_size}, seed {config.seed}"
    )
    runs = [run_of(r.name, r.report, {"test/accuracy": r.test_accuracy}, {"memsave": r.settings}) for r in results]
    comparison = compare(runs, "test/accuracy")
    print_comparison(comparison, console, title)
    for line in _findings(results, num_test):
        console.print(line, markup=False)
    rows = _write_csv(results, config.out / "table.csv")
    picture = draw_comparison({r.name: r.report for r in results}, config.out / "memory.png", title)
    page = write_page(comparison, config.out / "index.html", title)
    for what, path in (("Table:   ", rows), ("Picture: ", picture), ("Page:    ", page)):
        console.print(f"{what} {path.resolve()}", soft_wrap=True, markup=False)
    if config.wandb:
        workspace = write_workspace(build_workspace(f"ENTITY/{_PROJECT}"), config.out / "workspace.json")
        how = f"(saved at W&B by `lightning-memsave dashboard ENTITY/{_PROJECT}`)"
        console.print(f"Workspace: {workspace.resolve()} {how}", soft_wrap=True, markup=False)
        folder = (config.out / "wandb").resolve()
        how = f"(view: wandb leet {folder}; upload: wandb sync {folder})"
        console.print(f"W&B runs: {folder} {how}", soft_wrap=True, markup=False)
    show_summary(results[-1].report, console=console)
    console.print(_NEXT, markup=False)


def _findings(results: list[DemoResult], num_test: int) -> Iterator[str]:
    """Yield what the table does not say: equal bits, events that were survived, how far accuracy scatters."""
    first, *others = results
    for result in others:
        if result.weights_hash == first.weights_hash:
            yield f"{result.name}: the trained weights are those of {first.name}, bit for bit ({first.weights_hash})."
        if num := result.report.num_oom_recovered:
            yield f"{result.name}: memory ran out {counted(num, 'time')}; each time the step was run again."
    error = math.sqrt(2 * first.test_accuracy * (1 - first.test_accuracy) / num_test)
    rule = f"accuracies that differ by less than {2 * error:.1%} (two standard errors) may do so by chance"
    yield f"One seed, {num_test} images: {rule}."


def _write_csv(results: list[DemoResult], path: Path) -> Path:
    rows = [
        {
            "run": result.name,
            "peak_bytes": result.report.peak_bytes,
            **{f"{category}_bytes": size for category, size in result.report.by_category.items()},
            "factor": result.report.factor,
            "step_seconds": result.report.step_seconds,
            "test_accuracy_fraction": result.test_accuracy,
            "loss_class": result.report.loss_class,
            "weights_hash": result.weights_hash,
            "applied": json.dumps([applied.summary for applied in result.report.applied]),
        }
        for result in results
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:32}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's banners and our warning about BatchNorm, which the table says once."""
    import logging

    names = [
        f"lightning.{part}"
        for part in ("pytorch", "fabric", "pytorch.utilities.rank_zero", "fabric.utilities.rank_zero")
    ]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotLosslessWarning)
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
