"""What happens to optimizers under Lightning: low-bit state, steps in float32, steps inside of backward."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info

from lightning_memsave.core.errors import NoEffectWarning, setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.lightning_compat import callbacks_named, callbacks_of, edits_grad, is_overridden, says_grad
from lightning_memsave.loops.norm_clipping import ClippingByNorm, run_for_norm
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.techniques.low_precision import Weights, step_in_float32
from lightning_memsave.techniques.optimizer_state import (
    GradientExchange,
    GradientRelease,
    GradientsIntoState,
    InBackward,
    OptimizerState,
    apply_format,
    check_optimizers,
    check_whole,
    decoded_state_dict,
    for_adafactor,
    gradients_applied,
    has_effect,
    in_order_of,
    inherited,
    is_low_bit,
    is_ours,
)
from lightning_memsave.techniques.optimizer_state.state_config import NormClipping
from lightning_memsave.torch_internals.coupling import held_by, hooks_of_step
from lightning_memsave.torch_internals.held_optimizers import stepping, with_held
from lightning_memsave.torch_internals.sharded_parameters import is_sharded


def change_optimizers(
    trainer: L.Trainer, recipe: Recipe, weights: Weights | None, exchange: GradientExchange | None = None
) -> tuple[list[Applied], InBackward | None]:
    """Change the optimizers of the trainer's strategy as the recipe says, in place.

    Args:
        trainer: being set up.
        recipe: what is to be done.
        weights: in 16 bits, if they are.
        exchange: averages the gradients that end in backward, where DDP does not wrap the model.

    Returns:
        What was done, and what happens to gradients in backward, which ends with the run where the rest stays.
    """
    optimizers, module = trainer.strategy.optimizers, trainer.lightning_module
    done: list[Applied] = []
    config = recipe.get(OptimizerState)
    if config is not None or weights is not None:
        optimizers = stepping(optimizers)
    if config is not None:
        check_optimizers(optimizers, config, module)  # all of them, before the first is changed
        if config.gradients == "into-state" and most_accumulated(trainer) > 1:
            _check_not_sharded(optimizers)
        has_none = OptimizerState not in recipe.by_default and not has_effect(optimizers, config, module)
        if has_none and not callbacks_named(trainer, "BaseFinetuning"):  # which adds layers to optimizers later
            by_rank = f", and what has no two sides above {config.rank} (`rank`)," if config.has_rank else ""
            warnings.warn(
                f"`optimizer_state` in {config.format!r} has no effect on this model. Parameters of fewer than "
                f"{config.min_size} elements (`OptimizerState(min_size=...)`), embeddings, heads and normalisations"
                f"{by_rank} keep their state.",
                NoEffectWarning,
                stacklevel=2,
            )
        done += filter(None, [apply_format(optimizer, config, module) for optimizer in optimizers])
    else:  # of an earlier fit
        done += [inherited(optimizer, was_asked=False) for optimizer in optimizers if is_ours(optimizer)]
    if weights is not None:
        for optimizer in optimizers:
            step_in_float32(optimizer, weights)
    if config is None or config.gradients == "keep":
        return done, None
    _refuse_users_of_gradients(trainer)
    editors = tuple(_editors(trainer))
    config = _without_unused_clipping(trainer, config)
    in_backward: InBackward
    if config.gradients == "release":
        in_backward = ClippingRelease(trainer, config.norm_clipping, exchange)
    else:
        in_backward = GradientsIntoState(optimizers, exchange)
    applied = gradients_applied(config, optimizers, in_backward)
    applied.keep()  # `in_backward` is removed by whom it is returned to
    if editors:
        applied = replace(applied, loss_class="changed", reasons=(*applied.reasons, *editors))
    return [*done, applied], in_backward


def _without_unused_clipping(trainer: L.Trainer, config: OptimizerState) -> OptimizerState:
    """Return the settings without `norm_clipping` where nothing is clipped by norm, and say so."""
    if config.norm_clipping is None or ways_of_stepping(trainer)["gradient clipping by norm"]:
        return config
    warnings.warn(
        f"`OptimizerState(norm_clipping={config.norm_clipping!r})` has no effect: the trainer clips nothing by norm.",
        NoEffectWarning,
        stacklevel=2,
    )
    return replace(config, norm_clipping=None)


def _check_not_sharded(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse gradients of several batches in moments under FSDP2, whose checkpoints leave out that they wait there.

    Raises:
        ValueError: a parameter is sharded.
    """
    if any(is_sharded(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]):
        raise setting_error(
            "OptimizerState.gradients",
            '="into-state" cannot add up the gradients of several batches under FSDP2: a checkpoint between them would '
            "lose those before it",
            "accumulate_grad_batches > 1",
            "Use larger batches with `microbatch=`, which are cut inside of a step.",
        )


def _clip(value: float, p: Any) -> None:
    p.grad.clamp_(-value, value)


