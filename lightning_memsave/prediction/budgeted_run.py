"""A budget in a run: planned before the strategy is set up, and held against the steps that are measured.

Every process asks for the same predictions and takes rank 0's answers, so all come to one plan. What a measured step
takes besides what was predicted is told by category; what goes beyond the budget is corrected from the next step on.
"""

from __future__ import annotations

import math
import re
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.parameter import is_lazy

from lightning_memsave.core.errors import BudgetWarning, setting_error
from lightning_memsave.core.report import Miss
from lightning_memsave.core.units import format_bytes
from lightning_memsave.lightning_compat import Batch, namespace_of
from lightning_memsave.loops.optimizer_changes import most_accumulated
from lightning_memsave.loops.probe_samples import FEWEST_SAMPLES
from lightning_memsave.loops.trainer_features import ways_of_training
from lightning_memsave.measuring.allocator import total_bytes
from lightning_memsave.measuring.ledger import Measurement
from lightning_memsave.planner.make_plan import Predict, Situation, make_plan
from lightning_memsave.planner.memory_budget import Budget, machine_bytes, needed_bytes
from lightning_memsave.planner.plan import Plan
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.planner.search_space import MANY_BLOCKS, NOT_TILED, Tiled, overhead_of
from lightning_memsave.prediction.code_noise import CodeNoise
from lightning_memsave.prediction.noise_bounds import CodecChoice, is_bounded
from lightning_memsave.prediction.peek_batch import (
    estimated_batches,
    largest_first_batch,
    samples_of,
    samples_per_batch,
)
from lightning_memsave.prediction.planning_watch import LEAST_SECONDS, SHARE, PlanningWatch
from lightning_memsave.prediction.real_run import Cut, StepFailedError, Trial
from lightning_memsave.prediction.run_predictions import agreed, predictions_in
from lightning_memsave.prediction.simulated_process_group import planning_groups, planning_groups_of, with_layers
from lightning_memsave.saved_tensors.codec_names import HEAD
from lightning_memsave.simulation.predicted_step import Prediction
from lightning_memsave.techniques.activation_compression import ActivationCompression, has_wide_head, with_head
from lightning_memsave.techniques.checkpointing.region_selection import repeated_blocks
from lightning_memsave.techniques.microbatching import Microbatching, why_not_exact
from lightning_memsave.techniques.tiling import Tiling
from lightning_memsave.torch_internals.model_copies import copied
from lightning_memsave.torch_internals.module_tree import check_shapes
from lightning_memsave.torch_internals.private_names import require

SMALL_BYTES = 64 * 2**20
"""Plain steps on CPU that have a smaller peak are timed."""
_TINY_BYTES = 16 * 2**20
"""Steps of models whose plain step has a smaller peak on CPU are run for real: that takes less time than running them
for their shapes alone."""

_STEM = "activation_compression"
_REFUSED = (
    "FSDP",
    "tensor parallelism",
    "DeepSpeed",
    "dataloader_iter",
    "torch.compile of the whole module",
    "batch size finder",
)


