"""What the optimization loop knows across the batches of one run: how to cut, what the loss is, what was recovered."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_memsave.core.errors import MicrobatchWarning, NoEffectWarning, NotLosslessWarning, setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.loops.loss_reduction import Answer, ask
from lightning_memsave.loops.loss_rules import LossRules
from lightning_memsave.loops.recovery import Ladder, Recovery
from lightning_memsave.loops.step_effects import StepEffects, hooks_on_gradients, nothing_added
from lightning_memsave.loops.trainer_features import ways_of_training
from lightning_memsave.planner.recipes import Recipe
from lightning_memsave.techniques.early_zero_grad import EarlyZeroGrad
from lightning_memsave.techniques.microbatching import (
    Microbatching,
    UnsplittableBatchError,
    why_not_exact,
)
from lightning_memsave.techniques.microbatching.reduction import ReductionRule

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
        self.rules = LossRules()
        self.why_whole = ""
        """What of the loss forbids to cut its batches, once one was to be cut."""
        self._summary: str | None = None
        """Microbatch size of what was cut, once something was."""
        self._reasons: list[str] = []
        """Why microbatches change the result."""
        self._given_up = self._warned = self._warned_of_parts = self._has_tried = self._makes_gradients = False
        self._num_whole = self._num_cut = 0

    @property
    def applied(self) -> Applied | None:
        """What microbatching did; `None` until a batch was cut."""
        if self._summary is None:
            return None
        rule = f" (loss: {self.rules.known[0]})" if self.rules.known else ""
        size = f" of at most {self.size} samples" if self.size is not None else ""
        whole = f"; {self._num_whole} batches ran whole" if self._num_whole else ""
        return Applied(
            technique="microbatching",
            summary=f"{self._summary}{size}{rule}{whole}",
            loss_class="changed" if self._reasons else "exact",
            reasons=tuple(self._reasons),
        )

    @property
    def size(self) -> int | None:
        """Samples per microbatch now."""
        return getattr(self.recovery or self.microbatching, "size", None)

    def microbatches(self, trainer: L.Trainer, kwargs: dict[str, Any]) -> list[tuple[Any, float]]:
        """Return the microbatches of `kwargs["batch"]`, each with its number of samples.

        The batch alone where it is whole.
        """
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
        if len(parts) > 1 and not self._knows_rule(trainer, kwargs, config, parts):
            return [(batch, 0)]
        if self.runs_in_parts(parts):
            self._begin(trainer.lightning_module, "batches run")
        return parts

    def weights(self, parts: list[tuple[Any, float]]) -> list[float]:
        """Return what the loss of each microbatch is multiplied by."""
        if len(parts) == 1:
            return [1.0]
        weights = self.rules.weights(parts)
        assert weights is not None, "such a batch is run whole"
        return weights

    def _check_agreed(self, trainer: L.Trainer, num_parts: int) -> None:
        """Refuse different numbers of microbatches where processes wait for each other in every forward.

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
    def _waits(trainer: L.Trainer) -> bool:
        return trainer.world_size > 1 and not _WAITING.isdisjoint(ways_of_training(trainer))

    def runs_in_parts(self, parts: list[tuple[Any, float]]) -> bool:
        """Return whether a batch is not run as without microbatching."""
        return len(parts) > 1 or (self.microbatching is not None and self.microbatching.batchnorm == "running")

    def sized_for(self, batch: Any, recovery: Recovery | None) -> Microbatching:
        """Return the settings, with a number of samples that suits this batch where one has been learned."""
        assert self.microbatching is not None
        size = None if recovery is None else recovery.size_for(batch)
        return self.microbatching if size is None else self.microbatching.of_size(size)

    def can_cut(self, batch: Any) -> bool:
        """Return whether smaller microbatches of this batch are possible, as far as is known."""
        return not self._given_up and self.has_samples(batch)

    def has_samples(self, batch: Any) -> bool:
        """Return whether a batch has more than one sample, and tells which they are."""
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

    def _knows_rule(
        self, trainer: L.Trainer, kwargs: dict[str, Any], config: Microbatching, parts: list[tuple[Any, float]]
    ) -> bool:
        """Return whether it is known how the losses of these parts add up; asks the module where it is time to."""
        rules, batch = self.rules, kwargs["batch"]
        if trainer.current_epoch:
            self.tell_cost()
        waits = self._waits(trainer)
        is_due = rules.is_due(batch, trainer.current_epoch, may_differ=not waits)
        if not is_due and rules.weights(parts) is not None:
            return True

        def asked() -> Answer:
            found = ask(trainer, kwargs, int(sum(n for _, n in parts)), config)
            return trainer.strategy.broadcast(found) if waits else found

        before, answer = rules.known, rules.ask(asked)
        if config.weight_fn is not None or config.reduction != "auto":
            return self._takes_given(answer, config, is_first=not before)
        if before and not answer.has_failed:
            self._compare(before, answer, trainer.fit_loop.batch_idx)
        if answer.why_not and not (answer.has_failed and before):
            self._given_up = True  # no other batch would tell
            self.why_whole = "" if answer.has_failed else answer.why_not
            self._run_whole(f"Batches are not cut into microbatches: {answer.why_not} {_WAYS_OUT}")
            return False
        if rules.known and rules.weights(parts) is not None:
            return True
        self._run_whole(
            "A batch is run whole: its loss is zero, not finite, none, or the same for all samples, which does not say "
            'which kind it is of. `Microbatching(reduction="mean")` or `"sum"` does.'
        )
        return False

    def tell_cost(self) -> None:
        """Say what the questions have cost, where it was much, when the first epoch is over."""
        if (text := self.rules.cost_of_first_epoch()) is not None:
            rank_zero_info(text)

    def _compare(self, before: tuple[ReductionRule, ...], answer: Answer, batch_idx: int) -> None:
        """Compare with the rules by which earlier batches were cut."""
        if answer.why_not:
            self._changes(f"batches before batch {batch_idx} were cut, and in that one {answer.why_not}")
        elif answer.rules and not set(before) & set(answer.rules):
            self._changes(
                f"batches before batch {batch_idx} were cut as those of a loss that is a {before[0]}, and in that one "
                f"it is a {answer.rules[0]}"
            )

    def _takes_given(self, answer: Answer, config: Microbatching, *, is_first: bool) -> bool:
        """Use the rule that the user gave in any case; where the loss has another one, say so."""
        given = ReductionRule("sum" if config.reduction == "sum" else "mean", config.weight_fn)
        self.rules.known = (given,)
        why_not = "" if answer.has_failed else answer.why_not
        if answer.rules and given not in answer.rules:
            why_not = f"it is a {answer.rules[0]}."
        if not why_not:
            return True
        add_up = "add up" if given.reduction == "sum" else "average"
        setting, what = "reduction", ""
        if config.weight_fn is not None:
            setting, what = "weight_fn", ", weighted by `weight_fn`,"
        if is_first:
            warnings.warn(
                f"`Microbatching.{setting}` must say how the losses of microbatches{what} {add_up} to the loss of the "
                f"batch, but in the first one they do not: {why_not} Gradients will differ from those of the whole "
                'batch. `reduction="auto"`, without `weight_fn`, finds the rule where there is one.',
                MicrobatchWarning,
                stacklevel=2,
            )
        self._changes(f"the losses of microbatches{what} do not {add_up} to that of the batch")
        return True

    def used_by_hand(self, module: Any, num_parts: int) -> None:
        """`microbatches(batch)` was called inside `training_step`."""
        if self.microbatching is not None and num_parts > 1:
            self._begin(module, "training_step takes its batches")

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

    def watch(self, module: Any, device: torch.device) -> Callable[[int], AbstractContextManager[None]]:
        """Return what is to be around `training_step` for each part of a batch, by its number.

        Sees what it does besides.

        Looked at are the first two batches that are cut, and later the fourth, the eighth and so on. What a step sets
        once, a cache or the number of the batch, does not change in the second part.
        """
        number = self._num_cut + 1
        looks = not number & (number - 1)

        @contextmanager
        def around(part: int) -> Iterator[None]:
            effects = StepEffects(module, device) if looks and part < 2 else None
            with nothing_added(module) if part and self._makes_gradients else nullcontext():
                yield
            if effects is not None:
                self._note(effects, module, part)

        return around

    def _note(self, effects: StepEffects, module: Any, part: int) -> None:
        self._makes_gradients |= part == 0 and effects.has_made_gradients
        if effects.has_drawn and not any(reason.startswith(_OTHER_MODULES) for reason in self._reasons):
            self._changes(f"{_OTHER_MODULES} training_step (it draws random numbers)")
        if part and (changed := effects.changes()):
            self._changes(f"training_step changes {_listed(changed)} for each microbatch, and not once per batch")
        if hooked := hooks_on_gradients(module):
            self._changes(f"hooks get the gradients of each microbatch, of {_listed(hooked)}")

    def note_losses(self, losses: Sequence[Tensor | None]) -> None:
        """Note what `training_step` has returned for the parts of a batch, all of which have been run."""
        self._num_cut += len(losses) > 1
        if any(loss is None for loss in losses) and any(loss is not None for loss in losses):
            self._changes("training_step returned None for some microbatches, of which others have a loss")

    def _begin(self, module: Any, what: str) -> None:
        """Begin when the first batch is cut."""
        if self._summary is not None:
            return
        if modules := why_not_exact(module):
            self._changes(f"{_OTHER_MODULES} {_listed(modules)}")
        self._summary = f"{what} in parts"  # last: what is refused is asked again where recovery tries again

    def _changes(self, reason: str) -> None:
        """Microbatches do not give what whole batches would.

        Raises:
            ValueError: that is forbidden.
        """
        if reason in self._reasons:
            return
        assert self.microbatching is not None, "a batch is cut"
        if self.microbatching.strict:
            raise setting_error(
                "Microbatching.strict",
                "forbids microbatches for a model whose result they change",
                reason,
                "Put these modules in eval mode, replace BatchNorm by GroupNorm, or drop `strict=True`.",
            )
        self._reasons.append(reason)
        if self.recipe.name == "lossless":
            warnings.warn(
                f"Microbatches change the result of this model: {reason.removeprefix(_OTHER_MODULES).strip()}. "
                "`Microbatching(strict=True)` refuses instead.",
                NotLosslessWarning,
                stacklevel=2,
            )


_WAYS_OUT = (
    "For a mean over something else than samples pass `Microbatching(weight_fn=...)` (`LabelCount()` for labels that "
    "are not -100, `LabelCount(shifted=True)` for causal language models), for samples that belong together "
    '`split_fn=...`; `reduction="mean"` or `"sum"` is taken as said.'
)
_OTHER_MODULES = "microbatches change the result of"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
