"""The optimization loop: microbatches and early zero-grad, inside the closure that the optimizer calls.

Lightning's closure is training_step, zero_grad, backward. This one runs training_step and backward for each microbatch,
zeroes gradients once, and hands on one loss, one set of logs and one output for the batch. It sits in the closure, not
in `Strategy.training_step`, because only there do the loss that LBFGS reads, the step's logs and the hooks come out
right.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_memsave.core.errors import RefusedRegionError
from lightning_memsave.lightning_compat import (
    NAMESPACES,
    AutomaticOptimization,
    Closure,
    ClosureResult,
    block_sync,
    callbacks_of,
    has_hook,
    is_overridden,
)
from lightning_memsave.loops.batch_cutter import noting_parts
from lightning_memsave.loops.batch_snapshot import BatchStart
from lightning_memsave.loops.deferred_logs import DeferredLogs, KeptLogs
from lightning_memsave.loops.joint_recovery import FailedTryError, JointRecovery, TryOfProcess, with_one_sample
from lightning_memsave.loops.last_gradients import LastGradients
from lightning_memsave.loops.late_reduction import LateReduction
from lightning_memsave.loops.merged_metrics import MergedMetrics
from lightning_memsave.loops.merged_outputs import detached, merge_outputs
from lightning_memsave.loops.out_of_memory import (
    OutOfMemoryUnrecoverableError,
    fragmentation,
    is_out_of_memory,
    nothing_left,
    nothing_left_jointly,
)
from lightning_memsave.loops.recovery import RecoveryPolicy
from lightning_memsave.loops.session import Session
from lightning_memsave.loops.step_effects import unwatched
from lightning_memsave.loops.trainer_features import ways_of_training
from lightning_memsave.measuring.allocator import free_memory, read_current, reset_peak
from lightning_memsave.measuring.ledger import Ledger
from lightning_memsave.measuring.meter import stop_measuring
from lightning_memsave.torch_internals.private_names import missing

_PRECISION_PLUGINS = tuple(f"{namespace}.plugins.precision" for namespace in NAMESPACES)


class MicrobatchClosure(Closure):  # type: ignore[misc]  # untyped, as it may be missing
    """Lightning's closure, for one microbatch after the other."""

    def __init__(
        self, loop: Any, kwargs: OrderedDict[str, Any], optimizer: torch.optim.Optimizer, batch_idx: int
    ) -> None:
        super().__init__(
            step_fn=loop._make_step_fn(kwargs),
            backward_fn=loop._make_backward_fn(optimizer),
            zero_grad_fn=loop._make_zero_grad_fn(batch_idx, optimizer),
        )
        self._loop, self._kwargs, self._optimizer = loop, kwargs, optimizer
        self._last_gradients: LastGradients

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of the batch: whole, in microbatches, or until it fits."""
        session: Session = self._loop.session
        self._last_gradients = LastGradients(self._loop, self._optimizer, self._zero_grad_fn)  # LBFGS calls again
        if session.joint is not None:
            return self._run_jointly(session, session.joint)
        if session.recovery is not None:
            return self._run_until_it_fits(session, session.recovery)
        parts = session.cutter.microbatches(self._loop.trainer, self._kwargs)
        self._free_first(session)
        # Beside processes that cut theirs, a whole batch logs when they do, after backward: a log may exchange.
        logs_late = self._loop.trainer.world_size > 1 and session.cutter.config is not None
        if not session.cutter.runs_in_parts(parts) and not logs_late:
            return super().closure(*args, **kwargs)
        with noting_parts(len(parts)):
            return self._run_parts(parts, session) if logs_late else self._run(parts, session)

    def _free_first(self, session: Session) -> None:
        if session.zero_grad_first:
            self._last_gradients.free()

    def _run_until_it_fits(self, session: Session, recovery: RecoveryPolicy) -> Any:
        trainer, batch = self._loop.trainer, self._kwargs["batch"]
        device = trainer.strategy.root_device
        accumulates = self._last_gradients.accumulates
        self._free_first(session)
        ddp = trainer.strategy.model if trainer.world_size > 1 else None
        exchange = LateReduction(ddp, self._loop.steps) if ddp is not None else None
        while True:
            start = recovery.start_of(trainer.lightning_module, batch, accumulates, session.noise)
            held, parts = read_current(device), []
            try:
                parts = session.cutter.microbatches(trainer, self._kwargs)
                result = self._run(parts, session, exchange, metrics=start.metrics)
            except Exception as error:
                # Only the text is kept: the error itself holds the tensors of the frames that it came through.
                session.cutter.record.note_failed_try(start.not_put_back())
                failure = self._failure(error, start, exchange, is_cut=len(parts) > 1)
            else:
                recovery.learn_changing(start)
                session.cutter.record.note_good_try()
                recovery.succeed(batch, len(parts), device, None if held is None else held.allocated_bytes)
                return result
            self._undo(start, device, accumulates)
            if failure is None or session.cutter.cut_again(*self._where):
                continue
            what = f"batch {trainer.fit_loop.batch_idx}"
            if not recovery.shrink(trainer, batch, session.cutter.can_cut(batch), what):
                return self._try_a_last_time(session, start, exchange, failure)

    @property
    def _where(self) -> tuple[int, int]:
        """Epoch and number of the batch."""
        return self._loop.trainer.current_epoch, self._loop.trainer.fit_loop.batch_idx

    def _undo(self, start: BatchStart, device: torch.device, accumulates: bool) -> None:
        """Put the batch back to its start."""
        start.restore(gradients=accumulates or self._last_gradients.are_gone)
        self._last_gradients.begin_again()
        free_memory()
        reset_peak(device)  # of the try that does not count

    def _run_jointly(self, session: Session, joint: JointRecovery) -> Any:
        """Run the batch until it fits in all processes, which wait for each other in it."""
        trainer, batch, recovery = self._loop.trainer, self._kwargs["batch"], session.recovery
        assert recovery is not None, "it is joint"
        device, accumulates = trainer.strategy.root_device, self._last_gradients.accumulates
        self._free_first(session)
        while True:
            start = recovery.start_of(trainer.lightning_module, batch, accumulates, session.noise)
            held, failure, parts = read_current(device), None, None
            joint.begin()
            try:
                parts = session.cutter.microbatches(trainer, self._kwargs)
                joint.count()
                result = self._run(parts, session, joint)
            except FailedTryError:
                pass
            except Exception as error:  # of which only the text is kept, as it holds tensors
                if not is_out_of_memory(error):
                    joint.explain(error)
                    raise
                failure = f"{joint.phase}: {error}{fragmentation(device)}"
                if not joint.has_counted:
                    raise joint.given_up(failure, "it is not known what other processes wait for there") from error
            else:
                recovery.learn_changing(start)
                session.cutter.record.note_good_try()
                recovery.succeed(batch, len(parts), device, None if held is None else held.allocated_bytes)
                return result
            why_final = start.what_stays() or self._last_gradients.why_final
            edited = start.not_put_back()
            self._undo(start, device, accumulates)
            was_measured = stop_measuring()
            if failure is not None:
                assert parts is not None, "they have been counted"
                joint.catch_up(failure, functools.partial(self._follow, parts, session, joint))
                self._undo(start, device, accumulates)
            session.cutter.record.note_failed_try([*edited, *start.not_put_back()])
            tries = joint.share(failure, start.what_stays() or why_final, was_measured)
            self._take_measure_of_all(session, joint, tries)

    def _follow(self, parts: list[tuple[Any, float]], session: Session, joint: JointRecovery) -> None:
        """Repeat a try with one sample for each microbatch; its weights are those of the whole ones."""
        config, module = session.cutter.config, self._loop.trainer.lightning_module
        assert config is not None
        self._run(with_one_sample(parts, config, module), session, joint, session.cutter.weights(parts))

    def _take_measure_of_all(self, session: Session, joint: JointRecovery, tries: list[TryOfProcess]) -> None:
        """Take the next measure, the same as all other processes.

        Raises:
            OutOfMemoryUnrecoverableError: there is none, or a process cannot run the batch again.
        """
        trainer, batch, recovery = self._loop.trainer, self._kwargs["batch"], session.recovery
        assert recovery is not None, "it is joint"
        failed = [each for each in tries if each.failure is not None]
        where = ", ".join(f"rank {each.rank}, in {each.failure}" for each in failed)
        for each in tries:
            if each.why_final is not None:
                raise OutOfMemoryUnrecoverableError(
                    f"Memory ran out and the batch cannot be run again in rank {each.rank}: {each.why_final}. It ran "
                    f"out in {where}"
                )
        what = f"batch {trainer.fit_loop.batch_idx} ({', '.join(f'rank {each.rank}' for each in failed)})"
        if any(each.was_measured for each in failed):
            recovery.left_ledger(what)
        elif not joint.agree(recovery.shrink(trainer, batch, session.cutter.can_cut(batch), what)):
            fixed = {*session.recipe.fixed_rows(), *ways_of_training(trainer)}
            advice = nothing_left_jointly(session.recipe.rows(), fixed)
            raise OutOfMemoryUnrecoverableError(f"{advice} It ran out in {where}")

    def _failure(
        self, error: Exception, start: BatchStart, exchange: LateReduction | None, *, is_cut: bool
    ) -> str | None:
        """Return what to say about memory that ran out; `None` to run the batch again as it is.

        It then runs without being measured, which takes memory itself, without regions, which the model refuses, or
        whole, where a part of it has failed.

        A model shows in many ways that a region cannot be repeated (a cache that has grown, a compiler that meets
        it), so each error in the first batch of new regions counts: one of the user's comes again without them.

        Raises:
            Exception: `error` is another one, or nothing can be undone.
        """
        session: Session = self._loop.session
        assert session.recovery is not None
        why_final = start.why_final() or self._last_gradients.why_final
        if exchange is not None and exchange.has_begun:
            why_final = "gradients are on their way to other processes"
        if not is_out_of_memory(error):
            may_be_regions = isinstance(error, RefusedRegionError) or session.recovery.has_new_regions
            if may_be_regions and why_final is None and session.recovery.withdraw(self._loop.trainer):
                session.cutter.record.note_edited_again(getattr(error, "edited", ()))
                return None
            if is_cut and why_final is None and session.cutter.leave_whole(error, *self._where):
                return None
            raise error
        if why_final is not None:
            raise OutOfMemoryUnrecoverableError(
                f"Memory ran out and the batch cannot be run again: {why_final}. The error was: {error}"
            ) from error
        if session.recovery.leave_ledger(f"batch {self._loop.trainer.fit_loop.batch_idx}"):
            return None
        return f"{error}{fragmentation(self._loop.trainer.strategy.root_device)}"

    def _try_a_last_time(
        self, session: Session, start: BatchStart, exchange: LateReduction | None, failure: str
    ) -> Any:
        """Run the batch under the ledger, as nothing else is left to be done, to say what takes the memory.

        Raises:
            OutOfMemoryUnrecoverableError: with that.
        """
        if missing("autograd"):
            raise OutOfMemoryUnrecoverableError(
                f"Memory ran out after every exact measure was taken. The error was: {failure}"
            )
        trainer, batch = self._loop.trainer, self._kwargs["batch"]
        ledger = Ledger(trainer.strategy.root_device).watching(trainer.strategy.model, trainer.optimizers, batch)
        try:
            with ledger:
                return self._run(session.cutter.microbatches(trainer, self._kwargs), session, exchange)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        start.restore()
        assert ledger.measurement is not None, "it has been left"
        module, can_cut, applied = trainer.lightning_module, session.cutter.can_cut(batch), session.recipe.rows()
        fixed = {*session.recipe.fixed_rows(), *ways_of_training(trainer)}
        why_whole = session.cutter.why_whole
        text = nothing_left(module, ledger.measurement, can_cut, applied, failure, fixed, why_whole)
        raise OutOfMemoryUnrecoverableError(text)

    def _run(
        self,
        parts: list[tuple[Any, float]],
        session: Session,
        exchange: LateReduction | JointRecovery | None = None,
        weights: list[float] | None = None,
        metrics: Sequence[Metric] | None = None,
    ) -> Any:
        """Run the parts of a batch, one after the other, and merge what they return.

        Args:
            parts: microbatches with their numbers of samples.
            session: of the run.
            exchange: with other processes, after the last part; `None` where gradients are averaged in backward.
            weights: of the losses, where a try is repeated that does not count; `None`: those of the parts.
            metrics: of the module, where they are known.
        """
        if len(parts) == 1 and exchange is None and weights is None:
            return self._run_whole(parts[0][0], session, metrics)
        return self._run_parts(parts, session, exchange, weights, metrics)

    def _run_whole(self, batch: Any, session: Session, metrics: Sequence[Metric] | None) -> Any:
        """Run a batch in one piece, as Lightning's closure does; a try that fails leaves logs and metrics as before."""
        trainer, config = self._loop.trainer, session.cutter.config
        assert config is not None
        module = trainer.lightning_module
        with (
            KeptLogs(trainer._results),
            MergedMetrics(module, 1, metrics),
            config.pooled_batchnorm(module, 1) as batchnorm,
        ):
            with batchnorm.microbatch():
                out = self._loop._training_step(OrderedDict(self._kwargs, batch=batch))
            self._last_gradients.zero(is_cut=False)
            self._last_gradients.end_forward()
            if out.closure_loss is None:
                return self._skipped()
            session.cutter.rules.note(out.closure_loss)
            if self._backward_fn is not None:
                self._backward_fn(out.closure_loss)
            out.closure_loss = out.closure_loss.detach()  # the optimizer must not meet the graph
        return out

    def _skipped(self) -> Any:
        self.warning_cache.warn("`training_step` returned `None` for every microbatch; the step is skipped.")
        return ClosureResult(None)

    def _run_parts(
        self,
        parts: list[tuple[Any, float]],
        session: Session,
        exchange: LateReduction | JointRecovery | None = None,
        weights: list[float] | None = None,
        found_metrics: Sequence[Metric] | None = None,
    ) -> Any:
        trainer = self._loop.trainer
        config = session.cutter.config
        assert config is not None
        counts, joint = weights is None, exchange if isinstance(exchange, JointRecovery) else None
        weights = session.cutter.weights(parts) if weights is None else weights
        reduction = session.cutter.rules.known[0].reduction if session.cutter.rules.known else "mean"
        last = max(i for i, weight in enumerate(weights) if weight)
        num_all = sum(n for _, n in parts) or 1.0
        losses: list[Tensor | None] = []  # as training_step returned them
        outputs: list[dict[str, Any]] = []
        sizes: list[float] = []
        total: Tensor | None = None
        has_ended = self._backward_fn is None
        results = trainer._results
        module = trainer.lightning_module
        is_watched = counts and len(parts) > 1
        watch = session.cutter.record.watch(module, trainer.strategy.root_device) if is_watched else unwatched
        is_counted = is_watched and session.cutter.counts_exchanges(trainer)
        with (  # under DDP a process that has not cut its batch logs when the others do
            DeferredLogs(results, type(results).log) as logs,
            MergedMetrics(module, len(parts), found_metrics) as metrics,
            config.pooled_batchnorm(module, len(parts)) as batchnorm,
        ):
            for i, ((part, num_samples), weight) in enumerate(zip(parts, weights, strict=True)):
                is_last = i == last
                logs.begin(part, num_samples, weight)
                metrics.weight = weight if reduction == "mean" else num_samples / num_all
                with block_sync(trainer.strategy, block=exchange is not None or not is_last):
                    if joint is not None:
                        joint.phase = f"the forward pass of part {i + 1} of {len(parts)}"
                    with batchnorm.microbatch(), watch(i), session.cutter.noting_exchange(is_counted and i > 0):
                        out = self._loop._training_step(OrderedDict(self._kwargs, batch=part))
                    if i == 0:
                        self._last_gradients.zero(is_cut=len(parts) > 1)
                    if is_last:
                        self._last_gradients.end_forward()
                    losses.append(out.loss)
                    if out.closure_loss is None:
                        continue
                    outputs.append(out.extra if len(parts) == 1 else detached(out.extra))
                    sizes.append(num_samples)
                    if not weight:  # no labels: a mean over none, and 0 times that is no number either
                        continue
                    session.cutter.rules.note(out.closure_loss)
                    loss = out.closure_loss * weight
                    total = loss.detach().clone() if total is None else total + loss.detach()
                    if self._backward_fn is not None:
                        if joint is not None:
                            joint.phase = f"the backward pass of part {i + 1} of {len(parts)}"
                        # Other processes may have a loss in parts that are left.
                        with session.own_backward():
                            at_end = joint is None or i + 1 == len(parts)
                            has_ended = self._backward(loss, total, is_last, exchange if at_end else None)
                    del out, loss  # the next microbatch must not meet this one's graph
        if exchange is not None:
            exchange.finish()  # where the last microbatch had no loss
        session.cutter.record.note_inputs(metrics.inputs)
        logs.flush(self._kwargs["batch"], losses, reduction, trainer.accumulate_grad_batches)
        session.cutter.record.note_losses(losses)
        return self._skipped() if total is None else self._merged(total, outputs, sizes, has_ended)

    def _merged(self, total: Tensor, outputs: list[dict[str, Any]], sizes: list[float], has_ended: bool) -> Any:
        """Return what a batch has come to; its hooks run once, also where the last microbatch had no loss."""
        if not has_ended:
            strategy = self._loop.trainer.strategy
            strategy.precision_plugin.pre_backward(total, strategy.lightning_module)
            strategy.precision_plugin.post_backward(total, strategy.lightning_module)
        return ClosureResult(total, extra=merge_outputs(outputs, sizes))

    def _backward(
        self, loss: Tensor, total: Tensor, is_last: bool, exchange: LateReduction | JointRecovery | None
    ) -> bool:
        """Run backward; `on_before_backward` and `on_after_backward` run for the last microbatch, once per batch.

        Returns:
            Whether they have run.
        """
        strategy = self._loop.trainer.strategy
        plugin, module = strategy.precision_plugin, strategy.lightning_module
        known = type(plugin).pre_backward.__module__.startswith(_PRECISION_PLUGINS)
        known &= not is_overridden(strategy, "backward")
        if is_last and self._loop.tells_loss:
            loss = _WithValue.apply(loss, total)  # type: ignore[no-untyped-call]  # untyped in torch
        if is_last and exchange is not None:
            strategy.pre_backward(loss)
            loss = plugin.pre_backward(loss, module)
            plugin.backward(loss, module, self._optimizer)
            exchange.finish()
            strategy.post_backward(plugin.post_backward(loss, module))
        elif is_last or not known:  # an unknown plugin or strategy may scale in its own methods: it gets every call
            self._backward_fn(loss)
        else:
            strategy.pre_backward(loss)
            scaler = getattr(plugin, "scaler", None)
            plugin.backward(loss if scaler is None else scaler.scale(loss), module, self._optimizer)
            strategy.post_backward(loss.detach())
        return is_last or not known


