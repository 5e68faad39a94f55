"""What a fit would have taken without memory saving, and which setting would save more: predicted when it is over.

A copy of the module takes a step on fake tensors, which takes no memory, on one sample that was kept from a batch. It
takes four seconds of processor time at most; after long fits, a small share of the fit's seconds.
"""

from __future__ import annotations

import contextlib
import io
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device

from lightning_memsave.core.compatibility import check_compatibility
from lightning_memsave.core.report import LOSS_CLASSES, LossClass, MemoryReport
from lightning_memsave.lightning_compat import Batch, data_module_of, is_compiled
from lightning_memsave.loops.planned_checkpointing import has_room
from lightning_memsave.loops.trainer_features import ways_of_training
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.prediction.predictor import Predictor
from lightning_memsave.prediction.run_predictions import options_of
from lightning_memsave.simulation.predicted_step import Prediction
from lightning_memsave.techniques.activation_compression import ActivationCompression, has_wide_head, with_head
from lightning_memsave.techniques.checkpointing import Checkpointing
from lightning_memsave.techniques.low_precision import LowPrecision
from lightning_memsave.techniques.microbatching import Microbatching, why_not_exact
from lightning_memsave.techniques.microbatching.split import UnsplittableBatchError, batch_size, cloned, take
from lightning_memsave.techniques.optimizer_state import OptimizerState
from lightning_memsave.techniques.registry import Config

_log = logging.getLogger("lightning.pytorch.memsave")

LEAST_SECONDS = 4.0
"""Seconds of processor time that predictions may take after any fit."""
SHARE = 0.05
"""Share of a long fit's seconds that predictions may take after it."""
_NO_TIME = 0.1  # seconds, in which nothing is predicted
_WORTH_TELLING = 0.9  # of the measured peak
_Candidate = tuple[str, Config, LossClass]
_CANDIDATES: tuple[_Candidate, ...] = (
    ('checkpointing="blocks"', Checkpointing(), "exact"),
    ('activations="exact"', ActivationCompression(), "exact"),
    ('optimizer_state="8bit"', OptimizerState(), "changed"),
    ('precision="bf16-sr"', LowPrecision(), "changed"),
)
"""Settings that need no number, and their loss class."""
_PARTS = 4  # of a batch, where microbatches are advised


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
    report: MemoryReport,
    seconds: float,
) -> Outlook:
    """Predict the plain step, and with what is left of the time, settings that would save more.

    Args:
        trainer: its fit is over, and its strategy torn down.
        module: that was trained, as it was before.
        sample: of the measured batch with the highest peak.
        recipe: that was in force.
        report: of the fit; where it has a baseline, none is predicted.
        seconds: how long this may take, of processor time.
    """
    if trainer.world_size > 1:
        return Outlook(why_not="it is not predicted with several processes")
    if seconds < _NO_TIME:
        return Outlook(why_not="there is no time to predict it")
    if not has_room():
        return Outlook(why_not="there are too few addresses left to predict it")
    if sample is None:
        return Outlook(why_not="the samples of a batch cannot be told")
    if is_compiled(module):
        return Outlook(why_not="a module that is compiled as a whole cannot be predicted")
    try:
        with _unheard():
            predictor = Predictor(
                module,
                sample.batch,
                data_module=data_module_of(trainer),
                target="cuda" if trainer.strategy.root_device.type == "cuda" else "cpu",
                deadline=time.process_time() + seconds,
                only_fake=True,
                **options_of(trainer),
            )
            plain = None if report.factor is not None else predictor((), num_samples=sample.num_samples)
    except Exception as error:  # of user code, on a copy of the module, once the fit is over
        return Outlook(why_not=" ".join(str(error).split())[:200])
    baseline = None if plain is None else _as_measured(plain)
    if report.num_oom_recovered:  # what recovery has done is in no recipe
        return Outlook(baseline=baseline)
    size, microbatching = report.microbatch_size, recipe.get(Microbatching)
    if size is not None and microbatching is not None:
        recipe = recipe.with_settings(microbatching.of_size(size))
    candidates = [each for each in _candidates(module) if recipe.leaves_open(type(each[1]))]
    if size is None and _may_be_cut(recipe, module, sample):
        part = max(1, sample.num_samples // _PARTS)
        text = f"microbatch={part}, if the loss is a mean over samples"
        candidates.append((text, (microbatching or Microbatching()).of_size(part), "exact"))
    further = _next(predictor, sample, recipe, report, ways_of_training(trainer), candidates)
    return replace(further, baseline=baseline)


def _next(
    predictor: Predictor,
    sample: Sample,
    recipe: Recipe,
    report: MemoryReport,
    ways: Sequence[str],
    candidates: Sequence[_Candidate],
) -> Outlook:
    """Return the setting with the smallest peak, of the class of the run where there is one, and what it takes.

    Microbatches come after others of their class: whether the loss allows them is found out only in a run.
    """
    assert report.peak_bytes is not None, "asked before"
    least = round(_WORTH_TELLING * report.peak_bytes)
    found: list[tuple[bool, bool, int, str]] = []
    for text, config, loss_class in candidates:
        is_worse = LOSS_CLASSES.index(loss_class) > LOSS_CLASSES.index(report.loss_class)
        try:
            others = (t for t in recipe.techniques if type(t) is not type(config))
            further = Recipe(recipe.name, (*others, config))
            check_compatibility([*further.rows(), *ways])
            with _unheard():
                peak_bytes = _as_measured(predictor(further, num_samples=sample.num_samples)).peak_bytes
        except TimeoutError:
            break
        except Exception as error:  # refused, or of user code
            _log.debug(f"memsave: {text} is not predicted: {error}")
            continue
        if peak_bytes < least:
            told = f"{text}, which changes the result" if is_worse else text
            found.append((is_worse, isinstance(config, Microbatching), peak_bytes, told))
    if not found:
        return Outlook()
    *_, peak_bytes, text = min(found)
    return Outlook(next_setting=text, next_peak_bytes=peak_bytes)


def _may_be_cut(recipe: Recipe, module: L.LightningModule, sample: Sample) -> bool:
    """Return whether microbatches are open, and no module of the model notices them."""
    own = recipe.get(Microbatching)
    is_open = recipe.leaves_open(Microbatching) if own is None else own.size == "auto"
    return is_open and sample.num_samples > 1 and module.automatic_optimization and not why_not_exact(module)


def _candidates(module: L.LightningModule) -> Iterator[_Candidate]:
    """Yield settings that need no number; where the model ends in many classes, without logits."""
    for text, config, loss_class in _CANDIDATES:
        if isinstance(config, ActivationCompression) and has_wide_head(module):
            yield 'activations=["exact", "linear-cross-entropy"]', with_head(config), loss_class
        else:
            yield text, config, loss_class


def _as_measured(prediction: Prediction) -> Prediction:
    """Return a prediction with the peak that a run measures: on CUDA, that of the allocator."""
    if prediction.cuda is None:
        return prediction
    return prediction.with_bytes("temporary", prediction.cuda.allocated_bytes - prediction.peak_bytes)


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Silence what `training_step` prints: it has been printed once."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
