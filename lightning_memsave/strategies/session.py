"""What one strategy knows about its run: the recipe, what came of it, and what is left to be done about memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, Protocol, TypeVar

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_memsave.core.compatibility import check_compatibility
from lightning_memsave.core.coupling import check_steps_parameters_alone
from lightning_memsave.core.report import Applied
from lightning_memsave.lightning_compat import callbacks_of
from lightning_memsave.loops.forward_scope import ForwardScope
from lightning_memsave.loops.loop_state import LoopState
from lightning_memsave.loops.planned_checkpointing import PlannedCheckpointing, has_room
from lightning_memsave.loops.trainer_features import ways_of_training
from lightning_memsave.measuring.ledger import Measurement
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.saved_tensors.region_inputs import keeping_inputs_in
from lightning_memsave.saved_tensors.seeds import NoiseSeeds
from lightning_memsave.saved_tensors.store import SavedTensorStore
from lightning_memsave.strategies.precision_plugin import lower_precision, naming_the_setting
from lightning_memsave.strategies.sparse_training import Sparsifying
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.checkpointing import Checkpointing, apply_checkpointing, input_store
from lightning_memsave.techniques.low_precision import LowPrecision, Weights
from lightning_memsave.techniques.optimizer_state import InBackward, OptimizerState, check_optimizers
from lightning_memsave.techniques.registry import TECHNIQUES, Config, technique_of
from lightning_memsave.techniques.sparsity import Sparsity

C = TypeVar("C", bound=Config)
R = TypeVar("R")


class RecipeSource(Protocol):
    """What chooses the recipe of a run when the run begins (`prediction.budgeted_run`)."""

    def decide(self, trainer: L.Trainer) -> Recipe:
        """Choose the recipe of this run."""

    def may_cut(self, module: Any) -> bool:
        """Return whether a smaller microbatch is allowed when a step takes more than planned."""


class Session:
    """What one strategy knows about its run: the recipe and what came of it.

    Args:
        recipe: what is switched on; with a budget, what a plan may start from.
        budgeted: the budget of the run, or `None` without one.
    """

    def __init__(self, recipe: Recipe, budgeted: RecipeSource | None = None) -> None:
        self.recipe, self.budgeted = recipe, budgeted
        self.loop = LoopState(recipe, self)
        self.changes: list[Applied] = []
        self.weights: Weights | None = None
        self.release: InBackward | None = None
        self.forward_scope: ForwardScope | None = None
        self.planned: PlannedCheckpointing | None = None
        self.region_inputs: SavedTensorStore | None = None
        self.sparsifying: Sparsifying | None = None
        self._saved_sparsity: Any = None
        self._num_measures = self._num_learned = 0
        self.started = False
        self._before_tuning: tuple[Any, dict[str, Tensor]] | None = None
        self.is_rehearsing = False
        """Whether `training_step` runs to learn something of it: no time to plan regions."""

    def decided(self, trainer: L.Trainer) -> Recipe:
        """Return the recipe; with a budget, what its plan makes of it."""
        return self.recipe if self.budgeted is None else self.budgeted.decide(trainer)

    def begin(self, recipe: Recipe) -> None:
        """Begin a fit, with what is left of the recipe in this way of training."""
        self.started = True
        if recipe != self.recipe:
            learned = self.recovery_state_dict()
            self.recipe, self.loop = recipe, LoopState(recipe, self)
            self.load_recovery_state_dict(learned)

    def after(self, previous: Session | None) -> Session:
        """Return the session, with what recovery learned in an earlier fit."""
        self.load_recovery_state_dict({} if previous is None else previous.recovery_state_dict())
        return self

    def with_config(self, kind: type[C], use: Callable[[Any, C], R], trainer: L.Trainer) -> R | None:
        """Use a technique, if it is on; a default that this model or optimizer cannot carry steps aside."""
        config = self.recipe.get(kind)
        if config is None:
            return None
        try:
            return use(trainer, config)
        except ValueError as error:
            if kind not in self.recipe.by_default:
                raise
            rank_zero_info(f"memsave: {technique_of(config).stem} is left out: {error}")
            self.recipe = self.recipe.without(kind)
            return None

    def keep_weights_of_tuning(self, trainer: L.Trainer) -> None:
        """Keep weights before they change.

        The tuner puts back what it saved, but it saves when they have changed already.
        """
        is_lossy = any(self.recipe.get(kind) is not None for kind in (LowPrecision, Sparsity))
        if is_lossy and any(getattr(callback, "_early_exit", False) for callback in callbacks_of(trainer)):
            module = trainer.lightning_module
            made = ((name, p) for name, p in module.named_parameters() if not is_lazy(p))
            self._before_tuning = module, {name: p.detach().clone() for name, p in made}

    def lower_precision(self, trainer: L.Trainer, config: LowPrecision) -> None:
        """Turn the weights to bfloat16."""
        self.weights, applied = lower_precision(trainer, config)
        self.changes.append(applied)

    @staticmethod
    def check_steps(trainer: L.Trainer, config: LowPrecision) -> None:
        """Raise `ValueError` for optimizers that cannot step 16-bit weights."""
        for optimizer in trainer.strategy.optimizers:
            check_steps_parameters_alone(optimizer, "precision")

    def raise_precision(self) -> None:
        """Give the weights back their 32 bits: the optimizer cannot step others. Not once DDP has wrapped them."""
        for applied in self.changes:
            if applied.technique == "low_precision":
                applied.undo()
        self.changes = [applied for applied in self.changes if applied.technique != "low_precision"]
        self.weights = None

    def open_scope(self, trainer: L.Trainer, config: ActivationCompression) -> None:
        """See to it that what autograd keeps goes to a store."""
        self.forward_scope = ForwardScope(trainer, config)

    @property
    def noise(self) -> NoiseSeeds | None:
        """Seeds of the noise of codes, if there are any."""
        return None if self.forward_scope is None else self.forward_scope.noise

    @staticmethod
    def check_optimizers(trainer: L.Trainer, config: OptimizerState) -> None:
        """Raise `ValueError` for optimizers that cannot be lean."""
        check_optimizers(trainer.strategy.optimizers, config, trainer.lightning_module)

    def make_regions(self, trainer: L.Trainer, config: Checkpointing) -> None:
        """Make the regions that are known, or see to it that the first batch is rehearsed."""
        if config.needs_a_plan:
            self.planned = PlannedCheckpointing(trainer, config)
        else:
            self.changes.append(apply_checkpointing(trainer.lightning_module, config))
        self.region_inputs = input_store() if config.offload else None

    def sparsify(self, trainer: L.Trainer, config: Sparsity) -> Sparsifying:
        """Make layers sparse, as they were in the run that is resumed."""
        self.sparsifying = Sparsifying(trainer, config, self._saved_sparsity)
        self.changes.append(self.sparsifying.applied)
        return self.sparsifying

    def metrics(self) -> dict[str, float]:
        """Return what loggers see of weights that move, and of loss scaling."""
        found = {} if self.sparsifying is None else self.sparsifying.metrics()
        scaling = None if self.weights is None else self.weights.scaling
        if scaling is not None:
            found |= {"memsave/loss_scale": scaling.factor, "memsave/num_steps_skipped": float(scaling.num_skipped)}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what recovery has found out and which weights live, for a checkpoint; empty without either."""
        sparsity = {} if self.sparsifying is None else {"sparsity": self.sparsifying.state_dict()}
        return {**self.recovery_state_dict(), **sparsity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._saved_sparsity = state.get("sparsity")
        self.load_recovery_state_dict(state)

    def recovery_state_dict(self) -> dict[str, Any]:
        """Return what recovery has found out, as plain values; empty where there is nothing."""
        recovery, evaluation = self.loop.recovery, self.loop.evaluation
        if recovery is None or evaluation is None:
            return {}
        num_measures = max(self._num_measures, self._num_learned)
        if not num_measures and recovery.limit_elements is None and evaluation.limit_elements is None:
            return {}
        return {
            "num_measures": num_measures,
            "training": recovery.recovery_state_dict(),
            "evaluation": evaluation.recovery_state_dict(),
        }

    def load_recovery_state_dict(self, learned: dict[str, Any]) -> None:
        """Start from there: the same measures are taken before the first batch."""
        if "num_measures" in learned and self.loop.recovery is not None and self.loop.evaluation is not None:
            self._num_learned = learned["num_measures"]
            self.loop.recovery.load_recovery_state_dict(learned["training"])
            self.loop.evaluation.load_recovery_state_dict(learned["evaluation"])

    def apply_next_fallback(self, trainer: L.Trainer) -> str | None:
        """Take the next exact measure against too little memory; `None` when there is none left.

        Those that take time wait here until they are needed; what the user has set, or switched off, is left as it is.
        """
        measures = [self._compress, self._make_blocks, self._plan_regions, self._offload_inputs]
        while self._num_measures < len(measures):
            measure = measures[self._num_measures]
            self._num_measures += 1
            with suppress(ValueError):  # nothing to work on, or not possible in this way of training
                if (taken := measure(trainer)) is not None:
                    return taken
        return None

    def _compress(self, trainer: L.Trainer) -> str | None:
        if not self.recipe.leaves_open(ActivationCompression):
            return None
        check_compatibility(["activation_compression", *self.recipe.rows(), *ways_of_training(trainer)])
        self.forward_scope = ForwardScope(trainer, ActivationCompression())
        return "activations recomputed where that is cheap"

    def _make_blocks(self, trainer: L.Trainer) -> str | None:
        if not self.recipe.leaves_open(Checkpointing):
            return None
        self.changes.append(apply_checkpointing(trainer.lightning_module, Checkpointing()))
        return f"checkpointing of {self.changes[-1].summary}"

    def _plan_regions(self, trainer: L.Trainer) -> str | None:
        if not self.recipe.leaves_open(Checkpointing) or not has_room():
            return None
        planned = PlannedCheckpointing(trainer, Checkpointing(method="sqrt"), is_asked_for=False)
        self._undo_regions()
        self.planned = planned
        return "checkpointing of the best groups of calls"

    def _offload_inputs(self, trainer: L.Trainer) -> str | None:
        if self.region_inputs is not None or not any(a.technique == "checkpointing" for a in self.applied):
            return None
        self.region_inputs = input_store()
        return "the inputs of checkpointed regions outside of the device's memory"

    def withdraw(self) -> bool:
        """Undo the regions that were taken, as the model refuses them; whether there were any."""
        if not self.recipe.leaves_open(Checkpointing) or not self._undo_regions():
            return False
        self.planned = self.region_inputs = None
        return True

    def _undo_regions(self) -> bool:
        """Return whether there were any."""
        taken = [applied for applied in self.changes if applied.technique == "checkpointing"]
        self.changes = [applied for applied in self.changes if applied.technique != "checkpointing"]
        if self.planned is not None and self.planned.applied is not None:
            taken.append(self.planned.applied)
        for applied in taken:
            applied.undo()
        return bool(taken)

    def measured(self, trainer: L.Trainer, batch: Any, step: Measurement | None, scheduled_bytes: int | None) -> bool:
        """Hold a step against the limits that were set; whether the next one should be measured, as that has changed.

        Args:
            trainer: Lightning's, between two batches.
            batch: of the step.
            step: what was measured; `None` if it was not.
            scheduled_bytes: its peak, if this step is measured on every rank.
        """
        if self.planned is not None and scheduled_bytes is not None:
            self.planned.check(trainer, scheduled_bytes)
        recovery = self.loop.recovery
        if recovery is None or step is None:
            return False
        may_cut = self.budgeted is None or self.budgeted.may_cut(trainer.lightning_module)
        return recovery.measured(trainer, batch, step, may_cut)

    def run(self, trainer: L.Trainer, step: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """Run `step`, which is `training_step(*args)`, in the scopes of this run."""
        while self._num_measures < self._num_learned:
            if self.apply_next_fallback(trainer) is not None and self.loop.recovery is not None:
                self.loop.recovery.has_new_regions = True
        scope = None if self.forward_scope is None else functools.partial(self.forward_scope.run, trainer)
        if self.planned is not None and self.planned.is_due and not self.is_rehearsing:
            self.planned.plan(trainer, args, scope)
        inputs = nullcontext() if self.region_inputs is None else keeping_inputs_in(self.region_inputs)
        with inputs, naming_the_setting(self.weights):
            return step() if scope is None else scope(step)

    @property
    def applied(self) -> tuple[Applied, ...]:
        """What each technique did so far, in the order in which recipes apply them."""
        done = [*self.changes, *([self.loop.applied] if self.loop.applied else [])]
        if self.planned is not None and self.planned.applied is not None and self.planned.is_worth_telling:
            done.append(self.planned.applied)
        if self.forward_scope is not None:
            done.append(self.forward_scope.applied)
        if self.loop.zero_grad_first:
            done.append(Applied(technique="early_zero_grad", summary="gradients are freed before the forward pass"))
        order = [technique.stem for technique in TECHNIQUES]
        return tuple(sorted(done, key=lambda applied: order.index(applied.technique)))

    def finish(self) -> None:
        """Give the model back as it was; what was done stays on record.

        Optimizers stay low-bit: checkpoints may still be written, and their plain state would take memory.
        """
        if self.forward_scope is not None:
            self.forward_scope.close()
        if self.release is not None:
            self.release.remove()
        self.weights = self.release = None
        planned = [self.planned.applied] if self.planned is not None and self.planned.applied is not None else []
        for applied in reversed([*self.changes, *planned]):
            applied.keep() if applied.technique == "optimizer_state" else applied.undo()
        if self._before_tuning is not None:
            module, weights = self._before_tuning
            with torch.no_grad():
                for name, p in module.named_parameters():
                    if name in weights:
                        p.copy_(weights[name])
            self._before_tuning = None
