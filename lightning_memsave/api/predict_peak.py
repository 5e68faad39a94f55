"""The peak of a run before it is one: `predict`, with the settings of a `MemSave`."""

from __future__ import annotations

from typing import Any, Literal

from lightning_memsave.callbacks.memsave import MemSave
from lightning_memsave.core.errors import setting_error
from lightning_memsave.prediction.predictor import Predictor
from lightning_memsave.simulation.predicted_step import Prediction


def predict(
    module: Any,
    batch: Any,
    memsave: MemSave | None = None,
    *,
    num_samples: int | None = None,
    target: Literal["cpu", "cuda"] = "cpu",
    **trainer: Any,
) -> Prediction:
    """Predict the peak of a training step, without running it on real tensors and without a device.

    Args:
        module: a LightningModule, which is copied, or a function that makes one, which then takes no memory.
        batch: what `training_step` takes, or a function that makes it.
        memsave: the settings; by default `MemSave()`.
        num_samples: in the batch, instead of as many as it has.
        target: `"cuda"` adds what a CUDA device would hold.
        trainer: arguments of `Trainer` that steps depend on, for example `precision="bf16-mixed"`.

    Raises:
        ValueError: as `MemSave` and its techniques raise it; a budget that was not planned for yet; or the step reads
            values and the module is not real.

    Example:
        >>> import torch
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> prediction = predict(BoringModel(), torch.ones(8, 32), MemSave(microbatch=2))
        >>> prediction.source, sum(prediction.by_category.values()) == prediction.peak_bytes
        ('fake', True)
    """
    predictor = Predictor(module, batch, target=target, **trainer)
    memsave = memsave or MemSave()
    if memsave.budgeted is not None and memsave.plan is None:
        remedy = "Predict with `MemSave(plan_training(...))`."
        raise setting_error("budget", "needs a plan first", memsave.budgeted.budget_text, remedy)
    recipe = memsave.recipe if memsave.plan is None else memsave.plan.as_recipe()
    if memsave.noise_bounded is not None:
        recipe = memsave.noise_bounded.recipe_for(module, batch)
    return predictor(recipe, num_samples=num_samples)
