"""Validation, test and prediction when memory runs out: the same batch again, in smaller parts.

Nothing is kept for a backward pass here, so there is nothing to do but to cut. Logs, torchmetrics and what the step
returns are merged as in training; a logged tensor counts as a mean over samples, which a warning says once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L

from lightning_memsave.lightning_compat import Batch
from lightning_memsave.loops.deferred_logs import DeferredLogs, KeptLogs
from lightning_memsave.loops.merged_metrics import MergedMetrics
from lightning_memsave.loops.merged_outputs import detached, merge_outputs
from lightning_memsave.loops.out_of_memory import OutOfMemoryUnrecoverableError, is_out_of_memory
from lightning_memsave.loops.session import Session
from lightning_memsave.measuring.allocator import free_memory, read_current, reset_peak
from lightning_memsave.techniques.microbatching import UnsplittableBatchError


def evaluate(trainer: L.Trainer, session: Session, step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run `step(*args)`, a validation, test or prediction step on `args[0]`; again in parts when memory runs out.

    Raises:
        OutOfMemoryUnrecoverableError: the batch cannot be cut further, or what a failed try has done cannot be undone.
    """
    recovery, batch = session.evaluation, args[0]
    if recovery is None or hasattr(batch, "__next__"):  # `dataloader_iter` draws its batches itself
        return step(*args)
    device = trainer.strategy.root_device
    reset_peak(device)
    held = read_current(device)
    while True:
        start = recovery.start_of(trainer.lightning_module, batch, accumulates=True)
        try:
            parts = _parts(session, batch)
            result = _run(trainer, step, args, parts)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason, why_final, edited = str(error), start.why_final(), start.not_put_back()
        else:
            recovery.learn_changing(start)
            session.cutter.record.note_good_try()
            recovery.succeed(batch, len(parts), device, None if held is None else held.allocated_bytes)
            return result
        session.cutter.record.note_failed_try(edited)
        start.restore()
        free_memory()
        assert trainer.state.stage is not None, "it evaluates"
        what = f"a batch of {trainer.state.stage.value}"
        if why_final is None and not recovery.shrink(trainer, batch, session.cutter.has_samples(batch), what):
            why_final = "it has one sample, or its samples cannot be told apart"
        if why_final is not None:
            raise OutOfMemoryUnrecoverableError(f"Memory ran out in {what}, which cannot be cut: {why_final}. {reason}")
        session.cutter.record.warn_of_evaluation()


def _parts(session: Session, batch: Batch) -> list[tuple[Any, float]]:
    assert session.evaluation is not None, "asked before"
    try:
        return session.cutter.sized_for(batch, session.evaluation).parts(batch)
    except UnsplittableBatchError:
        return [(batch, 0.0)]


def _run(trainer: L.Trainer, step: Callable[..., Any], args: tuple[Any, ...], parts: list[tuple[Any, float]]) -> Any:
    module, results, outputs = trainer.lightning_module, trainer._results, []
    if len(parts) == 1 and trainer.world_size == 1:  # beside other processes it logs when they do
        with nullcontext() if results is None else KeptLogs(results), MergedMetrics(module):
            return step(*args)
    logs = None if results is None else DeferredLogs(results, type(results).log)  # prediction logs nothing
    total = sum(n for _, n in parts) or 1.0
    with logs or nullcontext(), MergedMetrics(module, len(parts)) as metrics:
        for part, num_samples in parts:
            metrics.weight = num_samples / total
            if logs is not None:
                logs.begin(part, num_samples, num_samples)
            output = step(part, *args[1:])
            outputs.append({"output": output if len(parts) == 1 else detached(output)})
    if logs is not None:
        logs.flush(args[0], [None] * len(parts), "mean")
    return merge_outputs(outputs, [n for _, n in parts])["output"]
