"""Plans in a run: one batch is rehearsed before it is trained on, and regions are made from what that showed."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.utils._pytree import tree_map

from lightning_memsave.core.errors import BudgetWarning, NoEffectWarning, setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.core.units import format_bytes
from lightning_memsave.lightning_compat import kinds_of, session_of
from lightning_memsave.loops.optimizer_changes import most_accumulated
from lightning_memsave.loops.out_of_memory import is_out_of_memory
from lightning_memsave.loops.side_effect_free import values_kept, without_a_trace
from lightning_memsave.measuring.allocator import address_space_left
from lightning_memsave.measuring.step_trace import Trace, trace_step
from lightning_memsave.measuring.storages import tensors_in
from lightning_memsave.planner.checkpointing import CheckpointingPlan, Planner, no_plan
from lightning_memsave.saved_tensors.parameter_edits import ParametersKept
from lightning_memsave.simulation.fake_model import fake_tensors, optimizer_state_bytes
from lightning_memsave.simulation.global_state_guard import outside_kept
from lightning_memsave.techniques.checkpointing import Checkpointing, apply_checkpointing
from lightning_memsave.torch_internals.fake_tensors import with_values
from lightning_memsave.torch_internals.private_names import require
from lightning_memsave.torch_internals.sharded_parameters import has_fake_parameters

_SHARDED = {"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}

_ROOM = 2**28
"""Bytes of addresses; a small model's rehearsal took 225 MiB."""


class PlannedCheckpointing:
    """Regions that are found when the first batch comes.

    Args:
        trainer: Lightning's.
        config: needs a plan.
        is_asked_for: whether the user did; then no effect is worth a warning.

    Raises:
        ValueError: this way of training cannot be rehearsed.
    """

    def __init__(self, trainer: L.Trainer, config: Checkpointing, *, is_asked_for: bool = True) -> None:
        self._config, self._is_asked_for = config, is_asked_for
        self._planner: Planner | None = None
        self._plan: CheckpointingPlan | None = None
        self.applied: Applied | None = None
        """What was done; `None` before the first batch."""
        self._is_corrected = False
        require("autograd", "checkpointing")
        require("fake tensors", "checkpointing")
        _refuse(trainer, config)

    @property
    def is_due(self) -> bool:
        """Whether the next batch is the one to rehearse."""
        return self.applied is None and torch.is_grad_enabled()

    @property
    def is_worth_telling(self) -> bool:
        """Whether regions were made, or the user waits for an answer."""
        return self._is_asked_for or (self._plan is not None and bool(self._plan.config.regions))

    def plan(self, trainer: L.Trainer, args: tuple[Any, ...], scope: Callable[[Callable[[], Any]], Any] | None) -> None:
        """Rehearse `training_step(*args)` and make the regions that it calls for; what rank 0 finds holds for all.

        Args:
            trainer: Lightning's, in its fit loop.
            args: of `training_step`.
            scope: runs a step as the run's own activation compression does, or `None` without one.

        Raises:
            ValueError: the budget cannot be met.
        """
        found: CheckpointingPlan | Exception
        try:  # on every rank, as a step may wait for the others
            trace = _rehearse(trainer, args, scope)
            extra_bytes = sum(map(optimizer_state_bytes, trainer.optimizers))
            self._planner, found = with_values(lambda: _planned(trace, self._config, extra_bytes))
        except Exception as error:
            found = error
        if trainer.world_size > 1 and self._is_asked_for:  # recovery goes its own way in each process
            found = trainer.strategy.broadcast(found)
        if isinstance(found, ValueError) and not self._is_asked_for:
            found = no_plan(self._config)  # recovery goes on without
        if isinstance(found, Exception):
            raise found
        self._apply(trainer, found)

    def _apply(self, trainer: L.Trainer, plan: CheckpointingPlan) -> None:
        if self.applied is not None:
            self.applied.undo()
        self._plan = plan
        self.applied = apply_checkpointing(trainer.lightning_module, plan.config)
        if self._is_asked_for and not plan.config.regions and plan.budget_bytes is None:
            warnings.warn(
                f"checkpointing={self._config.method!r} had no effect: no region lowers the predicted peak of "
                f"{format_bytes(plan.baseline_peak_bytes)}.",
                NoEffectWarning,
                stacklevel=2,
            )
        rank_zero_info(f"memsave: checkpointing planned: {plan.describe()}")

    def check(self, trainer: L.Trainer, peak_bytes: int) -> None:
        """Compare with a step that was measured; where it is over the budget, plan again, once.

        Args:
            trainer: Lightning's, between two batches.
            peak_bytes: of the measured step; reserved bytes where an allocator tells them.
        """
        plan = self._plan
        if plan is None or plan.budget_bytes is None or plan.tracked_peak_bytes is None:
            return
        unforeseen = peak_bytes - plan.tracked_peak_bytes
        over: int = trainer.strategy.broadcast((plan.peak_bytes or 0) + unforeseen - plan.budget_bytes)
        if over <= 0:
            return
        better: CheckpointingPlan | None = None
        if self._planner is not None and not self._is_corrected:
            better = self._planner.plan_again(less_bytes=max(unforeseen, 0))
        better = trainer.strategy.broadcast(better)
        self._is_corrected = True
        if better is not None:
            self._apply(trainer, better)
            return
        warnings.warn(
            f"The budget of {format_bytes(plan.budget_bytes)} is exceeded by {format_bytes(over)}: a step takes what "
            "its rehearsal did not show, and no better set of regions is known. Take a smaller budget or microbatch.",
            BudgetWarning,
            stacklevel=2,
        )