class _WithValue(torch.autograd.Function):
    """The loss of a whole batch, with the graph of its last part."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, total: Tensor) -> Tensor:
        return total.to(loss.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class MicrobatchLoop(AutomaticOptimization):  # type: ignore[misc]  # untyped, as it may be missing
    """Lightning's optimization loop, with the closure above in place of its own."""

    def __init__(self, parent: Any, session: Session) -> None:
        super().__init__(parent.trainer)
        self.optim_progress = parent.optim_progress  # `trainer.global_step` is computed from it
        self._skip_backward = parent._skip_backward
        self._replaced, self.session = (parent,), session  # in a tuple: Lightning saves the loops that it finds
        owners = (parent.trainer.lightning_module, *callbacks_of(parent.trainer))
        self.tells_loss = any(has_hook(owner, "on_before_backward") for owner in owners)
        """Whether somebody is told the loss before backward."""
        self.zeroes_itself = is_overridden(parent.trainer.lightning_module, "optimizer_zero_grad")
        """Whether the module decides which gradients of earlier batches stay."""
        self.steps = False
        """Whether the optimizer steps after the batch that runs now, instead of gradients being accumulated."""

    @property
    def parent(self) -> Any:
        """The loop that this one stands in for."""
        return self._replaced[0]

    def _optimizer_step(self, batch_idx: int, closure: Any) -> None:
        self.steps = True
        try:
            super()._optimizer_step(batch_idx, closure)
        except Exception as error:
            joint = self.session.joint
            if self.session.recovery is None or isinstance(error, OutOfMemoryUnrecoverableError):
                raise
            if not is_out_of_memory(error):
                if joint is not None:
                    joint.explain(error)
                raise
            if joint is not None:
                why = "some parameters may have been updated already, so the batch is not run again"
                raise joint.given_up(f"the optimizer's update: {error}", why) from error
            raise OutOfMemoryUnrecoverableError(
                "Memory ran out in the optimizer's update. Some parameters may have been updated already, so the "
                "batch is not run again: resume from the last checkpoint, with `foreach=False` in the optimizer or "
                f'`optimizer_state="8bit"`. The error was: {error}'
            ) from error
        finally:
            self.steps = False

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: torch.optim.Optimizer, batch_idx: int) -> Any:
        return MicrobatchClosure(self, kwargs, optimizer, batch_idx)