class BudgetedRun:
    """The budget of one `MemSave`: its plan, and what came of it.

    Args:
        budget: as the user wrote it.
        recipe: what may be used.
        plan: to train with, instead of making one.
        seconds: of wall time that planning may take once something fits; `None`: a minute, or a tenth of a long fit.

    Raises:
        ValueError: `seconds` is not a positive number.
    """

    def __init__(
        self, budget: Budget | None, recipe: Recipe, plan: Plan | None = None, seconds: float | None = None
    ) -> None:
        is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if seconds is not None and not (is_number and seconds > 0):
            raise setting_error("planning_seconds", "must be a positive number", seconds, "The default is a minute.")
        self._budget, self._recipe = budget, recipe
        self.seconds = seconds
        """Seconds of wall time that planning may take, as the user wrote them."""
        self.plan = plan
        """What is trained with; `None` before it was made."""
        self._made_for: Sequence[Any] | None = None  # as `_kind_of` tells it
        self._has_told = self._has_warned = False

    @property
    def gradient_noise(self) -> float | None:
        """What the plan says; `None` before it was made."""
        return None if self.plan is None else self.plan.gradient_noise

    @property
    def budget_text(self) -> int | str | None:
        """The budget as the user wrote it; `None` with a plan instead of one."""
        return None if self._budget is None else self._budget.text

    @property
    def _asked(self) -> str:
        """What was set besides the budget; the same in another process."""
        return re.sub(r" at 0x[0-9a-f]+", "", repr((self._recipe.techniques, self._recipe.switched_off)))

    def decide(self, trainer: L.Trainer) -> Recipe:
        """Return the settings of this run; planned from its first batch unless a plan for such a run is there.

        Raises:
            ValueError: the budget cannot be met, or this way of training cannot be planned.
        """
        if self._budget is not None:
            with planning_groups(trainer):
                self._make_plan(self._budget, trainer)
        assert self.plan is not None, "without a budget there is a plan"
        return self.plan.as_recipe()

    def _make_plan(self, budget: Budget, trainer: L.Trainer) -> None:
        _refuse(budget, ways_of_training(trainer))
        kind = _kind_of(trainer)
        if trainer.strategy.broadcast(not self._is_planned(kind)):
            self.plan, self._has_told, self._has_warned = None, False, False
            rank_zero_info(f"memsave: looking for a plan within {budget.text}, by predicting steps")
            module, batch = trainer.lightning_module, largest_first_batch(trainer)
            self.plan = plan_for(module, batch, budget, self._recipe, trainer, self.seconds)
            rank_zero_info(f"memsave: {self.plan}")
        self._made_for = kind

    def _is_planned(self, kind: Sequence[Any]) -> bool:
        """Return whether the plan that is there is for such a run, as far as both are known."""
        made_for = self._made_for or [None] * len(kind)
        is_same = all(None in (a, b) or a == b for a, b in zip(made_for, kind, strict=True))
        return self.plan is not None and is_same

    def plan_for(self, module: L.LightningModule, batch: Batch) -> Plan:
        """Return the plan for a module and a batch outside of a run; with a plan instead of a budget, that."""
        if self._budget is not None:
            module = _with_all_layers(module)
            self.plan = plan_for(module, batch, self._budget, self._recipe, seconds=self.seconds)
            self._made_for = (_shapes(module), samples_of(batch), "32-true", 1, "cpu", 1)
        assert self.plan is not None, "without a budget there is a plan"
        return self.plan

    def check(self, trainer: L.Trainer, step: Measurement, changed: bool) -> None:
        """Hold a measured step against the plan, and tell of a miss; once each.

        Args:
            trainer: Lightning's, between two batches.
            step: what was measured.
            changed: whether something has been done about it already.
        """
        plan = self.plan
        if plan is None:
            return
        miss = Miss.between(plan.peak_bytes, plan.by_category, step.peak_bytes, step.by_category)
        if miss.is_much and not self._has_told:
            self._has_told = True
            rank_zero_info(
                f"memsave: a step took {format_bytes(step.peak_bytes)} where {format_bytes(plan.peak_bytes)} was "
                f"predicted ({miss.fraction:+.1%}): {miss}."
            )
        over = step.peak_bytes + plan.workspace_bytes - plan.budget_bytes
        if over > 0 and not changed and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"A step goes beyond the budget of {format_bytes(plan.budget_bytes)} by {format_bytes(over)}, and "
                f'nothing that "{plan.recipe}" allows is left to be done. Take a smaller budget, so that the plan has '
                "room, or a recipe that may do more.",
                BudgetWarning,
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the plan, for a checkpoint; empty where it cannot be written as data."""
        try:
            made = {"plan_asked": self._asked, "plan_made_for": list(self._made_for or ())}
            return {} if self.plan is None else {"plan": self.plan.to_json(), **made}
        except ValueError as error:
            rank_zero_info(f"memsave: a resumed run will plan again: {error}")
            return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Train on with the plan of the run that is resumed, if it was made for this budget."""
        if self._budget is None or "plan" not in state:
            return
        plan = Plan.from_json(state["plan"])
        asked = self._budget.text, self._recipe.name, self._asked
        if (plan.budget, plan.recipe, state.get("plan_asked")) == asked:
            self.plan, self._made_for = plan, state.get("plan_made_for")
        else:
            rank_zero_info(
                f'memsave: the checkpoint was planned for {plan.budget!r} ("{plan.recipe}") with other settings; '
                "planning again."
            )

    def may_cut(self, module: L.LightningModule) -> bool:
        """Return whether a measured step beyond the budget may lead to smaller microbatches."""
        return self.plan is None or self.plan.recipe != "lossless" or not why_not_exact(module)


