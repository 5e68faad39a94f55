"""Ask a LightningModule how its loss depends on the batch, without leaving a trace of having asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.numerics.fakes import is_fake
from lightning_memsave.strategies.out_of_memory import is_out_of_memory
from lightning_memsave.strategies.rehearsal import without_a_trace
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.microbatching.reduction import Reduction, infer_reduction
from lightning_memsave.techniques.microbatching.split import cloned, take

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5}
_COARSE_TOLERANCE = 2e-2  # half precision anywhere in the model or by autocast


@dataclass(frozen=True)
class ProbeResult:
    """The reduction, or why there is none; neither when this batch does not tell."""

    reduction: Reduction | None = None
    why_not: str = ""
    has_failed: bool = False
    """Whether the loss could not be evaluated, which says nothing about other samples."""


def infer_module_reduction(
    trainer: Any, kwargs: dict[str, Any], num_samples: int, config: Microbatching
) -> ProbeResult:
    """Evaluate `training_step` three times on some samples of a batch, in eval mode and without gradients.

    Args:
        trainer: Lightning's trainer, inside its fit loop.
        kwargs: the arguments of `training_step`, `batch` among them.
        num_samples: how many samples the batch has.
        config: tells how many samples fit at once, and how to cut the batch.
    """
    module, batch = trainer.lightning_module, kwargs["batch"]
    if any(is_fake(p) for p in module.parameters()):  # a prediction, which flags it
        return ProbeResult("mean")
    if config.split_fn is None:
        assert config.size != "auto", "who cuts knows the size"
        num_used = min(num_samples, max(3, 2 * config.size))
        cut = max(1, num_used // 3)
        whole = take(batch, 0, num_used, num_samples)
        parts: list[tuple[Any, float]] = [
            (take(whole, 0, cut, num_used), cut),
            (take(whole, cut, num_used, num_used), num_used - cut),
        ]
    else:
        whole = batch
        parts = config.parts(batch)

    dtypes = set()

    def loss_of(part: Any) -> float:
        # A copy, as the parts are views of the batch, which a step may change.
        loss = _loss_in(trainer.strategy.training_step(*{**kwargs, "batch": cloned(part)}.values()))
        dtypes.add(loss.dtype)
        return float(loss)

    with without_a_trace(trainer, module, batch), torch.no_grad():
        module.eval()
        try:
            if config.weight_fn is not None:
                parts = [(part, float(config.weight_fn(part))) for part, _ in parts]
            losses = {id(part): loss_of(part) for part in (whole, *(part for part, _ in parts))}
            tolerance = _relative_tolerance(trainer, dtypes)
            found = infer_reduction(lambda part: losses[id(part)], whole, parts, tolerance)
        except Exception as error:  # whatever user code raises outside its usual mode
            if is_out_of_memory(error):  # says nothing about the loss
                raise
            why_not = f"the loss cannot be evaluated in eval mode ({type(error).__name__}: {error})."
            return ProbeResult(why_not=why_not, has_failed=True)
    if found == "either":
        return ProbeResult()
    if found == "neither":
        return ProbeResult(
            why_not="the loss of a batch is neither the mean nor the sum of the losses of its parts "
            "(in-batch negatives, or a mean over something else than samples).",
        )
    return ProbeResult(found)


def _loss_in(output: Any) -> Tensor:
    """The loss that `training_step` returned; not a number where Lightning skips the batch."""
    loss = output["loss"] if isinstance(output, dict) else output
    if loss is None:
        return torch.tensor(math.nan)
    if not isinstance(loss, Tensor):
        raise TypeError("training_step returned no loss")
    return loss


def _relative_tolerance(trainer: Any, dtypes: set[torch.dtype]) -> float:
    """For losses of these dtypes, of which transformers' are float32 even where the model is float64."""
    with trainer.precision_plugin.train_step_context():
        if torch.is_autocast_enabled(trainer.strategy.root_device.type):
            return _COARSE_TOLERANCE
    dtypes = dtypes | {p.dtype for p in trainer.lightning_module.parameters() if p.is_floating_point()}
    return max((_TOLERANCE.get(dtype, _COARSE_TOLERANCE) for dtype in dtypes), default=_COARSE_TOLERANCE)
