"""Recovery where processes wait for each other inside of a batch (FSDP2): all of them run it again, or none.

When memory runs out in one process, the others wait for it in the next collective. It frees what its try holds and
repeats it with one sample for each microbatch, to take part in the collectives that are left (`CatchingUp`). So every
process comes to the end of its try, where they tell each other whether it counts: one number for each batch, reduced
on CPU, so that no process waits for a device. If it does not count, all put the batch back to its start, take the same
next measure, and run it again. The bits are those of a run with that measure from the start.

Not recovered, and an error in all processes: memory that runs out in the optimizer's update, or where one sample does
not fit. What ended a process is left in the store that processes have met in; the others read it once their next
collective fails, which is when that process is gone, or after the timeout of the process group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.distributed as dist

from lightning_memsave.lightning_compat import Batch
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError, is_out_of_memory
from lightning_memsave.loops.recovery import smallest_size
from lightning_memsave.loops.step_effects import gradients_set_aside
from lightning_memsave.techniques.microbatching import Microbatching, UnsplittableBatchError
from lightning_memsave.torch_internals.collectives import CatchingUp, groups_of, num_issued
from lightning_memsave.torch_internals.private_names import find
from lightning_memsave.torch_internals.sharded_parameters import free_gathered, reset_after_error

_store = find("torch.distributed.distributed_c10d._get_default_store")
_KEY = "lightning_memsave/what ended a process"
_WAYS_OUT = (
    'Resume from the last checkpoint, with `checkpointing="blocks"`, `optimizer_state="8bit"`, smaller batches or more '
    "processes."
)


class FailedTryError(Exception):
    """A process could not finish its try of a batch, so that of this process does not count."""


@dataclass(frozen=True)
class TryOfProcess:
    """What one process tells the others of a try that does not count."""

    rank: int
    failure: str | None
    """The place where memory ran out, and the error; `None`: it did not in this process."""
    why_final: str | None
    """Reason why the batch cannot be put back to its start in this process; `None`: it can."""
    was_measured: bool
    """Whether a ledger was open, which takes memory itself."""


class JointRecovery:
    """What the processes of one run agree on.

    Args:
        module: the LightningModule, sharded.
    """

    has_begun = False
    """Whether gradients are on their way; here they are reduced inside of a try, which may be run again."""

    def __init__(self, module: L.LightningModule) -> None:
        self._module, self._groups = module, groups_of(module)
        self._rank, self._flags = dist.get_rank(), None
        if dist.get_backend() != "fake":  # in a prediction, this process is alone
            if self._rank == 0:
                _store().delete_key(_KEY)  # of an earlier run
            self._flags = dist.new_group(backend="gloo")
        self._has_failed = self._is_over = False
        self._num_at_start: dict[str, int] | None = None  # until `count`
        self.phase = ""
        """What this process does now, in words."""

    @property
    def speaks(self) -> bool:
        """Whether this process is the one that prints what all of them do."""
        return self._rank == 0

    def close(self) -> None:
        """Give up the process group of this run, where processes are still there."""
        if self._flags is not None and dist.is_initialized():
            with contextlib.suppress(ValueError):  # it has been destroyed with all others
                dist.destroy_process_group(self._flags)
        self._flags = None

    # --------------------------------------------------------------------------- a try
    def begin(self) -> None:
        """Begin a try: until `count`, what it does cannot be caught up with."""
        self._has_failed, self._is_over, self._num_at_start = False, False, None
        self.phase = "the questions how the loss depends on the batch"

    def count(self) -> None:
        """Count collectives from here on; all parameters are sharded, so that a repetition gathers the same ones."""
        free_gathered(self._module)
        self._num_at_start = num_issued(self._groups) if self._flags is not None else {}

    def finish(self) -> None:
        """End a try; once.

        Raises:
            FailedTryError: memory ran out in some process: in all of them.
        """
        if self._is_over:
            return
        self._is_over = True
        self.phase = "the end of the batch"
        if not self.agree(not self._has_failed):
            raise FailedTryError

    def agree(self, flag: bool) -> bool:
        """Return whether `flag` is true in all processes."""
        if self._flags is None:
            return flag
        flags = torch.tensor(int(flag), device="cpu")
        dist.all_reduce(flags, op=dist.ReduceOp.MIN, group=self._flags)
        return bool(flags)

    def share(self, failure: str | None, why_final: str | None, was_measured: bool) -> list[TryOfProcess]:
        """Return what each process tells of its try; this one, these attributes of it."""
        own = TryOfProcess(self._rank, failure, why_final, was_measured)
        if self._flags is None:
            return [own]
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, own, group=self._flags)
        return everyones

    # --------------------------------------------------------------------------- a process that failed
    def catch_up(self, failure: str, repeat: Callable[[], Any]) -> None:
        """Take part in the collectives of a try that failed here, which other processes wait for.

        Gradients are afterwards as they are now.

        Args:
            failure: where memory ran out, and the error.
            repeat: does what the try did, with less memory, and ends with `finish`.

        Raises:
            OutOfMemoryUnrecoverableError: it failed as well.
        """
        assert self._num_at_start is not None, "it has been counted"
        num_done = {name: n - self._num_at_start[name] for name, n in num_issued(self._groups).items()}
        self._has_failed = True
        try:
            reset_after_error(self._module)
            with gradients_set_aside(self._module), CatchingUp(num_done):  # to those of earlier batches it would add
                repeat()
        except FailedTryError:
            return
        except Exception as error:
            went = "did not go through either" if is_out_of_memory(error) else "could not be repeated on its own"
            why = f"one sample {went} ({type(error).__name__}: {error})"
            raise self.given_up(failure, why) from error
        raise AssertionError("its try does not count")

    @property
    def has_counted(self) -> bool:
        """Whether the try was far enough for `catch_up`."""
        return self._num_at_start is not None

    # --------------------------------------------------------------------------- the end
    def given_up(self, failure: str, why: str) -> OutOfMemoryUnrecoverableError:
        """Return the error that ends this process, and leave for the others what it says.

        Args:
            failure: where memory ran out, and the error.
            why: the reason why it cannot go on.
        """
        text = f"Memory ran out in rank {self._rank}, and {why}. {_WAYS_OUT} It ran out in {failure}"
        with contextlib.suppress(Exception):  # it may be gone, with the process that held it
            _store().set(_KEY, text)
        return OutOfMemoryUnrecoverableError(text)

    def explain(self, error: Exception) -> None:
        """Say why other processes have left this one, where one of them has given up.

        Raises:
            OutOfMemoryUnrecoverableError: with what that process has said.
        """
        text = None
        with contextlib.suppress(Exception):  # the store may be gone, with the process that held it
            text = _store().get(_KEY).decode() if _store().check([_KEY]) else None
        if text is not None:
            what = f"{text} Rank {self._rank} waited for it in {self.phase}: {error}"
            raise OutOfMemoryUnrecoverableError(what) from error


def with_one_sample(
    parts: list[tuple[Batch, float]], config: Microbatching, module: L.LightningModule
) -> list[tuple[Batch, float]]:
    """Return the fewest samples of each microbatch that the module can be run on; all where samples cannot be told."""

    def first(part: Batch) -> Batch:
        try:
            return config.of_size(smallest_size(module)).parts(part)[0][0]
        except UnsplittableBatchError:
            return part

    return [(first(part), num_samples) for part, num_samples in parts]