def _refuse(trainer: L.Trainer, config: Checkpointing) -> None:
    """Raise `ValueError` where one step cannot be rehearsed on its own."""
    what = repr(config.method) if config.budget is None else f"budget={config.budget!r}"
    if kinds_of(trainer.strategy) & _SHARDED:
        why = f"planned under {type(trainer.strategy).__name__}: its parameters are shards while no module runs"
    elif not trainer.lightning_module.automatic_optimization:
        why = "planned under manual optimization: a rehearsal of `training_step` would step the optimizers"
    elif is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
        why = "planned for `training_step(dataloader_iter)`: a rehearsal would take batches away"
    else:
        return
    raise setting_error("checkpointing", f"cannot be {why}", what, 'Use `checkpointing="blocks"`.')


def _planned(trace: Trace, config: Checkpointing, extra_bytes: int) -> tuple[Planner, CheckpointingPlan]:
    planner = Planner(trace, config, extra_bytes=extra_bytes)
    return planner, planner.plan()


def has_room() -> bool:
    """Return whether a rehearsal on fake tensors has the addresses that it needs.

    Where they end, torch aborts the process.
    """
    return address_space_left() >= _ROOM


def _rehearse(trainer: L.Trainer, args: tuple[Any, ...], scope: Callable[[Callable[[], Any]], Any] | None) -> Trace:
    """Return the trace of one step on fake tensors, which take no memory.

    It is made on real ones where the step reads values, or the store codes them.
    """
    module = trainer.lightning_module

    def trace(args: tuple[Any, ...], scope: Callable[[Callable[[], Any]], Any] | None) -> Trace:
        _bring_gradients(trainer, module)
        args = tree_map(lambda leaf: leaf, args)  # containers of its own, of which a step may take things away
        step = functools.partial(_forward_and_backward, trainer, args)
        return trace_step(module, step if scope is None else lambda: scope(step), held=list(tensors_in(args)))

    with without_a_trace(trainer, module, args) as start, _without_reduction(trainer.strategy.model):
        if scope is not None:
            try:
                with values_kept(args), ParametersKept(module):
                    return trace(args, scope)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            start.restore()
        if has_fake_parameters(module):  # a prediction
            return trace(args, None)
        # Whatever fails on fake tensors (a step that reads values, a kernel of one's own) is tried on real ones.
        for scope_or_none in dict.fromkeys((scope, None)) if has_room() else ():
            with contextlib.suppress(Exception), outside_kept(module), fake_tensors(module) as fake:
                return trace(fake(args), scope_or_none)
            start.restore()
        with values_kept(args), ParametersKept(module):
            return trace(args, None)


def _adds_up_gradients(trainer: L.Trainer) -> bool:
    """Return whether a backward pass may find gradients of an earlier one."""
    return most_accumulated(trainer) > 1 or session_of(trainer).cutter.size is not None


def _bring_gradients(trainer: L.Trainer, module: nn.Module) -> None:
    """Give parameters the gradients that a later batch finds: the rehearsal is of the step at its highest."""
    is_freed_first = session_of(trainer).zero_grad_first and not _adds_up_gradients(trainer)
    for parameter in module.parameters():
        is_there = parameter.requires_grad and not is_freed_first
        parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype) if is_there else None


def _forward_and_backward(trainer: L.Trainer, args: tuple[Any, ...]) -> None:
    with trainer.precision_plugin.train_step_context():
        output: Any = trainer.lightning_module.training_step(*args)
    loss = output["loss"] if isinstance(output, dict) else output
    if loss is None:
        raise setting_error(
            "checkpointing",
            "needs a first batch with a loss to plan from",
            "None from `training_step`",
            'Use `checkpointing="blocks"`.',
        )
    if not _adds_up_gradients(trainer):
        trainer.lightning_module.zero_grad()  # torch's, as Lightning does between forward and backward
    loss.backward()


@contextlib.contextmanager
def _without_reduction(model: Any) -> Iterator[None]:
    """Keep DDP's hooks on gradients from firing before the real step."""
    with model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) else contextlib.nullcontext():
        yield