class ClippingRelease(GradientRelease):
    """Clips as well, which Lightning does after backward, when the gradients are gone."""

    def __init__(
        self, trainer: L.Trainer, norm_clipping: NormClipping | None, exchange: GradientExchange | None
    ) -> None:
        value, by_value = trainer.gradient_clip_val, trainer.gradient_clip_algorithm == "value"
        self._by_norm: ClippingByNorm | None = None
        if value and not by_value:
            assert norm_clipping is not None, "else it is refused"
            self._by_norm = ClippingByNorm(value, norm_clipping)
        before_step = functools.partial(_clip, value) if value else None
        super().__init__(trainer.strategy.optimizers, self._by_norm.clip if self._by_norm else before_step, exchange)
        self._trainer: Any = trainer
        self._clip_value, trainer.gradient_clip_val = value, None

    def before_batch(self, step: Callable[[], Any], args: tuple[Any, ...]) -> None:
        """Find the norm first, where it is clipped by that of the same batch."""
        if self._by_norm is not None and self._by_norm.is_due:
            run_for_norm(self._trainer, step, args, self, self._by_norm)

    def _step_is_over(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        super()._step_is_over(optimizer, *args)
        if self._by_norm is not None and not self._by_norm.is_due:
            self._by_norm.decide(self.parameters())

    def remove(self) -> None:
        """Let backward only compute gradients again, which Lightning clips."""
        super().remove()
        if self._trainer is not None:
            self._trainer.gradient_clip_val, self._trainer = self._clip_value, None


def _editors(trainer: L.Trainer) -> Iterator[str]:
    """Yield what cannot change gradients any more; hooks that may read them are named in the log."""
    for owner in (trainer.lightning_module, *callbacks_of(trainer)):
        for hook in ("on_after_backward", "on_before_optimizer_step"):
            if is_overridden(owner, hook):
                text = f"{type(owner).__name__}.{hook} finds no gradients: they are freed in backward"
                rank_zero_info(f"memsave: {text}.")
                if edits_grad(owner, hook):
                    yield text
    for optimizer in trainer.strategy.optimizers:
        if any(map(says_grad, hooks_of_step(optimizer))):
            yield f"a hook of {type(optimizer).__name__}.step finds no gradients: they are freed in backward"


def _refuse_users_of_gradients(trainer: L.Trainer) -> None:
    """Raise `ValueError` for a strategy or a precision plugin that uses gradients after backward."""
    for owner, method in ((trainer.strategy, "post_backward"), (trainer.strategy.precision_plugin, "clip_gradients")):
        if is_overridden(owner, method):
            raise setting_error(
                "OptimizerState.gradients",
                "cannot end gradients in backward where they may be used after it",
                f"{type(owner).__name__}.{method}",
                'Use `gradients="keep"`.',
            )


def ways_of_stepping(trainer: L.Trainer) -> dict[str, bool]:
    """Return the names, of `core.compatibility`, of what Lightning does with gradients between backward and step."""
    module = trainer.lightning_module
    by_value = trainer.gradient_clip_algorithm == "value"
    return {
        "accumulate_grad_batches": most_accumulated(trainer) > 1,
        "gradient clipping by norm": bool(trainer.gradient_clip_val) and not by_value,
        "gradient clipping by value": bool(trainer.gradient_clip_val) and by_value,
        "configure_gradient_clipping": is_overridden(module, "configure_gradient_clipping"),
        "optimizer_step of the module": is_overridden(module, "optimizer_step"),
        "optimizer_zero_grad of the module": is_overridden(module, "optimizer_zero_grad"),
    }


def most_accumulated(trainer: L.Trainer) -> int:
    """The most batches whose gradients this run ever adds up, as Lightning's scheduler of accumulation may say."""
    scheduled = [
        max(callback.scheduling.values()) for callback in callbacks_named(trainer, "GradientAccumulationScheduler")
    ]
    most: int = max([trainer.accumulate_grad_batches, *scheduled])  # of SWA with an endless loader it is infinite
    return most


def readable(optimizers: Sequence[torch.optim.Optimizer], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint whose optimizer states these can read.

    Others than ours know neither codes nor another's moments.
    """
    states = list(checkpoint["optimizer_states"])
    for number, optimizer in enumerate(optimizers[: len(states)]):  # Lightning leaves the others alone as well
        held = held_by(optimizer)
        if held and not any(map(is_low_bit, with_held(held))):
            states[number] = _decoded_inside(states[number])
        elif not held and not is_low_bit(optimizer):
            states[number] = _for_torch(optimizer, states[number])
    return {**checkpoint, "optimizer_states": states}


def _decoded_inside(states: Any) -> Any:
    """Return state dicts of optimizers that another one holds, wherever they are in what it has saved, decoded."""
    if isinstance(states, (list, tuple)):
        return type(states)(map(_decoded_inside, states))
    if not isinstance(states, dict):
        return states
    if {"state", "param_groups"} <= states.keys() and isinstance(states["state"], Mapping):
        check_whole(states)
        return decoded_state_dict(states)
    return {name: _decoded_inside(each) for name, each in states.items()}


def _for_torch(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    state = state_dict.get("state")
    if not isinstance(state, Mapping) or not all(isinstance(each, Mapping) for each in state.values()):
        return state_dict  # not torch's layout: Lightning's stand-in for no optimizer has none
    check_whole(state_dict)
    found = in_order_of(optimizer, decoded_state_dict(state_dict))
    return for_adafactor(optimizer, found) if isinstance(optimizer, torch.optim.Adafactor) else found
