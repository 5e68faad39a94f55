"""Predictions of the steps of a run that is about to begin: its settings, its device, and its processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import lightning as L

from lightning_memsave.lightning_compat import Batch, bucket_bytes_of, data_module_of
from lightning_memsave.loops.late_reduction import bytes_on_top
from lightning_memsave.loops.optimizer_changes import most_accumulated
from lightning_memsave.planner.make_plan import Predict, Situation
from lightning_memsave.prediction.microbatch_extrapolation import as_if_whole, first_microbatches, rest_bytes
from lightning_memsave.prediction.predictor import Predictor
from lightning_memsave.prediction.real_run import StepFailedError
from lightning_memsave.prediction.simulated_process_group import planning_groups_of
from lightning_memsave.simulation.predicted_step import Prediction
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.optimizer_state import OptimizerState, exchanged_bytes
from lightning_memsave.techniques.registry import Config

STEPS_DEPEND_ON = (
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "max_epochs",
    "max_steps",
)
"""Arguments of `Trainer` that a step depends on; the run's length is among them, as a schedule may be as long."""
_LASTING = ("weights", "optimizer_state", "data")


def options_of(trainer: L.Trainer) -> dict[str, Any]:
    """Return the arguments of a `Trainer` that a step depends on, for another one that takes the same step."""
    options = {name: getattr(trainer, name) for name in STEPS_DEPEND_ON}
    options |= {"accumulate_grad_batches": most_accumulated(trainer)}
    if (groups := planning_groups_of(trainer)) is not None:
        options |= {"strategy": groups, "devices": trainer.num_devices, "num_nodes": trainer.num_nodes}
    return options


def predictions_in(module: L.LightningModule, batch: Batch, trainer: L.Trainer | None, situation: Situation) -> Predict:
    """Return what predicts the steps of a run, for shapes alone where that is possible.

    Args:
        module: the LightningModule.
        batch: its first.
        trainer: that is being set up, or `None`.
        situation: tells whether the run will cut its batches, which shapes alone do not, and what it takes to ask.
    """
    stays_whole = bool(situation.why_whole)
    options = {} if trainer is None else options_of(trainer)
    is_cuda = trainer is not None and trainer.strategy.root_device.type == "cuda"
    data = None if trainer is None else data_module_of(trainer)
    predictor = Predictor(module, lambda: batch, data_module=data, target="cuda" if is_cuda else "cpu", **options)

    def predict(techniques: Sequence[Config]) -> Prediction:
        if stays_whole:
            techniques = [config for config in techniques if not isinstance(config, Microbatching)]
        shown = first_microbatches(techniques, batch)
        used, missing_bytes = (None, 0) if shown is None else (shown.num_samples, rest_bytes(batch, shown))
        try:
            found = as_if_whole(lambda part: predictor(part, num_samples=used), techniques, missing_bytes)
        except ValueError:
            raise
        except Exception as error:  # of user code, on a copy of the module
            raise StepFailedError(f"{type(error).__name__}: {error}") from error
        return found.with_bytes("data", missing_bytes)

    return _asking(predict, situation)


def _asking(predict: Predict, situation: Situation) -> Predict:
    """Return `predict` with what some steps take besides on CPU, to find out how the loss depends on the batch."""

    def asking(techniques: Sequence[Config]) -> Prediction:
        found, asking_bytes = predict(techniques), situation.asking_of(techniques)
        if not asking_bytes or found.cuda is not None:
            return found
        lasting = sum(found.by_category[name] for name in _LASTING)
        more_bytes = lasting + asking_bytes - found.peak_bytes
        return replace(found, workspace_bytes=max(found.workspace_bytes, more_bytes))

    return asking


def agreed(trainer: L.Trainer, predict: Predict) -> Predict:
    """Return `predict` for all processes: each one asks, as a step may wait for the others, and rank 0's answer holds.

    Rank 0 has the largest shards under FSDP2. Under DDP the answer has what that takes on top.
    """

    def predict_together(techniques: Sequence[Config]) -> Prediction:
        answer: Prediction | ValueError
        try:
            answer = predict(techniques)
            if planning_groups_of(trainer) is None:
                answer = under_ddp(answer, trainer, techniques)
        except ValueError as error:
            answer = error
        answer = trainer.strategy.broadcast(answer)
        if isinstance(answer, ValueError):
            raise answer
        return answer

    return predict_together


def under_ddp(prediction: Prediction, trainer: L.Trainer, techniques: Sequence[Config]) -> Prediction:
    """Return the prediction of one process with what DDP, or the exchange in its place, takes on top."""
    if any(isinstance(config, OptimizerState) and config.gradients != "keep" for config in techniques):
        on_top = exchanged_bytes(trainer.lightning_module, bucket_bytes_of(trainer.strategy))
    else:
        lasting = sum(prediction.by_category[name] for name in _LASTING)
        on_top = bytes_on_top(trainer.lightning_module, prediction.peak_bytes, lasting)
    return prediction.with_bytes("gradients", on_top)
