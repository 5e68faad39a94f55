"""What the optimization loop knows across the batches of one run: how to cut, what the loss is, what was recovered."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch

from lightning_memsave.core.errors import MicrobatchWarning, NoEffectWarning, NotLosslessWarning, setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.strategies.probe import ProbeResult, infer_module_reduction
from lightning_memsave.strategies.recovery import Ladder, Recovery
from lightning_memsave.strategies.ways import ways_of_training
from lightning_memsave.techniques.early_zero_grad import EarlyZeroGrad
from lightning_memsave.techniques.microbatching import (
    Microbatching,
    UnsplittableBatchError,
    why_not_exact,
)
from lightning_memsave.techniques.microbatching.reduction import Reduction

_WAITING = frozenset(("FSDP", "model parallel (FSDP2)", "SyncBatchNorm"))


class LoopState:
    """What the loop knows across the batches of one run.

    Args:
        recipe: what is switched on.
        ladder: the exact measures against too little memory.
    """

    def __init__(self, recipe: Recipe, ladder: Ladder | None = None) -> None:
        self.recipe = recipe
        self.microbatching = recipe.get(Microbatching)
        self.recovery = self.evaluation = None
        self.keeps_gradients = False
        if self.microbatching is not None and self.microbatching.size == "auto":
            self.recovery = Recovery(self.microbatching, ladder, self.microbatching.start)
            self.keeps_gradients = self.microbatching.keeps_gradients and Microbatching not in recipe.by_default
            self.evaluation = Recovery(self.microbatching)  # has no activations to spare: it only cuts
        self.zero_grad_first = recipe.get(EarlyZeroGrad) is not None
        self.reduction: Reduction | None = None
        self.why_whole = ""
        """What of the loss forbids to cut its batches, once one was to be cut."""
        self._applied: Applied | None = None
        self._has_seen_draws = False
        self._given_up = self._warned = self._warned_of_parts = self._has_tried = False
        self._num_whole = 0

    @property
    def applied(self) -> Applied | None:
        """What microbatching did; `None` until a batch was cut."""
        if self._applied is None:
            return None
        reduction = f" ({self.reduction} loss)" if self.reduction else ""
        size = f" of at most {self.size} samples" if self.size is not None else ""
        summary = f"{self._applied.summary}{size}{reduction}"
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
        whole: list[tuple[Any, float]] = [(batch, 0)]
        if self.microbatching is None:
            return whole
        if not self._has_tried:
            self._has_tried = True
            self.microbatching.try_functions(batch)
        config, parts = self.microbatching, whole
        if not self._given_up:
            try:
                config = self.sized_for(batch, self.recovery)
                parts = config.parts(batch)
            except UnsplittableBatchError as error:
                self._run_whole(f"A batch is run whole: {error}")
        self._check_agreed(trainer, len(parts))
        if parts is whole:
            return whole
        if len(parts) > 1 and self.reduction is None:
            self.reduction = self._find_reduction(trainer, kwargs, config, parts)
            if self.reduction is None:
                return [(batch, 0)]
        if self._applied is None and self.runs_in_parts(parts):
            self._applied = self._describe(trainer.lightning_module, config, "batches run")
        return parts

    def _check_agreed(self, trainer: Any, num_parts: int) -> None:
        """Where processes wait for each other in every forward, they must make as many: else they would wait for ever.

        Raises:
            ValueError: on every process, they do not.
        """
        if not self._waits(trainer):
            return
        counts = torch.tensor([num_parts, -num_parts], device=trainer.strategy.root_device)
        most, least = trainer.strategy.reduce(counts, reduce_op="max").abs().tolist()
        if most != least:
            raise setting_error(
                "microbatch",
                "must cut batches into as many parts in every process, as they wait for each other in each forward",
                f"{num_parts} here, and {least} to {most}",
                "Use batches of one size, or `split_fn`.",
            )

    @staticmethod
    def _waits(trainer: Any) -> bool:
        return trainer.world_size > 1 and not _WAITING.isdisjoint(ways_of_training(trainer))

    def runs_in_parts(self, parts: list[tuple[Any, float]]) -> bool:
        """Whether a batch is not run as without microbatching."""
        return len(parts) > 1 or (self.microbatching is not None and self.microbatching.batchnorm == "running")

    def sized_for(self, batch: Any, recovery: Recovery | None) -> Microbatching:
        """The settings, with a number of samples that suits this batch where one has been learned."""
        assert self.microbatching is not None
        size = None if recovery is None else recovery.size_for(batch)
        return self.microbatching if size is None else self.microbatching.of_size(size)

    def can_cut(self, batch: Any) -> bool:
        """Whether smaller microbatches of this batch are possible, as far as is known."""
        return not self._given_up and self.has_samples(batch)

    def has_samples(self, batch: Any) -> bool:
        """Whether a batch has more than one sample, and tells which they are."""
        try:
            return self.microbatching is not None and self.microbatching.num_samples(batch) > 1
        except UnsplittableBatchError:
            return False

    def warn_of_parts(self) -> None:
        """Evaluation is about to be cut, where nobody can tell a mean from a sum."""
        if not self._warned_of_parts:
            self._warned_of_parts = True
            warnings.warn(
                "Memory ran out in evaluation, so its batches are run in parts. Right are: torchmetrics, logged "
                "tensors and scalars that are means over samples, and outputs with one entry per sample. Sums, counts "
                "and losses between samples are those of the parts. A smaller batch size in the loader avoids this.",
                MicrobatchWarning,
                stacklevel=2,
            )

    @property
    def num_recovered(self) -> int | None:
        """How often memory ran out and the batch was run again; `None` without recovery."""
        if self.recovery is None or self.evaluation is None:
            return None
        return self.recovery.num_recovered + self.evaluation.num_recovered

    def _find_reduction(
        self, trainer: Any, kwargs: dict[str, Any], config: Microbatching, parts: list[tuple[Any, float]]
    ) -> Reduction | None:
        if config.reduction != "auto":
            return config.reduction
        result = infer_module_reduction(trainer, kwargs, int(sum(n for _, n in parts)), config)
        if self._waits(trainer):
            result = trainer.strategy.broadcast(result)
        if config.weight_fn is not None:
            self._check_weights(result)
            return "mean"
        if result.why_not:
            self._given_up = True  # no other batch would tell
            self.why_whole = "" if result.has_failed else result.why_not
            self._run_whole(
                f"Batches are not cut into microbatches: {result.why_not} For a mean over something else than samples "
                "pass `Microbatching(weight_fn=...)`, for samples that belong together `split_fn=...`; if you know "
                'better, `reduction="mean"` or `"sum"`.'
            )
        elif result.reduction is None:
            self._run_whole(
                "A batch is run whole: its loss is zero, not finite or none, which does not tell a mean from a sum. "
                '`Microbatching(reduction="mean")` or `"sum"` does.'
            )
        return result.reduction

    @staticmethod
    def _check_weights(result: ProbeResult) -> None:
        if result.reduction == "mean" or not (result.why_not or result.reduction):
            return
        warnings.warn(
            "`Microbatching.weight_fn` must give weights under which the losses of microbatches average to the loss of "
            f"the batch, but in the first one they do not: {result.why_not or 'the loss is their sum.'} Gradients will "
            'differ from those of the whole batch. `reduction="mean"` takes the weights unseen.',
            MicrobatchWarning,
            stacklevel=2,
        )

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

    @property
    def watches_draws(self) -> bool:
        """Whether nothing tells yet that microbatches change the result."""
        return self._applied is not None and self._applied.loss_class == "exact" and not self._has_seen_draws

    def note_draws(self, has_drawn: bool) -> None:
        """Whether `training_step` has drawn random numbers: each microbatch draws others than the batch would."""
        if has_drawn:
            assert self.microbatching is not None, "a batch has been cut"
            self._applied = self._described(
                ("training_step (it draws random numbers)",), self.microbatching, "batches run"
            )
        self._has_seen_draws = True  # last: what is refused is asked again where recovery tries again

    def _describe(self, module: Any, config: Microbatching, what: str) -> Applied:
        return self._described(why_not_exact(module), config, what)

    def _described(self, modules: tuple[str, ...], config: Microbatching, what: str) -> Applied:
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
