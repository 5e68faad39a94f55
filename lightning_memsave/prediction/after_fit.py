"""What a fit would have taken without memory saving, and which setting would save more: predicted when it is over.

Nothing of the run is touched: a copy of the module takes a step on fake tensors, which takes no memory, on one sample
that was kept from the first batch. It takes four seconds of processor time, or a
small share of what the fit took.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device

from lightning_memsave.core.compatibility import check_compatibility
from lightning_memsave.lightning_compat import Batch, data_module_of, is_compiled
from lightning_memsave.loops.trainer_features import ways_of_training
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.prediction.budgeted_run import options_of, under_ddp
from lightning_memsave.prediction.predictor import Predictor
from lightning_memsave.simulation.predicted_step import Prediction
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.checkpointing import Checkpointing
from lightning_memsave.techniques.low_precision import LowPrecision
from lightning_memsave.techniques.microbatching.split import UnsplittableBatchError, batch_size, cloned, take
from lightning_memsave.techniques.optimizer_state import OptimizerState
from lightning_memsave.techniques.registry import Config

LEAST_SECONDS = 4.0
"""Seconds of processor time that predictions may take after any fit."""
SHARE = 0.05
"""Share of a fit's seconds that it may take after a long one."""
_NO_TIME = 0.1  # seconds, in which nothing is predicted
_WORTH_TELLING = 0.9  # of the measured peak
_CANDIDATES: tuple[tuple[str, Config], ...] = (
    ('checkpointing="blocks"', Checkpointing()),
    ('activations="exact"', ActivationCompression()),
    ('optimizer_state="8bit"', OptimizerState()),
    ('precision="bf16-sr"', LowPrecision()),
)
"""Settings that need no number, exact ones first."""


@dataclass(frozen=True)
class Sample:
    """One sample of a batch, from which a step on the whole batch is predicted."""

    batch: Batch
    num_samples: int

    @classmethod
    def of(cls, batch: Batch) -> Sample | None:
        """Return a copy of the first sample of a batch, on the CPU; `None` where samples cannot be told."""
        try:
            num_samples = batch_size(batch)
        except UnsplittableBatchError:
            return None
        return cls(move_data_to_device(cloned(take(batch, 0, 1, num_samples)), torch.device("cpu")), num_samples)


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What was predicted after a fit."""

    baseline: Prediction | None = None
    next_setting: str | None = None
    next_peak_bytes: int | None = None
    why_not: str = ""
    """Why there is no baseline; empty where there is one."""


def seconds_allowed(fit_seconds: float) -> float:
    """Return how long predictions may take after a fit of so many seconds."""
    return max(LEAST_SECONDS, SHARE * fit_seconds)


def look_ahead(
    trainer: L.Trainer,
    module: L.LightningModule,
    sample: Sample | None,
    recipe: Recipe,
    peak_bytes: int,
    seconds: float,
    *,
    has_baseline: bool = False,
) -> Outlook:
    """Predict the plain step, and with what is left of the time, settings that would save more.

    Args:
        trainer: its fit is over, and its strategy torn down.
        module: that was trained, as it was before.
        sample: of the first batch.
        recipe: that was in force.
        peak_bytes: what was measured.
        seconds: how long this may take, of processor time.
        has_baseline: whether the plain step is known already.
    """
    if seconds < _NO_TIME:
        return Outlook(why_not="there is no time for it")
    ways = ways_of_training(trainer)
    if sample is None:
        return Outlook(why_not="the samples of a batch cannot be told")
    if is_compiled(module) or (trainer.world_size > 1 and "DDP" not in ways):
        return Outlook(why_not="a step of this way of training cannot be predicted")
    deadline = time.process_time() + seconds
    try:
        with _unheard():
            predictor = Predictor(
                module,
                sample.batch,
                data_module=data_module_of(trainer),
                target="cuda" if trainer.strategy.root_device.type == "cuda" else "cpu",
                deadline=deadline,
                only_fake=True,
                **options_of(trainer),
            )
            baseline = None if has_baseline else predictor((), num_samples=sample.num_samples)
    except Exception as error:  # of user code, on a copy of the module, once the fit is over
        return Outlook(why_not=" ".join(str(error).split())[:200])
    is_ddp = trainer.world_size > 1
    if is_ddp and baseline is not None:
        baseline = under_ddp(baseline, module)
    setting, least = None, round(_WORTH_TELLING * peak_bytes)
    for text, config in _CANDIDATES:
        if not recipe.leaves_open(type(config)):
            continue
        with contextlib.suppress(Exception), _unheard():
            further = Recipe(recipe.name, (*recipe.techniques, config))
            check_compatibility([*further.rows(), *ways])
            found = predictor(further, num_samples=sample.num_samples)
            found = under_ddp(found, module) if is_ddp else found
            if found.peak_bytes < least:
                setting, least = text, found.peak_bytes
    return Outlook(baseline=baseline, next_setting=setting, next_peak_bytes=None if setting is None else least)


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """What `training_step` prints is not printed once more."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
