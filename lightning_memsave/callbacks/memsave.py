"""`MemSave`: the one line that makes a run fit. It resolves settings, adopts the strategy, and measures."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_memsave.callbacks.monitor import MemoryMonitor, with_baseline
from lightning_memsave.core.errors import setting_error
from lightning_memsave.core.report import MemoryReport
from lightning_memsave.lightning_compat import Batch, callbacks_of
from lightning_memsave.loops.session import Session
from lightning_memsave.planner.memory_budget import Budget
from lightning_memsave.planner.plan import Plan
from lightning_memsave.planner.recipes import Recipe, resolve
from lightning_memsave.prediction.after_fit import Outlook, Sample, look_ahead, seconds_allowed
from lightning_memsave.prediction.budgeted_run import BudgetedRun
from lightning_memsave.prediction.noise_bounds import NoiseBoundedRun
from lightning_memsave.prediction.noise_bounds import is_bounded as is_noise_bounded
from lightning_memsave.prediction.update_plan import PlannedUpdate, needs_a_plan
from lightning_memsave.reporting.console import show_summary
from lightning_memsave.reporting.loggers import log_metrics
from lightning_memsave.reporting.messages import outcome
from lightning_memsave.strategies.memsave_mixin import MemSaveMixin, adopt, release
from lightning_memsave.techniques.activation_compression import ActivationCompression
from lightning_memsave.techniques.checkpointing import Checkpointing
from lightning_memsave.techniques.low_precision import LowPrecision
from lightning_memsave.techniques.low_rank import LowRank
from lightning_memsave.techniques.microbatching import Microbatching
from lightning_memsave.techniques.optimizer_state import OptimizerState
from lightning_memsave.techniques.sparse_update import SparseUpdate
from lightning_memsave.techniques.sparsity import Sparsity
from lightning_memsave.techniques.tiling import Tiling


class MemSave(MemoryMonitor):
    """Train with less memory, and say where the bytes went.

    Every slot takes a shorthand or a Config; `None` keeps the recipe's choice and `False` switches a technique off.

    Args:
        recipe: `"lossless"` (what is exact and free), `"exact"` (blocks are run again in backward), `"balanced"` (small
            noise), `"extreme"` (the smallest peak), `"measure"` (change nothing: the baseline run), a `Recipe`, or a
            `Plan` that was made before.
        budget: what a step may take: `"8GiB"`, a number of bytes, `"60%"` of the device, `"0.25x"` of the plain step.
            The first batch is planned for, before training: of what the recipe allows, the cheapest that fits. What is
            set besides stays as it is set.
        max_gradient_noise: bound for the noise that codes of activations bring into a gradient: its root mean square
            over the gradient's norm, for example `0.05`. The codec of each module is chosen from the first batch: with
            a budget for the cheapest plan that fits, else for the fewest bytes.
        sparsity: the fraction of weights that are zero (`0.9`), `"2:4"`, or `Sparsity(...)`.
        low_rank: two factors instead of each weight: their rank (`16`), the fraction of weights that they have together
            (`0.2`), or `LowRank(...)`.
        sparse_update: train a part of the network: what training may take besides it (`"256KiB"`, or `0.2` of what all
            of it takes), or `SparseUpdate(...)`, for example with `layers`.
        precision: how weights are stored: `"bf16-sr"`, `"bf16+8"`, `"bf16-kahan"`, `"int8-sr"`, `"fp16-scaled"`,
            `"bf16-gradients"`, or `LowPrecision(...)`.
        microbatch: samples per microbatch, `"auto"` (recover when memory runs out), `"smallest"` (as small as lowers
            the peak), or `Microbatching(...)`.
        activations: how saved activations are kept: `"exact"`, `"int8"`, `"int4"`, `"int4-chain"`, a list such as
            `["exact", "int4"]`, or `ActivationCompression(...)`.
        tiling: modules in slices: of `"samples"`, of `"positions"`, a pattern for modules, or `Tiling(...)`.
        checkpointing: `"blocks"`, `"sqrt"`, `"recursive"`, or `Checkpointing(...)`, for example with a `budget`.
        optimizer_state: `"8bit"`, `"4bit"`, `"lean"` (5-bit first, factored second moments), `"offload"`, `"paged"`, or
            `OptimizerState(...)`, for example with `projection="galore"`, `gradients="release"` or `"into-state"`.
        planning_seconds: how long a budget's plan may take once something fits, in seconds of wall time; then the best
            so far is taken, as with Ctrl-C. The default is a minute, or a tenth of the fit's estimated time.
        summary: whether the fit ends with a box (`print(memsave.report)` has the same text): the peak beside that of
            plain Lightning, which is predicted unless `compare_to` was given another one, and a setting that would
            save more. Predictions take at most 4 s of processor time, or 5 % of the fit if that is more. There is
            no box where Lightning's log is silenced.

    Raises:
        ValueError: a setting is wrong or two of them cannot be combined; before training starts.

    Example:
        >>> import lightning as L, torch
        >>> from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
        >>> data = torch.utils.data.DataLoader(RandomDataset(32, 64), batch_size=4)
        >>> memsave = MemSave(microbatch=2)
        >>> L.Trainer(callbacks=[memsave], max_steps=3, logger=False, enable_checkpointing=False,
        ...           enable_progress_bar=False, enable_model_summary=False, accelerator="cpu").fit(BoringModel(), data)
        >>> memsave.report.loss_class, memsave.report.microbatch_size
        ('exact', 2)
    """

    def __init__(
        self,
        recipe: str | Recipe | Plan = "lossless",
        *,
        budget: int | str | None = None,
        max_gradient_noise: float | None = None,
        sparsity: bool | float | str | Sparsity | None = None,
        low_rank: bool | int | float | LowRank | None = None,
        sparse_update: bool | int | float | str | SparseUpdate | None = None,
        precision: bool | str | LowPrecision | None = None,
        microbatch: int | bool | str | Microbatching | None = None,
        activations: bool | str | Sequence[str] | ActivationCompression | None = None,
        tiling: bool | str | Tiling | None = None,
        checkpointing: bool | str | Checkpointing | None = None,
        optimizer_state: bool | str | OptimizerState | None = None,
        planning_seconds: float | None = None,
        summary: bool = True,
    ) -> None:
        super().__init__()
        self._summary = summary
        slots = {
            "sparsity": sparsity,
            "low_rank": low_rank,
            "sparse_update": sparse_update,
            "precision": precision,
            "microbatch": microbatch,
            "activations": _bounded(activations, max_gradient_noise),
            "tiling": tiling,
            "checkpointing": checkpointing,
            "optimizer_state": optimizer_state,
        }
        noise = {"max_gradient_noise": max_gradient_noise, "activations": activations}
        self._given = {"budget": budget, **slots, **noise, "planning_seconds": planning_seconds}
        if isinstance(recipe, Plan):
            _check_alone({"budget": budget, "max_gradient_noise": max_gradient_noise, **slots})
            self.budgeted: BudgetedRun | None = BudgetedRun(None, recipe.as_recipe(), recipe)
            recipe = recipe.as_recipe()
        else:
            self.budgeted = None
        self.recipe = resolve(recipe, slots)
        """What is switched on, as data; with a budget, what is set in any case."""
        self.planned_update = PlannedUpdate(self.recipe) if needs_a_plan(self.recipe) else None
        """What chooses the layers of a sparse update; `None` where there is nothing to choose."""
        if budget is not None:
            if self.planned_update is not None:
                remedy = "Set `SparseUpdate(layers=...)`, which `plan_sparse_update` finds, or leave out `budget`."
                raise setting_error("budget", "cannot be planned beside a sparse update's own", budget, remedy)
            if self.recipe.name == "measure":
                raise setting_error("budget", "needs a recipe that may change something", "measure", 'Use "lossless".')
            self.budgeted = BudgetedRun(Budget(budget), self.recipe, seconds=planning_seconds)
        elif planning_seconds is not None:
            raise setting_error("planning_seconds", "needs a `budget` to plan for", planning_seconds, "Leave it out.")
        is_bounded = budget is None and is_noise_bounded(self.recipe.get(ActivationCompression))
        if is_bounded and self.planned_update is not None:
            remedy = "Set `SparseUpdate(layers=...)`, which `plan_sparse_update` finds, or leave it out."
            rule = "cannot be measured beside a sparse update whose layers are still to be chosen"
            raise setting_error("max_gradient_noise", rule, max_gradient_noise, remedy)
        self.noise_bounded = NoiseBoundedRun(self.recipe) if is_bounded else None
        """What chooses codecs for a bound of noise; `None` without one, and with a budget, whose plan does."""
        self._session: Session | None = None
        self._began, self._outlook = 0.0, Outlook()
        self._sample: Sample | None = None
        self._highest_bytes = 0

    def __repr__(self) -> str:
        """Return what was set."""
        given = [f"{name}={value!r}" for name, value in self._given.items() if value is not None]
        return f"MemSave({', '.join([repr(self.recipe.name), *given])})"

    @property
    def plan(self) -> Plan | None:
        """What the budget came to; `None` without one, and before the first fit has planned."""
        return None if self.budgeted is None else self.budgeted.plan

    @property
    def _source(self) -> BudgetedRun | PlannedUpdate | NoiseBoundedRun | None:
        """What chooses the settings of a run when it begins."""
        return self.budgeted or self.planned_update or self.noise_bounded

    def _measured(self) -> MemoryReport:
        measured = super()._measured()
        if (bounded := self.budgeted or self.noise_bounded) is not None:
            measured = dataclasses.replace(measured, gradient_noise=bounded.gradient_noise)
        if self.plan is not None:
            measured = dataclasses.replace(
                measured,
                budget_bytes=self.plan.budget_bytes,
                predicted_peak_bytes=self.plan.peak_bytes,
                predicted_by_category=self.plan.by_category,
                baseline_peak_bytes=sum(self.plan.baseline_by_category.values()),
                baseline_source="predicted",
                baseline_by_category=self.plan.baseline_by_category,
            )
        elif not self.recipe.techniques and measured.peak_bytes is not None:
            measured = with_baseline(measured, measured)
        elif self._outlook.baseline is not None:
            measured = with_baseline(measured, self._outlook.baseline)
        if self._session is None:
            return measured
        applied = self._session.applied
        is_cut = any(a.technique == "microbatching" for a in applied)
        return dataclasses.replace(
            measured,
            applied=applied,
            microbatch_size=self._session.cutter.size if is_cut else None,
            num_oom_recovered=self._session.num_recovered,
            next_setting=self._outlook.next_setting,
            next_peak_bytes=self._outlook.next_peak_bytes,
        )

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Adopt the live strategy before it sets up model and optimizers."""
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            if sum(isinstance(c, MemSave) for c in callbacks_of(trainer)) > 1:
                raise setting_error(
                    "callbacks",
                    "must hold one MemSave",
                    [type(c).__name__ for c in callbacks_of(trainer)],
                    "Merge their settings.",
                )
            self._session = Session(self.recipe, self._source).after(self._session)
        elif self._session is None:
            self._session = Session(self.recipe, self._source)
        adopt(trainer.strategy, self._session)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Tell the loggers how this run is configured."""
        super().on_fit_start(trainer, pl_module)
        self._began, self._sample, self._outlook = time.monotonic(), None, Outlook()
        self._highest_bytes = 0

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the final figures to the loggers, and the summary for people."""
        if self._is_summed_up(trainer) and self.report.peak_bytes is not None:
            seconds = seconds_allowed(time.monotonic() - self._began)
            self._outlook = look_ahead(trainer, pl_module, self._sample, self._in_force, self.report, seconds)
        super().on_fit_end(trainer, pl_module)

    def _tell(self, trainer: L.Trainer, report: MemoryReport) -> None:
        if self._is_summed_up(trainer):
            show_summary(report, self._outlook.why_not if report.factor is None else "")
        else:
            super()._tell(trainer, report)

    def _is_summed_up(self, trainer: L.Trainer) -> bool:
        return self._summary and trainer.is_global_zero and not trainer.barebones

    def _keep_sample(self, trainer: L.Trainer, batch: Batch) -> None:
        """Keep a sample of the measured batch with the highest peak, from which plain Lightning's is predicted."""
        step = self._meter.tracked
        if step is not None and step.peak_bytes > self._highest_bytes and self._is_summed_up(trainer):
            self._highest_bytes = step.peak_bytes
            with contextlib.suppress(Exception):  # a batch of a class that cannot be cut
                self._sample = Sample.of(batch)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Stop measuring, and give the strategy back: a later fit without this callback is without its settings."""
        super().teardown(trainer, pl_module, stage)
        if self._session is not None:
            self._session.finish()  # after a finder's trial Lightning tears down callbacks first, then the strategy
        release(trainer.strategy)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: STEP_OUTPUT, batch: Batch, batch_idx: int
    ) -> None:
        """End a step; hold what was measured in it against the limits that were set; tell of patterns that changed."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._keep_sample(trainer, batch)
        if (session := self._session) is None:
            return
        if session.compact_training is not None and session.compact_training.has_moved():
            log_metrics(trainer, session.compact_training.metrics())
        meter = self._meter
        has_changed = session.measured(trainer, batch, meter.tracked, meter.scheduled_bytes)
        if has_changed:
            meter.measure_next()
        if self.budgeted is not None and meter.tracked is not None:
            self.budgeted.check(trainer, meter.tracked, has_changed)

    def _on_growth(self) -> None:
        for applied in [] if self._session is None else self._session.changes:
            applied.renew(applied)

    def state_dict(self) -> dict[str, Any]:
        """Return the plan, and what was learned about this machine's memory.

        A resumed run starts where this one stopped.
        """
        planned = {} if self._source is None else self._source.state_dict()
        return planned if self._session is None else {**self._session.state_dict(), **planned}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what was learned; effective from the first batch on."""
        if self._source is not None and (self._session is None or not self._session.is_decided):
            self._source.load_state_dict(state_dict)
        if self._session is not None and state_dict:
            self._session.load_state_dict(state_dict)

    def _outcome(self, report: MemoryReport) -> str | None:
        return super()._outcome(report) if self.plan is None else outcome(self.plan, report)

    def _settings_on(self) -> tuple[set[str], set[str]]:
        recipe, by_recovery = self._in_force, {a.technique for a in self.report.applied}
        return {*recipe.rows(), *by_recovery}, set(recipe.fixed_rows())

    def _headlines(self) -> dict[str, float]:
        return {**super()._headlines(), **({} if self._session is None else self._session.metrics())}

    def _config(self) -> dict[str, Any]:
        settings = {**self._in_force.as_dict(), "every": self._meter.every}
        if self.budgeted is None or self.plan is None:
            return settings
        return {**settings, "plan": self.budgeted.state_dict().get("plan", str(self.plan))}  # read by `Plan.from_json`

    @property
    def _in_force(self) -> Recipe:
        """The recipe; once a fit has begun, without defaults that stepped aside in it, or as its plan has it."""
        return self.recipe if self._session is None or not self._session.started else self._session.recipe


def _bounded(activations: Any, bound: float | None) -> Any:
    """Return settings of activations with a bound of noise."""
    if bound is None:
        return activations
    if activations is False:
        raise setting_error("max_gradient_noise", "needs activations in codes", bound, "Leave out `activations=False`.")
    if activations is None:
        return ActivationCompression(codecs=("exact", "int4"), max_gradient_noise=bound)
    is_config = isinstance(activations, ActivationCompression)
    config = activations if is_config else ActivationCompression.from_shorthand(activations)
    return dataclasses.replace(config, max_gradient_noise=bound)


MemSaveMixin.callback_class = MemSave  # of `strategy="memsave"` without a callback


def _check_alone(settings: Mapping[str, object]) -> None:
    """Refuse settings beside a plan: what it was made for does not hold with others."""
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise setting_error(
            given[0],
            "cannot be set beside a plan, which was made without it",
            settings[given[0]],
            "Make a plan with it: `MemSave(budget=..., ...)`.",
        )
