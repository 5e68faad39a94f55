"""What happens to optimizers under Lightning: low-bit state, steps in float32, steps inside of backward."""

from __future__ import annotations

import functools
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightning_memsave.core.report import Applied
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.techniques.low_precision import Weights, step_in_float32
from lightning_memsave.techniques.optimizer_state import (
    GradientRelease,
    OptimizerState,
    apply_format,
    check_optimizers,
    release_applied,
)


def change_optimizers(
    trainer: Any, recipe: Recipe, weights: Weights | None
) -> tuple[list[Applied], GradientRelease | None]:
    """Change the optimizers of the trainer's strategy as the recipe says, in place.

    Returns:
        What was done, and the release of gradients, which ends with the run where the rest stays.
    """
    optimizers, module = trainer.strategy.optimizers, trainer.lightning_module
    done: list[Applied] = []
    config = recipe.get(OptimizerState)
    if config is not None:
        check_optimizers(optimizers, config, module)  # all of them, before the first is changed
        if config.format != "32bit":
            done += [apply_format(optimizer, config, module) for optimizer in optimizers]
    if weights is not None:
        for optimizer in optimizers:
            step_in_float32(optimizer, weights)
    if config is None or config.gradients != "release":
        return done, None
    _name_readers(trainer)
    return [*done, release_applied()], _Release(trainer)


def _clip(value: float, p: Any) -> None:
    p.grad.clamp_(-value, value)


class _Release(GradientRelease):
    """Clips by value as well, which Lightning does after backward, when the gradients are gone."""

    def __init__(self, trainer: Any) -> None:
        value = trainer.gradient_clip_val
        super().__init__(trainer.strategy.optimizers, functools.partial(_clip, value) if value else None)
        self._trainer: Any = trainer
        self._clip_value, trainer.gradient_clip_val = value, None

    def remove(self) -> None:
        super().remove()
        if self._trainer is not None:
            self._trainer.gradient_clip_val, self._trainer = self._clip_value, None


def _name_readers(trainer: Any) -> None:
    for owner in (trainer.lightning_module, *trainer.callbacks):
        for hook in ("on_after_backward", "on_before_optimizer_step"):
            defined_in = next(cls for cls in type(owner).__mro__ if hook in vars(cls))
            if not defined_in.__module__.startswith(("lightning.", "pytorch_lightning.", "lightning_memsave.")):
                rank_zero_info(f"memsave: {type(owner).__name__}.{hook} sees no gradients: backward releases them.")


def ways_of_stepping(trainer: Any) -> dict[str, bool]:
    """The names, of `core.compatibility`, of what Lightning does with gradients between backward and step."""
    module = trainer.lightning_module
    clips = next(cls for cls in type(module).__mro__ if "configure_gradient_clipping" in vars(cls))
    return {
        "accumulate_grad_batches": trainer.accumulate_grad_batches > 1,
        "gradient clipping by norm": bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value",
        "configure_gradient_clipping": not clips.__module__.startswith(("lightning.", "pytorch_lightning.")),
    }
