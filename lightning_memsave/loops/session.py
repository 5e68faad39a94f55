"""The session of one run: which recipe it follows, what was applied, and what its steps run in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Protocol

import lightning as L

from lightning_memsave.core.errors import add_note
from lightning_memsave.core.report import Applied
from lightning_memsave.lightning_compat import Batch
from lightning_memsave.loops.batch_cutter import BatchCutter
from lightning_memsave.loops.compact_training import CompactTraining
from lightning_memsave.loops.fallbacks import Fallbacks
from lightning_memsave.loops.joint_recovery import JointRecovery
from lightning_memsave.loops.kept_weights import KeptWeights
from lightning_memsave.loops.recovery import RecoveryPolicy
from lightning_memsave.loops.step_scopes import StepScopes
from lightning_memsave.measuring.ledger import Measurement
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.saved_tensors.seeds import NoiseSeeds
from lightning_memsave.techniques.early_zero_grad import EarlyZeroGrad
from lightning_memsave.techniques.low_precision import Weights
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.optimizer_state import InBackward
from lightning_memsave.techniques.registry import TECHNIQUES
from lightning_memsave.techniques.tiling import Tiling


class RecipeSource(Protocol):
    """What chooses the recipe of a run when the run begins (`prediction.budgeted_run`)."""

    def decide(self, trainer: L.Trainer) -> Recipe:
        """Choose the recipe of this run."""

    def may_cut(self, module: L.LightningModule) -> bool:
        """Return whether a smaller microbatch is allowed when a step takes more than planned."""


class Session:
    """What a strategy knows about its run.

    Args:
        recipe: what is switched on; with a source, what that may start from.
        source: chooses the recipe when the run begins; `None`: it is `recipe`.
    """

    def __init__(self, recipe: Recipe, source: RecipeSource | None = None) -> None:
        self.source = source
        self._decided: Recipe | None = None  # by the source
        self.started = False
        self.changes: list[Applied] = []
        """What was done to model and optimizers before the first step."""
        self.weights: Weights | None = None
        self.release: InBackward | None = None
        self.compact_training: CompactTraining | None = None
        self.saved_training: dict[str, Any] = {}
        """What `CompactTraining.state_dict` said in the run that is resumed, by technique; empty for a new run."""
        self.kept_weights: KeptWeights | None = None
        """Weights before they changed; until the first step, or while Lightning tunes."""
        self.reads_gradients: str | None = None
        """A method of the module that may read gradients of the last batch before backward; `None` where none does."""
        self.scopes = StepScopes()
        self.fallbacks = Fallbacks(self.scopes)
        self.joint: JointRecovery | None = None
        """What processes agree on where they wait for each other inside of a batch, and recover from errors."""
        self._follow(recipe)

    def _follow(self, recipe: Recipe) -> None:
        self.recipe = recipe
        config = recipe.get(Microbatching)
        self.recovery = self.evaluation = None
        if config is not None and config.size == "auto":
            keeps_gradients = config.keeps_gradients and Microbatching not in recipe.by_default
            self.recovery = RecoveryPolicy(config, self.fallbacks, start=config.start, keeps_gradients=keeps_gradients)
            self.evaluation = RecoveryPolicy(config)  # which has no activations to spare: it only cuts
        self.cutter = BatchCutter(config, self.recovery, warns=recipe.name in ("lossless", "exact"))
        self.zero_grad_first = recipe.get(EarlyZeroGrad) is not None

    @property
    def is_decided(self) -> bool:
        """Whether the recipe of the run has been chosen; under FSDP2 that is before a checkpoint is read."""
        return self._decided is not None

    def decide(self, trainer: L.Trainer) -> Recipe:
        """Choose the recipe of a run, once: when it begins, or before FSDP2 shards the module, which is copied."""
        if self.source is None:
            return self.recipe
        if self._decided is None:
            self._decided = self.source.decide(trainer)
        return self._decided

    def begin(self, recipe: Recipe) -> None:
        """Begin a fit, with what is left of the recipe in this way of training."""
        self.started = True
        if recipe != self.recipe:
            learned = self.recovery_state_dict()
            self._follow(recipe)
            self.load_recovery_state_dict(learned)

    def recover_jointly(self, module: L.LightningModule) -> None:
        """Recover together with all other processes, which wait for each other inside of a batch of training.

        In evaluation memory that runs out is an error, as without recovery.
        """
        self.evaluation = None
        if self.recovery is None:
            return
        self.joint, self.fallbacks.are_joint = JointRecovery(module), True
        self.recovery.decide_jointly(self.joint.agree, speaks=self.joint.speaks)

    def after(self, previous: Session | None) -> Session:
        """Return this session, with what recovery learned in an earlier one."""
        self.load_recovery_state_dict({} if previous is None else previous.recovery_state_dict())
        return self

    # --------------------------------------------------------------------------- steps
    def begin_step(self) -> None:
        """Let go of weights as they were before the fit."""
        if self.kept_weights is not None and not self.kept_weights.are_copies:
            self.kept_weights = None

    @property
    def noise(self) -> NoiseSeeds | None:
        """Seeds of the noise of codes, if there are any."""
        return None if self.scopes.activations is None else self.scopes.activations.noise

    def run(self, trainer: L.Trainer, step: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """Run `step`, which is `training_step(*args)`, in the scopes of this run."""
        if self.fallbacks.take_learned(trainer) and self.recovery is not None:
            self.recovery.has_new_regions = True
        with naming_the_setting(self.weights), _naming_calls_of_ours(self.scopes):
            return self.scopes.run(trainer, step, args)

    def measured(self, trainer: L.Trainer, batch: Batch, step: Measurement | None, scheduled_bytes: int | None) -> bool:
        """Hold a step against the limits that were set; whether the next one should be measured, as that has changed.

        Args:
            trainer: Lightning's, between two batches.
            batch: of the step.
            step: what was measured; `None` if it was not.
            scheduled_bytes: its peak, if this step is measured on every rank.
        """
        if self.scopes.planned is not None and scheduled_bytes is not None:
            self.scopes.planned.check(trainer, scheduled_bytes)
        if self.recovery is None or step is None:
            return False
        may_cut = self.source is None or self.source.may_cut(trainer.lightning_module)
        return self.recovery.measured(trainer, batch, step, may_cut)

    # --------------------------------------------------------------------------- what came of it
    @property
    def applied(self) -> tuple[Applied, ...]:
        """What each technique did so far, in the order in which recipes apply them."""
        done = [*self.changes, *([self.cutter.applied] if self.cutter.applied else []), *self.scopes.applied]
        if self.zero_grad_first:
            done.append(Applied(technique="early_zero_grad", summary="gradients are freed before the forward pass"))
        order = [technique.stem for technique in TECHNIQUES]
        return tuple(sorted(done, key=lambda applied: order.index(applied.technique)))

    @property
    def num_recovered(self) -> int | None:
        """How often memory ran out and the batch was run again; `None` without recovery."""
        if self.recovery is None or (self.evaluation is None and self.joint is None):
            return None
        return sum(each.num_recovered for each in (self.recovery, self.evaluation) if each is not None)

    def metrics(self) -> dict[str, float]:
        """Return what loggers see of weights that move, and of loss scaling."""
        found = {} if self.compact_training is None else self.compact_training.metrics()
        scaling = None if self.weights is None else self.weights.scaling
        if scaling is not None:
            found |= {"memsave/loss_scale": scaling.factor, "memsave/num_steps_skipped": float(scaling.num_skipped)}
        return found

    def own_backward(self) -> AbstractContextManager[None]:
        """What the run's own backward runs in: gradients of no other end in it."""
        return nullcontext() if self.release is None else self.release.own_backward()

    def finish(self, is_refused: bool = False) -> None:
        """Give the model back as it was; what was done stays on record.

        Optimizers stay low-bit: checkpoints may still be written, and their plain state would take memory.

        Args:
            is_refused: whether the fit ends by an error; where no step was begun, weights are as before it.
        """
        self.scopes.close()
        if self.joint is not None:
            self.joint.close()
        if self.release is not None:
            self.release.remove()
        self.weights = self.release = None
        for applied in reversed(self.changes):
            applied.keep() if applied.technique == "optimizer_state" else applied.undo()
        if self.kept_weights is not None and (is_refused or self.kept_weights.are_copies):
            self.kept_weights.put_back()
        self.kept_weights = None

    # --------------------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        """Return what recovery has found out, and what layers are besides their weight; empty without either."""
        compact = self.compact_training
        trained = {} if compact is None else {compact.technique: compact.state_dict()}
        return {**self.recovery_state_dict(), **trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.saved_training = {stem: state[stem] for stem in ("sparsity", "low_rank", "sparse_update") if stem in state}
        self.load_recovery_state_dict(state)

    def recovery_state_dict(self) -> dict[str, Any]:
        """Return what recovery has found out, as plain values; empty where there is nothing."""
        if self.recovery is None:
            return {}
        policies = {"training": self.recovery, "evaluation": self.evaluation or self.recovery}
        num_measures = self.fallbacks.num_needed
        if not num_measures and all(policy.limit_elements is None for policy in policies.values()):
            return {}
        refused = {"regions_refused": True} if self.fallbacks.regions_refused else {}
        tiling = self.fallbacks.tiling
        tiles = {} if tiling is None else {"tiles": asdict(tiling)}
        return {
            **refused,
            **tiles,
            "num_measures": num_measures,
            **{name: policy.state_dict() for name, policy in policies.items()},
        }

    def load_recovery_state_dict(self, learned: dict[str, Any]) -> None:
        """Start from what an earlier run has found out: the same measures are taken before the first batch."""
        if "num_measures" in learned and self.recovery is not None:
            self.fallbacks.num_learned = learned["num_measures"]
            self.fallbacks.regions_refused = learned.get("regions_refused", False)
            self.fallbacks.tiling = Tiling(**learned["tiles"]) if "tiles" in learned else None
            self.recovery.load_state_dict(learned["training"])
            if self.evaluation is not None:
                self.evaluation.load_state_dict(learned["evaluation"])


_OF_DTYPES = ("BFloat16", "bfloat16", "Half", "dtype", "scalar type")


@contextlib.contextmanager
def naming_the_setting(weights: Weights | None) -> Iterator[None]:
    """Add to an error about dtypes that weights were lowered, if they were: the step may be right without."""
    try:
        yield
    except RuntimeError as error:
        if weights is not None and any(word in str(error) for word in _OF_DTYPES):
            add_note(
                error,
                f"memsave: by `MemSave(precision=...)` or a recipe, {weights.reason} and the step runs under autocast. "
                "Where an operation takes no 16-bit numbers, give it `.float()` ones, keep its module as it is "
                "(`LowPrecision(keep_32bit=...)`), or leave all weights as they are: `precision=False`.",
            )
        raise


@contextlib.contextmanager
def _naming_calls_of_ours(scopes: StepScopes) -> Iterator[None]:
    """Add to an error of torch's compiler that regions and tiles run in Python, if there are some."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__module__.startswith("torch._dynamo") and (scopes.regions or scopes.planned or scopes.tiles):
            add_note(
                error,
                "memsave: checkpointed regions and tiles run in Python, between compiled parts. Compile without "
                "`fullgraph=True`, or leave what is compiled out of them: `Checkpointing(modules=...)`, "
                "`Tiling(modules=...)`.",
            )
        raise
