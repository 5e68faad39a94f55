"""The strategy side: one mixin, for the registered strategies and for whichever strategy the user chose.

It derives from the namespace's own `Strategy`, because Python only lets an object change its class between classes of
the same layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext, suppress
from importlib import import_module
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_memsave.core.compatibility import check_compatibility
from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.planner.recipes import RECIPES, Recipe
from lightning_memsave.strategies.activations import ForwardScope
from lightning_memsave.strategies.loop import LoopState, loop_class
from lightning_memsave.strategies.low_precision import lower_precision
from lightning_memsave.strategies.namespaces import is_compiled, namespace_of
from lightning_memsave.strategies.optimizers import change_optimizers, ways_of_stepping
from lightning_memsave.strategies.planning import PlannedCheckpointing
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.checkpointing import Checkpointing, apply_checkpointing, input_vault
from lightning_memsave.techniques.low_precision import LowPrecision, Weights, load_counter, with_counter
from lightning_memsave.techniques.microbatching import Microbatching, active_microbatching
from lightning_memsave.techniques.optimizer_state import GradientRelease, from_plain, is_8bit, to_plain
from lightning_memsave.techniques.registry import TECHNIQUES
from lightning_memsave.vault.inputs import keeping_inputs_in
from lightning_memsave.vault.vault import Vault


class MemSaveState:
    """What one strategy knows about its run: the recipe and what came of it."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.loop = LoopState(recipe, self._climb)
        self.changes: list[Applied] = []
        self.weights: Weights | None = None
        self.release: GradientRelease | None = None
        self.forward_scope: ForwardScope | None = None
        self.planned: PlannedCheckpointing | None = None
        self.region_inputs: Vault | None = None
        self._num_measures = self._num_learned = 0
        self.started = False

    def make_regions(self, trainer: Any, config: Checkpointing) -> None:
        """Make the regions that are known, or see to it that the first batch is rehearsed."""
        if config.needs_a_plan:
            self.planned = PlannedCheckpointing(trainer, config)
        else:
            self.changes.append(apply_checkpointing(trainer.lightning_module, config))
        self.region_inputs = input_vault() if config.offload else None

    def learned(self) -> dict[str, Any]:
        """What recovery has found out, as plain values for a checkpoint; empty without recovery."""
        recovery = self.loop.recovery
        if recovery is None:
            return {}
        return {"limit_elements": recovery.limit_elements, "num_measures": self._num_measures}

    def learn(self, learned: dict[str, Any]) -> None:
        """Start from there: the same measures are taken before the first batch."""
        if self.loop.recovery is not None:
            self.loop.recovery.limit_elements = learned["limit_elements"]
            self._num_learned = learned["num_measures"]

    def _climb(self, trainer: Any) -> str | None:
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

    def _compress(self, trainer: Any) -> str | None:
        if not self.recipe.leaves_open(ActivationCompression):
            return None
        check_compatibility(["activation_compression", *self.recipe.stems(), *ways_of_training(trainer)])
        self.forward_scope = ForwardScope(trainer, ActivationCompression())
        return "activations recomputed where that is cheap"

    def _make_blocks(self, trainer: Any) -> str | None:
        if not self.recipe.leaves_open(Checkpointing):
            return None
        self.changes.append(apply_checkpointing(trainer.lightning_module, Checkpointing()))
        return f"checkpointing of {self.changes[-1].summary}"

    def _plan_regions(self, trainer: Any) -> str | None:
        if not self.recipe.leaves_open(Checkpointing):
            return None
        planned = PlannedCheckpointing(trainer, Checkpointing(method="sqrt"), is_asked_for=False)
        for applied in self.changes:
            if applied.technique == "checkpointing":
                applied.undo()
        self.changes = [applied for applied in self.changes if applied.technique != "checkpointing"]
        self.planned = planned
        return "checkpointing of the best groups of calls"

    def _offload_inputs(self, trainer: Any) -> str | None:
        if self.region_inputs is not None or not any(a.technique == "checkpointing" for a in self.applied):
            return None
        self.region_inputs = input_vault()
        return "the inputs of checkpointed regions outside of the device's memory"

    def run(self, trainer: Any, step: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """Run `step`, which is `training_step(*args)`, in the scopes of this run."""
        while self._num_measures < self._num_learned:
            self._climb(trainer)
        scope = None if self.forward_scope is None else functools.partial(self.forward_scope.run, trainer)
        if self.planned is not None and self.planned.is_due:
            self.planned.plan(trainer, args, scope)
        inputs = nullcontext() if self.region_inputs is None else keeping_inputs_in(self.region_inputs)
        with inputs:
            return step() if scope is None else scope(step)

    @property
    def applied(self) -> tuple[Applied, ...]:
        """What each technique did so far, in the order in which recipes apply them."""
        done = [*self.changes, *([self.loop.applied] if self.loop.applied else [])]
        if self.planned is not None and self.planned.applied is not None:
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


@functools.cache
def mixin(namespace: str) -> Any:  # noqa: C901  # one class, counted as one function
    """The mixin for one Lightning namespace."""
    base = import_module(f"{namespace}.strategies").Strategy

    class MemSaveMixin(base):  # type: ignore[misc, valid-type]  # a base known at run time
        _memsave: MemSaveState | None = None
        _memsave_before: MemSaveState | None = None

        @property
        def memsave(self) -> MemSaveState:
            """The recipe and what came of it; the lossless recipe unless the callback says otherwise."""
            if self._memsave is None:
                self._memsave = MemSaveState(RECIPES["lossless"])
            return self._memsave

        def setup(self, trainer: Any) -> None:
            fitting = trainer.state.fn == "fit"
            if fitting:
                check_compatibility([*self.memsave.recipe.rows(), *ways_of_training(trainer)])
                if self.memsave.started:  # a second fit with the same strategy starts with a clean record
                    self._memsave = MemSaveState(self.memsave.recipe)
                self.memsave.started = True
                _install_loop(trainer, self.memsave.loop, namespace)
                if precision := self.memsave.recipe.get(LowPrecision):
                    self.memsave.weights, applied = lower_precision(trainer, precision)
                    self.memsave.changes.append(applied)
            super().setup(trainer)
            if fitting and (checkpointing := self.memsave.recipe.get(Checkpointing)):
                self.memsave.make_regions(trainer, checkpointing)
            if fitting and (activations := self.memsave.recipe.get(ActivationCompression)):
                self.memsave.forward_scope = ForwardScope(trainer, activations)

        def setup_optimizers(self, trainer: Any) -> None:
            super().setup_optimizers(trainer)
            state = self.memsave
            done, state.release = change_optimizers(trainer, state.recipe, state.weights)
            state.changes.extend(done)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            on_use = functools.partial(self.memsave.loop.used_by_hand, self.lightning_module)
            step = functools.partial(super().training_step, *args, **kwargs)
            with active_microbatching(self.memsave.recipe.get(Microbatching), on_use):
                return self.memsave.run(self.lightning_module.trainer, step, args)

        def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
            plain = getattr(optimizer, "_optimizer", optimizer)  # LightningOptimizer wraps
            return with_counter(plain, to_plain(plain)) if is_8bit(plain) else super().optimizer_state(optimizer)

        def load_optimizer_state_dict(self, checkpoint: Any) -> None:
            if not any(is_8bit(optimizer) for optimizer in self.optimizers):
                super().load_optimizer_state_dict(checkpoint)
                return
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                from_plain(optimizer, state) if is_8bit(optimizer) else optimizer.load_state_dict(state)
                load_counter(optimizer, state)

        def teardown(self) -> None:
            module = self.lightning_module
            self.memsave.finish()
            _remove_loop(module)
            super().teardown()
            self.memsave.loop.warn_if_unused(module)

    MemSaveMixin.__qualname__ = "MemSaveMixin"
    return MemSaveMixin


def ways_of_training(trainer: Any) -> list[str]:
    """The names, of `core.compatibility`, that describe how this trainer trains."""
    strategy, kinds = trainer.strategy, {cls.__name__ for cls in type(trainer.strategy).__mro__}
    is_ddp = "DDPStrategy" in kinds
    ddp_options = getattr(strategy, "_ddp_kwargs", {}) if is_ddp else {}
    training_step = trainer.lightning_module.training_step
    present = {
        "manual optimization": not trainer.lightning_module.automatic_optimization,
        "DDP": is_ddp,
        "DDP with static_graph": ddp_options.get("static_graph", False),
        "FSDP": "FSDPStrategy" in kinds,
        "model parallel (FSDP2)": "ModelParallelStrategy" in kinds,
        "DeepSpeed": "DeepSpeedStrategy" in kinds,
        "dataloader_iter": is_param_in_hook_signature(training_step, "dataloader_iter", explicit=True),
        "torch.compile of the whole module": is_compiled(trainer.lightning_module),
        "fp16 with a GradScaler": getattr(strategy.precision_plugin, "scaler", None) is not None,
        **ways_of_stepping(trainer),
    }
    return [name for name, is_present in present.items() if is_present]


def _install_loop(trainer: Any, state: LoopState, namespace: str) -> None:
    if state.recovery is not None:
        _refuse_recovery(trainer)
    if (
        not trainer.lightning_module.automatic_optimization
    ):  # Lightning bypasses the loop, and the user zeroes gradients
        state.zero_grad_first = False
    if state.microbatching is None and not state.zero_grad_first:
        return
    if state.zero_grad_first and (hook := _reader_of_gradients(trainer)):
        state.zero_grad_first = False
        rank_zero_info(f"memsave: gradients are freed after the forward pass, as {hook} may read them.")
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.automatic_optimization = loop_class(namespace)(epoch_loop.automatic_optimization, state)


def _refuse_recovery(trainer: Any) -> None:
    """Raise `ValueError` where a batch cannot be run again."""
    if not trainer.lightning_module.automatic_optimization:
        why, remedy = "under manual optimization, which steps optimizers inside of `training_step`", "a number"
    elif trainer.world_size > 1 or {"FSDP", "model parallel (FSDP2)", "DeepSpeed"} & set(ways_of_training(trainer)):
        why, remedy = "with several processes, which wait for each other in the middle of a step", "a number"
    else:
        return
    raise setting_error("microbatch", f"cannot recover {why}", "auto", f"Use {remedy}, for example `microbatch=8`.")


def _reader_of_gradients(trainer: Any) -> str | None:
    """A user's hook that runs with `zero_grad` and so would run before the forward pass instead of after it."""
    hooks = [(owner, "on_before_zero_grad") for owner in (trainer.lightning_module, *trainer.callbacks)]
    for owner, hook in (*hooks, (trainer.lightning_module, "optimizer_zero_grad")):
        defined_in = next(cls for cls in type(owner).__mro__ if hook in vars(cls))
        if not defined_in.__module__.startswith(("lightning.", "pytorch_lightning.")):
            return f"{type(owner).__name__}.{hook}"
    return None


def _remove_loop(module: Any) -> None:
    trainer = getattr(module, "_trainer", None)
    epoch_loop = trainer.fit_loop.epoch_loop if trainer is not None else None
    if epoch_loop is not None and hasattr(epoch_loop.automatic_optimization, "parent"):
        epoch_loop.automatic_optimization = epoch_loop.automatic_optimization.parent


_ADOPTED: dict[type, Any] = {}


def _adopted_class(cls: type, namespace: str) -> Any:
    if cls not in _ADOPTED:
        _ADOPTED[cls] = type(f"MemSave{cls.__name__}", (mixin(namespace), cls), {"__module__": cls.__module__})
    return _ADOPTED[cls]


def adopt(strategy: Any, recipe: Recipe) -> MemSaveState:
    """Give a live strategy the mixin, as Lightning does with optimizers, and the recipe.

    Returns:
        Where the strategy will record what it did. It holds neither model nor trainer once the run is over.

    Raises:
        TypeError: `strategy` is not a Lightning strategy.
    """
    namespace = namespace_of(strategy)
    if not isinstance(strategy, mixin(namespace)):
        strategy.__class__ = _adopted_class(type(strategy), namespace)
    elif strategy._memsave is None:
        strategy._memsave = strategy.memsave  # one of ours by name: lossless
    if strategy._memsave_before is None:
        strategy._memsave_before = strategy._memsave or MemSaveState(Recipe("adopted"))
    state = strategy._memsave = MemSaveState(recipe)
    return state


def release(strategy: Any) -> None:
    """Undo `adopt`: the strategy has the recipe that it had before, none if it was not ours."""
    if strategy._memsave_before is not None:
        strategy._memsave, strategy._memsave_before = strategy._memsave_before, None
