"""Recovery: a batch that ran out of memory is put back to its start and run again with less, in the same step.

What a failed try may have changed is kept before each batch (`batch_snapshot`): the generators of Python, numpy and
torch, the buffers that a step changes, plain attributes of the LightningModule, gradients when they accumulate. Metrics
and logs are taken back by the loop. Then the next measure is taken: exact ones first, then microbatches of half the
size. A batch that is run again has the same bits as one that had this setting from the start.

Later, microbatches grow back: after `growth_interval` batches that went well the size is doubled; when that fails, the
size before is taken and the interval doubled, so that failures become rare.

Not recovered: the optimizer's own update, as parameters may be half new. Where processes wait for each other inside of
a batch, they take each measure together (`joint_recovery`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning_utilities.core import rank_zero
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_memsave.core.units import counted, format_bytes, parse_bytes
from lightning_memsave.lightning_compat import Batch
from lightning_memsave.loops.batch_snapshot import BatchStart
from lightning_memsave.loops.fallbacks import Fallbacks
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError, is_out_of_memory
from lightning_memsave.measuring.allocator import free_memory, hold_addresses_back, read_peak, total_bytes
from lightning_memsave.measuring.ledger import Measurement
from lightning_memsave.measuring.meter import stop_measuring
from lightning_memsave.measuring.storages import tensors_in
from lightning_memsave.saved_tensors.seeds import NoiseSeeds
from lightning_memsave.techniques.microbatching import Microbatching, UnsplittableBatchError


class RecoveryPolicy:
    """What has been done about memory so far, and what is done next.

    Args:
        config: `growth_interval`, `headroom_fraction`, `max_bytes`.
        fallbacks: what can be done besides smaller microbatches.
        start: samples per microbatch of the first batch; `None`: all of them.
        keeps_gradients: whether gradients of earlier batches are copied before a batch that adds to them.
    """

    def __init__(
        self,
        config: Microbatching,
        fallbacks: Fallbacks | None = None,
        *,
        start: int | None = None,
        keeps_gradients: bool = False,
    ) -> None:
        self._config, self._fallbacks, self._start = config, fallbacks, start
        self.keeps_gradients = keeps_gradients
        self._max_bytes = None if config.max_bytes is None else parse_bytes("Microbatching.max_bytes", config.max_bytes)
        self._headroom_fraction = config.headroom_fraction
        self.interval = config.growth_interval
        """Batches that must go well before the size is doubled; `None`: it stays."""
        self.limit_elements: float | None = None
        """Elements of input that a microbatch may have: fewer samples where they are long; `None`: whole batches."""
        self.size: int | None = None
        """Samples per microbatch of the latest batch; `None`: it was whole."""
        self.num_recovered = 0
        self.changing: set[str] | None = None
        self.reads: set[str] | None = None
        """Names of parameters that a step edits through `.data`; `None` until a batch went well."""
        self.objects: set[str] = set()
        """Objects that a step changes, as `BatchStart` names them; none until a batch went well."""
        self.has_new_regions = False
        """Whether no batch has gone well since a measure was taken that may be regions."""
        self._is_settled = False
        self._num_good = 0
        self._limit_before_growth: float | None = None
        self._latest: Measurement | None = None
        self._agree: Callable[[bool], bool] | None = None
        self._speaks, self._counts_samples = True, False
        hold_addresses_back()

    def decide_jointly(self, agree: Callable[[bool], bool], *, speaks: bool) -> None:
        """Decide as all other processes do, which must cut their batches into as many parts: sizes then count samples.

        Args:
            agree: whether something that only this process knows is true in all of them.
            speaks: whether this one prints what all of them do.
        """
        self._agree, self._speaks = agree, speaks

    def begin(self, module: nn.Module) -> None:
        """Choose the first size of the smallest microbatches."""
        if self._config.goal == "smallest" and self._start is None:
            self._start = smallest_size(module)

    def size_for(self, batch: Batch) -> int | None:
        """Return samples per microbatch of this batch; `None` for all of them."""
        if self._counts_samples != (self._agree is not None):  # what an earlier run learned is of the other kind
            self.limit_elements, self._counts_samples = None, not self._counts_samples
        if self._start is not None and self.limit_elements is None:
            self.limit_elements = self._start * self._elements_per_sample(batch)
        if self.limit_elements is not None:
            self.size = max(1, int(self.limit_elements / self._elements_per_sample(batch) + 1e-9))
        return self.size

    def start_of(
        self, module: L.LightningModule, batch: Batch, accumulates: bool, noise: NoiseSeeds | None = None
    ) -> BatchStart:
        """Keep what a batch starts with, as `BatchStart`; tried again once where memory runs out.

        Args:
            module: the LightningModule.
            batch: that is about to be run.
            accumulates: whether gradients of earlier batches are there.
            noise: of codes.

        Raises:
            OutOfMemoryUnrecoverableError: there is no room for it.
        """
        gradients = "made" if not accumulates else "added to" if self.keeps_gradients else "watched"
        keep = functools.partial(
            BatchStart, module, self.changing, gradients, batch, noise, reads=self.reads, objects=self.objects
        )
        try:
            return keep()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_memory()
        try:
            return keep()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise OutOfMemoryUnrecoverableError(
                "Memory ran out before a batch was begun, where a copy of what it changes (buffers, gradients of "
                "earlier batches) is kept to run it again. Nothing has been changed. Use smaller batches, or "
                f"`microbatch=False`. The error was: {error}"
            ) from error

    def learn_changing(self, start: BatchStart) -> None:
        """Learn what a step changes, from the first batch that went well; later ones add to that."""
        self.objects |= start.changed_objects()
        self.reads = start.hidden_edits() | (self.reads or set())
        if self.changing is None:
            self.changing = start.changed_buffers()
        else:
            self.changing |= start.moved_buffers()

    def state_dict(self) -> dict[str, Any]:
        """Return sizes, as plain values for a checkpoint."""
        flags = {"is_settled": self._is_settled, "counts_samples": self._counts_samples}
        learned = {"limit_elements": self.limit_elements, "interval": self.interval}
        return learned | {name: True for name, flag in flags.items() if flag}

    def load_state_dict(self, learned: dict[str, Any]) -> None:
        """Go on with the sizes of an earlier run."""
        self.limit_elements, self.interval = learned["limit_elements"], learned["interval"]
        self._is_settled = learned.get("is_settled", False)
        self._counts_samples = learned.get("counts_samples", False)

    def shrink(self, trainer: L.Trainer, batch: Batch, can_cut: bool, what: str) -> bool:
        """Take the next measure; `batch` is then run again. `False` if there is none.

        Args:
            trainer: Lightning's.
            batch: that failed.
            can_cut: whether it can be cut into smaller microbatches.
            what: names the batch, for people.
        """
        taken = self._without_smaller_parts(trainer, batch)
        if taken is None:
            taken = self._halve(batch) if can_cut else self._cut_modules(trainer, batch)
        if taken is None and self._fallbacks is not None:
            with contextlib.suppress(ValueError):  # the way of training does not allow it
                taken = self._fallbacks.take_position_tiles(trainer)
                self.has_new_regions |= taken is not None
        if taken is None and not can_cut:
            taken = self._cut_modules(trainer, batch, "ghost")
        if taken is None:
            return False
        self.num_recovered += 1
        self._say(f"out of memory in {what}; run again with {taken}.")
        return True

    def leave_ledger(self, what: str) -> bool:
        """Stop measuring the step, which takes memory itself, to run it again; `False` if it was not measured."""
        if not stop_measuring():
            return False
        self.left_ledger(what)
        return True

    def left_ledger(self, what: str) -> None:
        """Count a batch that is run again without being measured."""
        self.num_recovered += 1
        self._say(f"out of memory in {what}, which was being measured; run again without that.")

    def withdraw(self, trainer: L.Trainer) -> bool:
        """Undo regions that were taken and that the model refuses; `False` if they were not taken here."""
        if self._fallbacks is None or not self._fallbacks.withdraw(trainer):
            return False
        self.has_new_regions = False
        self._say("the model cannot be run that way; run again without.")
        return True

    def _without_smaller_parts(self, trainer: L.Trainer, batch: Batch) -> str | None:
        """Go back to the size before the last growth, or take the next fallback; return what was done."""
        taken = self._back_to_what_fitted(batch)
        if taken is None and self._fallbacks is not None:
            taken = self._fallbacks.take_next(trainer)
            self.has_new_regions |= taken is not None
        return taken

    def _cut_modules(self, trainer: L.Trainer, batch: Batch, batchnorm: Literal["ghost"] | None = None) -> str | None:
        """Run modules on a few samples at a time, where that is possible for a batch that stays whole."""
        if self._fallbacks is None:
            return None
        with contextlib.suppress(ValueError):  # it has no samples, or the way of training does not allow it
            taken = self._fallbacks.take_tiles(trainer, self._config.num_samples(batch), batchnorm)
            self.has_new_regions |= taken is not None
            return taken
        return None

    def _back_to_what_fitted(self, batch: Batch) -> str | None:
        self._num_good = 0
        if self._limit_before_growth is None:
            return None
        self.limit_elements, self._limit_before_growth = self._limit_before_growth, None
        assert self.interval is not None, "what has grown has an interval"
        self.interval *= 2
        return _sizes(self.size_for(batch))

    def _halve(self, batch: Batch) -> str | None:
        num_samples = self._config.num_samples(batch)
        size = min(self.size_for(batch) or num_samples, num_samples)
        if size <= 1:
            return None
        num_parts = 2 * -(-num_samples // size)
        smaller = max(1, min(size - 1, -(-num_samples // num_parts)))
        self.limit_elements = smaller * self._elements_per_sample(batch)
        return _sizes(self.size_for(batch))

    def _elements_per_sample(self, batch: Batch) -> float:
        if self._counts_samples:
            return 1.0
        num_elements = sum(tensor.numel() for tensor in tensors_in(batch))
        return max(1.0, num_elements / max(1, self._config.num_samples(batch)))

    def succeed(self, batch: Batch, num_parts: int, device: torch.device, held_bytes: int | None) -> None:
        """Count a batch that went well: after many of them, larger microbatches are tried.

        Args:
            batch: it.
            num_parts: microbatches that it was cut into.
            device: that it was trained on.
            held_bytes: what was allocated there before it; `None` where that is not known.
        """
        self.has_new_regions = False
        if self.interval is None or num_parts == 1 or self.limit_elements is None:
            return
        self._num_good += 1
        if self._num_good < self.interval:
            return
        self._num_good, self._limit_before_growth = 0, None
        has_room = self._has_room(device, held_bytes)
        if has_room if self._agree is None else self._agree(has_room):
            self._limit_before_growth = self.limit_elements
            self.limit_elements *= 2
            self._say(f"{self.interval} batches went well; trying {_sizes(self.size_for(batch))}.")

    def _has_room(self, device: torch.device, held_bytes: int | None) -> bool:
        """Return whether twice of what a step added to the bytes before it would fit.

        Where nothing tells, it is tried.
        """
        peak, total = read_peak(device), total_bytes(device)
        if peak is not None and total is not None and held_bytes is not None:
            limit = (1 - self._headroom_fraction) * total
            return 2 * peak.allocated_bytes - held_bytes <= min(limit, self._max_bytes or limit)
        if self._max_bytes is None:
            return True
        if self._latest is None:
            return False
        growing = self._latest.by_category["activations"] + self._latest.by_category["temporary"]
        return self._latest.peak_bytes + growing <= self._max_bytes

    def measured(self, trainer: L.Trainer, batch: Batch, step: Measurement, may_cut: bool = True) -> bool:
        """Compare a measured step with `max_bytes`; return whether a measure was taken: then the next one is measured.

        The step itself has been taken already; what is done holds for the next one.

        Args:
            trainer: Lightning's, between two batches.
            batch: of the step.
            step: what was measured.
            may_cut: whether smaller microbatches are allowed; exact measures are in any case.
        """
        if self._max_bytes is None:
            with contextlib.suppress(UnsplittableBatchError):  # it was run whole
                return self._config.goal == "smallest" and self._grow_below_the_rest(batch, step)
            return False
        self._latest = step
        if step.peak_bytes <= self._max_bytes:
            return False
        self._num_good = 0
        taken = self._without_smaller_parts(trainer, batch)
        if taken is None and may_cut and sum(map(step.by_category.__getitem__, _OF_THE_MODEL)) < self._max_bytes:
            with contextlib.suppress(UnsplittableBatchError):
                taken = self._halve(batch)
        over = f"{format_bytes(step.peak_bytes)} of `max_bytes` {format_bytes(self._max_bytes)}"
        self._say(f"a step took {over}; " + (f"from now on {taken}." if taken else "nothing is left to be done."))
        return taken is not None

    def _grow_below_the_rest(self, batch: Batch, step: Measurement) -> bool:
        """Double the smallest microbatches where that does not make activations the larger part of the peak.

        Once it would, their size is settled, in runs that are resumed as well.
        """
        size, growing = self.size_for(batch), sum(map(step.by_category.__getitem__, _OF_THE_SAMPLES))
        is_large = size is None or 2 * growing > step.peak_bytes - growing or size >= self._config.num_samples(batch)
        self._is_settled |= is_large or self.num_recovered > 0
        if self._is_settled or size is None:
            return False
        assert self.limit_elements is not None, "there is a size"
        self.limit_elements *= 2
        self._say(f"activations take {format_bytes(growing)} of {format_bytes(step.peak_bytes)}: {_sizes(2 * size)}.")
        return True

    def _say(self, message: str) -> None:
        """Print a line, where no other process prints the same."""
        if self._speaks:
            _tell(message)


def smallest_size(module: nn.Module) -> int:
    """Return samples of the smallest microbatch: one, or two where BatchNorm takes statistics of them."""
    return 2 if any(isinstance(each, _BatchNorm) and each.training for each in module.modules()) else 1


_OF_THE_SAMPLES = ("activations", "temporary")
_OF_THE_MODEL = ("weights", "gradients", "optimizer_state")
"""What smaller microbatches do not lower."""


def _tell(message: str) -> None:
    """Print a line from whichever process it is: most recover on their own."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else None
    rank_zero.log.info(rank_zero.rank_prefixed_message(f"memsave: {message}", rank))


def _sizes(size: int | None) -> str:
    assert size is not None, "batches are cut"
    return f"microbatches of at most {counted(size, 'sample')}"
