"""The optimization loop: microbatches and early zero-grad, inside the closure that the optimizer calls.

Lightning's closure is training_step, zero_grad, backward. This one runs training_step and backward for each microbatch,
zeroes gradients once, and hands on one loss, one set of logs and one output for the batch. It sits in the closure, not
in `Strategy.training_step`, because only there do the loss that LBFGS reads, the step's logs and the hooks come out
right.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.core.errors import MicrobatchWarning, NoEffectWarning, NotLosslessWarning, setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.strategies.batch_start import BatchStart
from lightning_memsave.strategies.logs import DeferredLogs
from lightning_memsave.strategies.metrics import MergedMetrics
from lightning_memsave.strategies.namespaces import internals
from lightning_memsave.strategies.outputs import detached, merge_outputs
from lightning_memsave.strategies.probe import infer_module_reduction
from lightning_memsave.strategies.recovery import OutOfMeasuresError, Recovery, is_out_of_memory
from lightning_memsave.techniques.early_zero_grad import EarlyZeroGrad
from lightning_memsave.techniques.microbatching import (
    Microbatching,
    UnsplittableBatchError,
    batch_size,
    why_not_exact,
)
from lightning_memsave.techniques.microbatching.reduction import Reduction


class LoopState:
    """What the loop knows across the batches of one run.

    Args:
        recipe: what is switched on.
        climb: takes the next exact measure against too little memory, see `Recovery`.
    """

    def __init__(self, recipe: Recipe, climb: Callable[[Any], str | None] = lambda trainer: None) -> None:
        self.recipe = recipe
        self.microbatching = recipe.get(Microbatching)
        is_auto = self.microbatching is not None and self.microbatching.size == "auto"
        self.recovery = Recovery(climb) if is_auto else None
        self.zero_grad_first = recipe.get(EarlyZeroGrad) is not None
        self.reduction: Reduction | None = None
        self._applied: Applied | None = None
        self._given_up = self._warned = False
        self._num_whole = 0

    @property
    def applied(self) -> Applied | None:
        """What microbatching did; `None` until a batch was cut."""
        if self._applied is None:
            return None
        reduction = f" ({self.reduction} loss)" if self.reduction else ""
        summary = f"{self._applied.summary} of at most {self.size} samples{reduction}"
        if self._num_whole:
            summary += f"; {self._num_whole} batches ran whole"
        return dataclasses.replace(self._applied, summary=summary)

    @property
    def size(self) -> int | None:
        """Samples per microbatch now."""
        if self.recovery is not None:
            return self.recovery.size
        return self.microbatching.size if self.microbatching is not None else None  # type: ignore[return-value]

    def microbatches(self, trainer: Any, kwargs: dict[str, Any]) -> list[tuple[Any, float]]:
        """The microbatches of `kwargs["batch"]`; only the batch itself when it cannot or need not be cut."""
        batch = kwargs.get("batch")
        if self.microbatching is None or self._given_up:
            return [(batch, 0)]
        try:
            config = self.sized_for(batch)
            parts = config.parts(batch)
        except UnsplittableBatchError as error:
            self._run_whole(f"A batch is run whole: {error}")
            return [(batch, 0)]
        if len(parts) == 1:
            return parts
        if self.reduction is None:
            self.reduction = self._find_reduction(trainer, kwargs, config, parts)
            if self.reduction is None:
                return [(batch, 0)]
            self._applied = self._describe(trainer.lightning_module, config, "batches run")
        return parts

    def sized_for(self, batch: Any) -> Microbatching:
        """The settings, with a number of samples that suits this batch where one has been learned."""
        assert self.microbatching is not None
        size = None if self.recovery is None else self.recovery.size_for(batch)
        return self.microbatching if size is None else dataclasses.replace(self.microbatching, size=size)

    def can_cut(self, batch: Any) -> bool:
        """Whether smaller microbatches of this batch are possible, as far as is known."""
        try:
            return not self._given_up and batch_size(batch) > 1
        except UnsplittableBatchError:
            return False

    def _find_reduction(
        self, trainer: Any, kwargs: dict[str, Any], config: Microbatching, parts: list[tuple[Any, float]]
    ) -> Reduction | None:
        if config.reduction != "auto":
            return config.reduction
        if config.weight_fn is not None:
            return "mean"
        result = infer_module_reduction(trainer, kwargs, int(sum(n for _, n in parts)), config)
        if result.why_not:
            self._given_up = True  # no other batch would tell
            self._run_whole(
                f"Batches are not cut into microbatches: {result.why_not} For a mean over something else than samples "
                "pass `Microbatching(weight_fn=...)`, for samples that belong together `split_fn=...`; if you know "
                'better, `reduction="mean"` or `"sum"`.'
            )
        elif result.reduction is None:
            self._run_whole(
                "A batch is run whole: its loss is zero, which does not tell a mean from a sum. "
                '`Microbatching(reduction="mean")` or `"sum"` does.'
            )
        return result.reduction

    def used_by_hand(self, module: Any, num_parts: int) -> None:
        """`microbatches(batch)` was called inside `training_step`."""
        if self.microbatching is not None and num_parts > 1 and self._applied is None:
            self._applied = self._describe(module, self.microbatching, "training_step takes its batches")

    def warn_if_unused(self, module: Any) -> None:
        """Manual optimization cuts its batches itself; say so when it did not."""
        is_refused = self.recovery is not None
        if self.microbatching is None or is_refused or self.applied is not None:
            return
        if not module.automatic_optimization:
            warnings.warn(
                "microbatch had no effect: with manual optimization, iterate `for part, weight in "
                "lightning_memsave.microbatches(batch)` inside `training_step`.",
                NoEffectWarning,
                stacklevel=2,
            )

    def _run_whole(self, warning: str) -> None:
        self._num_whole += 1
        if not self._warned:
            self._warned = True
            warnings.warn(warning, MicrobatchWarning, stacklevel=2)

    def _describe(self, module: Any, config: Microbatching, what: str) -> Applied:
        modules = why_not_exact(module)
        named = ", ".join(modules[:5]) + (f" and {len(modules) - 5} more" if len(modules) > 5 else "")
        if modules and config.strict:
            raise setting_error(
                "Microbatching.strict",
                "forbids microbatches for a model whose result they change",
                named,
                "Put these modules in eval mode, replace BatchNorm by GroupNorm, or drop `strict=True`.",
            )
        if modules and self.recipe.name == "lossless":
            warnings.warn(
                f"Microbatches change the result of this model: {named}. `Microbatching(strict=True)` refuses instead.",
                NotLosslessWarning,
                stacklevel=2,
            )
        return Applied(
            technique="microbatching",
            summary=f"{what} in parts",
            loss_class="changed" if modules else "exact",
            reasons=(f"microbatches change the result of {named}",) if modules else (),
        )


@functools.cache
def loop_class(namespace: str) -> Any:  # noqa: C901  # two classes, counted as one function
    """The optimization loop for one Lightning namespace; the bases exist once in each."""
    pl = internals(namespace)

    class MicrobatchClosure(pl.Closure):  # type: ignore[misc, name-defined]  # a base known at run time
        def __init__(self, loop: Any, kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> None:
            super().__init__(
                step_fn=loop._make_step_fn(kwargs),
                backward_fn=loop._make_backward_fn(optimizer),
                zero_grad_fn=loop._make_zero_grad_fn(batch_idx, optimizer),
            )
            self._loop, self._kwargs, self._optimizer = loop, kwargs, optimizer
            self._zero_grad_fn: Callable[[], None] | None

        @torch.enable_grad()
        def closure(self, *args: Any, **kwargs: Any) -> Any:
            state: LoopState = self._loop.state
            zero_grad = self._zero_grad_fn
            try:
                if state.recovery is not None:
                    return self._run_until_it_fits(state, state.recovery)
                parts = state.microbatches(self._loop.trainer, self._kwargs)
                self._zero_first(state)
                return super().closure(*args, **kwargs) if len(parts) == 1 else self._run(parts, state)
            finally:
                self._zero_grad_fn = zero_grad  # LBFGS calls again

        def _zero_first(self, state: LoopState) -> None:
            if state.zero_grad_first and self._zero_grad_fn is not None:
                self._zero_grad_fn()
                self._zero_grad_fn = self._zero_gradients_made_since

        def _run_until_it_fits(self, state: LoopState, recovery: Recovery) -> Any:
            trainer, batch = self._loop.trainer, self._kwargs["batch"]
            accumulates = self._zero_grad_fn is None
            self._zero_first(state)
            while True:
                start = BatchStart(trainer.lightning_module, recovery.changing, accumulates)
                try:
                    result = self._run(state.microbatches(trainer, self._kwargs), state)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    reason = str(error)  # the error itself holds the tensors of the frames that it came through
                else:
                    recovery.changing = start.changed_buffers() if recovery.changing is None else recovery.changing
                    return result
                start.restore()
                if not accumulates:
                    self._zero_grad_fn = self._zero_gradients_made_since
                recovery.do_with_less(trainer, batch, state.can_cut(batch), reason)

        def _zero_gradients_made_since(self) -> None:
            """A `training_step` may call backward itself; Lightning drops what that leaves behind."""
            if any(p.grad is not None for group in self._optimizer.param_groups for p in group["params"]):
                self._optimizer.zero_grad()

        def _run(self, parts: list[tuple[Any, float]], state: LoopState) -> Any:
            trainer = self._loop.trainer
            config, reduction = state.microbatching, state.reduction
            assert config is not None
            weights = config.weights(parts, reduction or "mean")
            losses: list[Tensor | None] = []  # as training_step returned them
            outputs: list[dict[str, Any]] = []
            sizes: list[float] = []
            total: Tensor | None = None
            results, log = trainer._results, pl.ResultCollection.log
            with DeferredLogs(results, log) as logs, MergedMetrics(trainer.lightning_module):
                for i, ((part, num_samples), weight) in enumerate(zip(parts, weights, strict=True)):
                    is_last = i == len(parts) - 1
                    logs.begin(part, num_samples)
                    with pl.block_sync(trainer.strategy, block=not is_last):
                        out = self._loop._training_step(OrderedDict(self._kwargs, batch=part))
                        if i == 0 and self._zero_grad_fn is not None:
                            self._zero_grad_fn()
                        losses.append(None if out.loss is None else out.loss * trainer.accumulate_grad_batches)
                        if out.closure_loss is None:
                            continue
                        loss = out.closure_loss * weight
                        total = loss.detach().clone() if total is None else total + loss.detach()
                        outputs.append(detached(out.extra))
                        sizes.append(num_samples)
                        if self._backward_fn is not None:
                            self._backward(loss, is_last)
                        del out, loss  # the next microbatch must not meet this one's graph
            logs.flush(self._kwargs["batch"], losses, reduction or "mean")
            if total is None:
                self.warning_cache.warn("`training_step` returned `None` for every microbatch; the step is skipped.")
                return pl.ClosureResult(None)
            return pl.ClosureResult(total, extra=merge_outputs(outputs, sizes))

        def _backward(self, loss: Tensor, is_last: bool) -> None:
            """`on_before_backward` and `on_after_backward` belong to the batch: they fire for the last microbatch."""
            strategy = self._loop.trainer.strategy
            plugin = strategy.precision_plugin
            known = type(plugin).pre_backward.__module__.startswith(f"{namespace}.plugins.precision")
            if is_last or not known:  # an unknown plugin may scale in its own `pre_backward`: it gets every call
                self._backward_fn(loss)
                return
            strategy.pre_backward(loss)
            scaler = getattr(plugin, "scaler", None)
            plugin.backward(loss if scaler is None else scaler.scale(loss), strategy.lightning_module, self._optimizer)
            strategy.post_backward(loss.detach())

    class MicrobatchLoop(pl.AutomaticOptimization):  # type: ignore[misc, name-defined]  # a base known at run time
        def __init__(self, parent: Any, state: LoopState) -> None:
            super().__init__(parent.trainer)
            self.optim_progress = parent.optim_progress  # `trainer.global_step` is computed from it
            self._skip_backward = parent._skip_backward
            self._replaced, self.state = (parent,), state  # in a tuple: Lightning saves the loops that it finds

        @property
        def parent(self) -> Any:
            """The loop that this one stands in for."""
            return self._replaced[0]

        def _optimizer_step(self, batch_idx: int, closure: Any) -> None:
            try:
                super()._optimizer_step(batch_idx, closure)
            except Exception as error:
                if self.state.recovery is None or isinstance(error, OutOfMeasuresError) or not is_out_of_memory(error):
                    raise
                raise OutOfMeasuresError(
                    "Memory ran out in the optimizer's update. Parameters may be half new, so the batch is not run "
                    "again: resume from the last checkpoint, with `foreach=False` in the optimizer or "
                    f'`optimizer_state="8bit"`. The error was: {error}'
                ) from error

        def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Any:
            return MicrobatchClosure(self, kwargs, optimizer, batch_idx)

    return MicrobatchLoop