def plan_for(
    module: L.LightningModule,
    batch: Batch,
    budget: Budget,
    recipe: Recipe,
    trainer: L.Trainer | None = None,
    seconds: float | None = None,
) -> Plan:
    """Return the plan for one module and batch, in the situation of a trainer that is being set up, or of none.

    Args:
        module: the LightningModule.
        batch: its first.
        budget: what a step has to fit into.
        recipe: what may be used.
        trainer: that is being set up.
        seconds: as for `BudgetedRun`.

    Raises:
        ValueError: as `make_plan`; the plain step cannot be run; parameters have no shape yet, or are not there.
    """
    layers = with_layers(module, trainer)
    check_shapes("budget", layers)
    if not any(True for _ in layers.parameters()):
        raise setting_error(
            "budget",
            "needs a module that has its layers",
            f"{type(module).__name__} without parameters",
            "Make them in `__init__` or `configure_model`, or let the run plan: `MemSave(budget=...)`.",
        )
    situation = _situation(module, batch, recipe, trainer)
    trial = Trial(module, batch, trainer)
    on_paper = predictions_in(module, batch, trainer, situation)
    by_trial: Predict = trial
    if (codecs := _codec_choice(module, batch, recipe, trainer, bool(situation.why_whole))) is not None:
        situation = replace(situation, can_bound_noise=True)
        on_paper, by_trial = _resolved(on_paper, codecs, False), _resolved(by_trial, codecs, True)
    if trainer is not None and trainer.world_size > 1:
        on_paper, by_trial = agreed(trainer, on_paper), agreed(trainer, by_trial)
    try:
        plain = on_paper(())
        is_sharded = planning_groups_of(trainer) is not None
        is_small = situation.device_type == "cpu" and plain.peak_bytes <= SMALL_BYTES and not is_sharded
        trial.times_steps = is_small
        real = by_trial(()) if is_small else plain
        by_steps = is_small and (plain.source == "measured" or plain.peak_bytes <= _TINY_BYTES)
        predict, confirm = (by_trial, None) if by_steps else (on_paper, None if is_sharded else by_trial)
        situation = replace(situation, overhead=overhead_of(plain.num_operations, real.seconds))
        watch = PlanningWatch(seconds or _seconds_allowed(trainer, real), needed_bytes(real), trainer)
        with watch.interruptible():
            made = make_plan(budget, recipe, situation, real, predict, confirm, watch)
        return made if codecs is None else _with_codecs(made, codecs)
    except StepFailedError as error:
        raise ValueError(
            f"The step of {type(module).__name__} cannot be planned, as it cannot be run on a copy of the module: "
            f"{error}. Set techniques by hand instead of a `budget`."
        ) from error


_UNMEASURED = {
    0.05: ActivationCompression(codecs=("exact", "int8")),
    0.2: ActivationCompression(codecs=("exact", "int4")),
}
"""What stands for bounds of noise where it cannot be measured."""


def _codec_choice(
    module: L.LightningModule, batch: Batch, recipe: Recipe, trainer: L.Trainer | None, stays_whole: bool
) -> CodecChoice | None:
    """Return what chooses codecs for bounds of noise; `None` where no setting has one.

    Raises:
        ValueError: the user has set a bound, and noise cannot be measured.
    """
    own, is_wide = recipe.get(ActivationCompression), has_wide_head(with_layers(module, trainer))
    if is_bounded(own):
        return CodecChoice(CodeNoise(module, batch, with_head(own, is_wide), trainer, stays_whole))
    if not recipe.leaves_open(ActivationCompression) and ActivationCompression not in recipe.by_default:
        return None
    try:
        config = with_head(ActivationCompression(codecs=("exact", "int4")), is_wide)
        instead = {bound: with_head(each, is_wide) for bound, each in _UNMEASURED.items()}
        return CodecChoice(CodeNoise(module, batch, config, trainer, stays_whole), instead)
    except ValueError:
        return None


def _resolved(predict: Predict, codecs: CodecChoice, is_measured: bool) -> Predict:
    return lambda techniques: predict(codecs.settings(techniques, is_measured=is_measured))


def _with_codecs(plan: Plan, codecs: CodecChoice) -> Plan:
    """Return the plan with codecs by module in place of its bound of noise."""
    bounded = next((config for config in plan.techniques if is_bounded(config)), None)
    if bounded is None:
        return plan
    chosen = codecs.of(bounded)
    steps = tuple(
        replace(step, setting=f"{step.setting} ({chosen.codecs})")
        if step.technique == _STEM and chosen.codecs
        else step
        for step in plan.steps
    )
    return replace(
        plan,
        techniques=codecs.settings(plan.techniques),
        steps=steps,
        gradient_noise=chosen.noise,
        flags=(*plan.flags, *filter(None, [codecs.why_not])),
    )


