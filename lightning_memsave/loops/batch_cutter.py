"""How batches are cut into microbatches in one run: into which parts, and with which weights their losses add up."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.parallel import DistributedDataParallel

from lightning_memsave.core.errors import MicrobatchWarning, NoEffectWarning, add_note, setting_error
from lightning_memsave.core.report import Applied
from lightning_memsave.lightning_compat import Batch, session_of
from lightning_memsave.loops.late_reduction import num_collectives
from lightning_memsave.loops.loss_reduction import EXCHANGES, Answer, ask
from lightning_memsave.loops.loss_rules import LossRules
from lightning_memsave.loops.microbatch_record import MicrobatchRecord
from lightning_memsave.loops.out_of_memory import is_out_of_memory
from lightning_memsave.loops.recovery import RecoveryPolicy
from lightning_memsave.loops.trainer_features import ways_of_training
from lightning_memsave.techniques.microbatching import Microbatching, UnsplittableBatchError
from lightning_memsave.techniques.microbatching.reduction import ReductionRule

_WAITING = frozenset(("FSDP", "model parallel (FSDP2)", "SyncBatchNorm"))


class BatchCutter:
    """Cuts the batches of one run, as far as their loss allows.

    Args:
        config: of the microbatches; `None` leaves every batch whole.
        recovery: knows the size where it is "auto".
        warns: whether microbatches that change the result are worth a warning.
    """

    def __init__(self, config: Microbatching | None, recovery: RecoveryPolicy | None = None, *, warns: bool) -> None:
        self.config, self.recovery = config, recovery
        self.record = MicrobatchRecord(config, warns=warns)
        self.rules = LossRules()
        self.why_whole = ""
        """Why batches are not cut; empty until that is known."""
        self._given_up = self._has_tried = self._is_undecided = self._stays_whole = False
        self._failed: tuple[int, int] | None = None  # epoch and number of the latest batch of which a part has failed

    @property
    def applied(self) -> Applied | None:
        """What microbatching did; `None` until a batch was cut."""
        return self.record.applied(self.size, str(self.rules.known[0]) if self.rules.known else None)

    @property
    def size(self) -> int | None:
        """Samples per microbatch now."""
        return getattr(self.recovery or self.config, "size", None)

    def microbatches(self, trainer: L.Trainer, kwargs: dict[str, Any]) -> list[tuple[Any, float]]:
        """Return the microbatches of `kwargs["batch"]`, each with its number of samples.

        The batch alone where it is whole.
        """
        batch = kwargs.get("batch")
        whole: list[tuple[Any, float]] = [(batch, 0)]
        if self.config is None:
            return whole
        if not self._has_tried:
            self._has_tried = True
            self.config.try_functions(batch)
            if self.recovery is not None:
                self.recovery.begin(trainer.lightning_module)
        config, parts = self.config, whole
        if not self._given_up and not self._stays_whole:
            try:
                config = self.sized_for(batch, self.recovery)
                parts, self.why_whole = config.parts(batch), ""
            except UnsplittableBatchError as error:
                self.why_whole = str(error)
                self.record.ran_whole(f"A batch is run whole: {error}")
        if self.recovery is None or self.recovery.size is not None:  # else it is whole in all processes
            self._check_agreed(trainer, len(parts))
        self._is_undecided = False
        if parts is whole:
            return whole
        if len(parts) > 1 and not self._knows_rule(trainer, kwargs, config, parts):
            self._is_undecided = True
            return [(batch, 0)]
        if self.runs_in_parts(parts):
            self.record.begin(trainer.lightning_module, "batches run")
        return parts

    def weights(self, parts: list[tuple[Any, float]]) -> list[float]:
        """Return what the loss of each microbatch is multiplied by."""
        if len(parts) == 1:
            return [1.0]
        weights = self.rules.weights(parts)
        assert weights is not None, "such a batch is run whole"
        return weights

    def _check_agreed(self, trainer: L.Trainer, num_parts: int) -> None:
        """Refuse different numbers of microbatches where processes wait for each other inside of a batch.

        Raises:
            ValueError: they differ; on every process.
        """
        if not self._waits(trainer):
            return
        counts = torch.tensor([num_parts, -num_parts], device=trainer.strategy.root_device)
        most, least = trainer.strategy.reduce(counts, reduce_op="max").abs().tolist()
        if most != least:
            raise setting_error(
                "microbatch",
                "must cut batches into as many parts in every process, as they wait for each other in each part",
                f"{num_parts} here, and {least} to {most}",
                "Use batches of one size, or `split_fn`.",
            )

    def _in_any_process(self, trainer: L.Trainer, flag: bool) -> bool:
        """Return `flag`; where processes wait for each other inside of a batch, whether it is true in any of them."""
        if not self._waits(trainer):
            return flag
        found = torch.tensor(int(flag), device=trainer.strategy.root_device)
        return bool(trainer.strategy.reduce(found, reduce_op="max"))

    @staticmethod
    def _waits(trainer: L.Trainer) -> bool:
        if trainer.world_size == 1:
            return False
        release = session_of(trainer).release
        return (release is not None and release.is_exchanged) or not _WAITING.isdisjoint(ways_of_training(trainer))

    def runs_in_parts(self, parts: list[tuple[Any, float]]) -> bool:
        """Return whether microbatching changes how a batch is run: it is cut, or BatchNorm is set to "running"."""
        return len(parts) > 1 or (self.config is not None and self.config.batchnorm == "running")

    def sized_for(self, batch: Batch, recovery: RecoveryPolicy | None) -> Microbatching:
        """Return the settings, with a number of samples that suits this batch where one has been learned."""
        assert self.config is not None
        size = None if recovery is None else recovery.size_for(batch)
        return self.config if size is None else self.config.of_size(size)

    def can_cut(self, batch: Batch) -> bool:
        """Return whether smaller microbatches of this batch are possible, as far as is known."""
        is_possible = not self._given_up and not self._stays_whole and not self._is_undecided
        return is_possible and self.has_samples(batch)

    def leave_whole(self, error: Exception, epoch: int, batch_idx: int) -> bool:
        """Run batches whole, as a part of one failed; `False` for an error that has nothing to do with it.

        Sequences that are padded to the longest of their batch may not fit together in a part without that one.
        """
        if not isinstance(error, _OF_SHAPES) or self._failed == (epoch, batch_idx):
            return False
        self._failed, self._stays_whole = (epoch, batch_idx), True
        self.why_whole = f"the step fails on a part of batch {batch_idx}: {type(error).__name__}: {error}"
        self.record.ran_whole(f"Batches are run whole as long as they fit: {self.why_whole.rstrip('.')}. {_SPLIT}")
        return True

    def cut_again(self, epoch: int, batch_idx: int) -> bool:
        """Cut batches again, as one does not fit whole; `False` where they are cut, or this one cannot be."""
        if not self._stays_whole or self._failed == (epoch, batch_idx):
            return False
        self._stays_whole, self.why_whole = False, ""
        return True

    def counts_exchanges(self, trainer: L.Trainer) -> bool:
        """Return whether the model is DDP's, and no layer exchanges anything in the forward pass."""
        return isinstance(trainer.strategy.model, DistributedDataParallel) and not self._waits(trainer)

    @contextlib.contextmanager
    def noting_exchange(self, counts: bool) -> Iterator[None]:
        """Leave batches whole from now on where a part exchanges something inside, as the step did not when asked.

        Args:
            counts: whether to look: not in the first part, in whose forward pass DDP may exchange something itself
                (buffers, the order of buckets).
        """
        before = num_collectives()
        yield
        if not counts or num_collectives() == before or self._given_up:
            return
        self._given_up, self.why_whole = True, EXCHANGES
        self.record.changes("training_step exchanges something for each microbatch of some batches")
        self.record.ran_whole(f"Batches are not cut into microbatches any more: {EXCHANGES} {_BY_TILES}")

    def has_samples(self, batch: Batch) -> bool:
        """Return whether a batch has more than one sample, and tells which they are."""
        try:
            return self.config is not None and self.config.num_samples(batch) > 1
        except UnsplittableBatchError:
            return False

    def _knows_rule(
        self, trainer: L.Trainer, kwargs: dict[str, Any], config: Microbatching, parts: list[tuple[Any, float]]
    ) -> bool:
        """Return whether it is known how the losses of these parts add up; asks the module where it is time to."""
        rules, batch = self.rules, kwargs["batch"]
        if trainer.current_epoch:
            self.tell_cost()
        is_due = rules.is_due(batch, trainer.current_epoch) or rules.weights(parts) is None
        if not self._in_any_process(trainer, is_due):
            return True

        def asked() -> Answer:
            agreed = (trainer.strategy.broadcast,) if self._waits(trainer) else ()
            return ask(trainer, kwargs, int(sum(n for _, n in parts)), config, *agreed)

        before, answer = rules.known, rules.ask(asked)
        is_given = config.weight_fn is not None or config.reduction != "auto"
        if is_given and (not answer.is_exchanged or self._waits(trainer)):  # who waits cuts as the others do
            return self._takes_given(answer, config, is_first=not before)
        if before and not answer.has_failed:
            self._compare(before, answer, f"batch {trainer.fit_loop.batch_idx} of epoch {trainer.current_epoch}")
        if answer.is_of_this_batch:
            self.record.ran_whole(f"A batch is run whole: {answer.why_not} {_WAYS_OUT}")
            return False
        if answer.why_not and not (answer.has_failed and before):
            self._given_up = True  # no other batch would tell
            self.why_whole = "" if answer.has_failed else answer.why_not
            ways_out = _BY_TILES if answer.is_exchanged else _WAYS_OUT
            self.record.ran_whole(f"Batches are not cut into microbatches: {answer.why_not} {ways_out}")
            return False
        if not self._in_any_process(trainer, rules.weights(parts) is None):
            return True
        means = [rule for rule in rules.known if rule.reduction == "mean"]
        why = "its loss is zero, not finite, none, or the same for all samples, which does not show how the losses of "
        why += "microbatches add up"
        if len(means) > 1:
            why = f"its loss is a {means[0]} or a {means[-1]}, and these weigh its parts differently"
        self.record.ran_whole(
            f'A batch is run whole: {why}. Set `Microbatching(reduction="mean")`, `"sum"`, or `weight_fn`.'
        )
        return False

    def tell_cost(self) -> None:
        """Say what the questions have cost, where it was much, when the first epoch is over."""
        if (text := self.rules.cost_of_first_epoch()) is not None:
            rank_zero_info(text)

    def _compare(self, before: tuple[ReductionRule, ...], answer: Answer, where: str) -> None:
        """Compare with the rules by which earlier batches were cut."""
        if answer.why_not:
            self.record.changes(f"batches before {where} were cut, and in that one {answer.why_not}")
        elif answer.rules and not set(before) & set(answer.rules):
            self.record.changes(
                f"batches before {where} were cut as those of a loss that is a {before[0]}, and in that one "
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
        self.record.changes(f"the losses of microbatches{what} do not {add_up} to that of the batch")
        return True

    def used_by_hand(self, module: L.LightningModule, num_parts: int) -> None:
        """Note that `microbatches(batch)` was called inside `training_step`."""
        if self.config is not None and num_parts > 1:
            self.record.begin(module, "training_step takes its batches")

    def warn_if_unused(self, module: L.LightningModule) -> None:
        """Warn where a module with manual optimization, which cuts its batches itself, has not done so."""
        is_refused = self.recovery is not None
        has_no_effect = self.config is not None and not is_refused and self.applied is None
        if has_no_effect and not module.automatic_optimization:
            warnings.warn(
                "microbatch had no effect: with manual optimization, iterate `for part, weight in "
                "lightning_memsave.microbatches(batch)` inside `training_step`.",
                NoEffectWarning,
                stacklevel=2,
            )


@contextlib.contextmanager
def noting_parts(num_parts: int) -> Iterator[None]:
    """Add to an error that the batch was cut, which the step may not bear."""
    try:
        yield
    except Exception as error:
        if num_parts > 1 and not is_out_of_memory(error):
            whole = "`microbatch=False` runs batches whole."
            add_note(error, f"memsave: the batch was run in {num_parts} microbatches. {_SPLIT} {whole}")
        raise


_OF_SHAPES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
"""Errors of steps whose tensors do not fit together."""
_SPLIT = "Where parts need more than a slice of each tensor, pass `Microbatching(split_fn=...)`."
_BY_TILES = 'Where it relates samples, `tiling="samples"` runs encoders in parts and gives the loss all of them.'
_WAYS_OUT = (
    f"{_BY_TILES} "
    "For a mean over something else than samples pass `Microbatching(weight_fn=...)` (`LabelCount()` for labels that "
    "are not -100, `LabelCount(shifted=True)` for causal language models), for samples that belong together "
    '`split_fn=...`; `reduction="mean"` or `"sum"` is taken as said.'
)