def _seconds_allowed(trainer: L.Trainer | None, plain: Prediction) -> float:
    num_batches = None if trainer is None else estimated_batches(trainer)
    if num_batches is None or plain.measured_seconds == math.inf:  # what is modelled is good for comparisons only
        return LEAST_SECONDS
    return max(LEAST_SECONDS, SHARE * num_batches * plain.measured_seconds)


def _with_all_layers(module: L.LightningModule) -> Any:
    """Return a copy on which `configure_model` was called, as a run does before planning; else `module`."""
    if not is_overridden("configure_model", module, import_module(namespace_of(module)).LightningModule):
        return module
    module = copied(module)
    try:
        module.configure_model()
    except Exception as error:  # whatever the user's code raises
        raise ValueError(
            f"`{type(module).__name__}.configure_model` fails outside of a run ({type(error).__name__}: {error}). "
            "Let the run plan: `MemSave(budget=...)`."
        ) from error
    return module


def _situation(module: L.LightningModule, batch: Batch, recipe: Recipe, trainer: L.Trainer | None) -> Situation:
    layers = with_layers(module, trainer)
    cut, without_logits, num_samples, is_wide = Cut(), Cut(), samples_of(batch), has_wide_head(layers)
    if Microbatching not in recipe.switched_off:
        trial, own = Trial(module, batch, trainer), recipe.get(Microbatching) or Microbatching()
        cut = trial.cut(own)
        without_logits = trial.cut(own, ActivationCompression(codecs=(HEAD,))) if is_wide else cut
    is_exact, tiled = not why_not_exact(layers), NOT_TILED
    if recipe.leaves_open(Tiling) and num_samples is not None and (cut.why_not or not is_exact):
        tiled = Trial(module, batch, trainer).tiled()
    if trainer is not None and trainer.world_size > 1:  # a process may have another batch, and all make one plan
        cut, num_samples, tiled = trainer.strategy.broadcast((cut, num_samples, tiled))
    device = torch.device("cpu") if trainer is None else trainer.strategy.root_device
    is_cpu = device.type == "cpu"
    device_bytes = machine_bytes() if is_cpu else total_bytes(device)
    if device_bytes is not None and trainer is not None and trainer.world_size > 1:
        least = trainer.strategy.reduce(torch.tensor(device_bytes, device=device), reduce_op="min")
        device_bytes = int(least)
    return Situation(
        num_samples=None if cut.why_not else num_samples,
        why_whole=f"Batches are not cut into microbatches: {cut.why_not}" if cut.why_not else "",
        asking_bytes=(cut.asking_bytes, without_logits.asking_bytes),
        fewest_asked=FEWEST_SAMPLES,
        is_cut_exact=is_exact,
        tiled=tiled,
        find_positions=Trial(module, batch, trainer).tiled_positions if recipe.leaves_open(Tiling) else Tiled,
        device_type=device.type,
        device_bytes=device_bytes,
        ways=() if trainer is None else tuple(ways_of_training(trainer)),
        noted_bytes=torch.get_rng_state().nbytes if is_cpu else 0,
        num_blocks=len(repeated_blocks(layers)) or MANY_BLOCKS,
        has_wide_head=is_wide,
    )


def _kind_of(trainer: L.Trainer) -> Sequence[Any]:
    """Return what another run must have in common for a plan to be taken again; `None` where that is not known."""
    is_sharded = planning_groups_of(trainer) is not None  # and may have no layers yet
    return (
        None if is_sharded else _shapes(trainer.lightning_module),
        samples_per_batch(trainer),
        trainer.precision,
        most_accumulated(trainer),
        trainer.strategy.root_device.type,
        trainer.world_size,
    )


def _shapes(module: L.LightningModule) -> int:
    return zlib.crc32(repr([tuple(p.shape) for p in module.parameters() if not is_lazy(p)]).encode())


def _refuse(budget: Budget, ways: Sequence[str]) -> None:
    require("autograd", "budget")
    for way in _REFUSED:
        if way in ways:
            raise setting_error(
                "budget",
                f"cannot be planned with {way}: one step of a copy of the module does not show the memory of the run",
                budget.text,
                "Set techniques by hand, for example `microbatch=8`.",
            )
