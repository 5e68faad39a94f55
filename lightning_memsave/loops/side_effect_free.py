"""Run `training_step` to learn something about it, without leaving a trace of having run it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_memsave.lightning_compat import Batch, session_of
from lightning_memsave.loops.batch_snapshot import BatchStart
from lightning_memsave.loops.merged_metrics import MergedMetrics
from lightning_memsave.loops.metric_inputs import not_kept
from lightning_memsave.loops.own_steps import NoOwnSteps
from lightning_memsave.loops.step_effects import gradients_set_aside
from lightning_memsave.measuring.meter import forget_edits
from lightning_memsave.measuring.storages import tensors_in
from lightning_memsave.simulation.global_state_guard import names_kept
from lightning_memsave.techniques.batchnorm import unpooled
from lightning_memsave.torch_internals.fake_tensors import is_fake


@contextmanager
def without_a_trace(trainer: L.Trainer, module: L.LightningModule, batch: Batch) -> Iterator[BatchStart]:
    """Log nothing inside, and restore modes, random state, gradients, buffers, metrics and plain attributes.

    The containers of the batch, of which a step may take things away, what a first forward pass builds, and the
    globals of the module's files and classes are restored as well. Yields what restores most of it.

    Raises:
        OwnStepError: inside, where an optimizer is about to step.
    """
    session = session_of(trainer)
    start = BatchStart(module, None, batch=batch, noise=session.noise, small_bytes=math.inf, most_entries=math.inf)
    metrics = MergedMetrics(module)
    metrics.set_aside()
    results: dict[str, Any] = vars(trainer._results)
    connector = trainer._logger_connector
    own: dict[str, Any] = {
        name: results[name] for name in ("log", "reset") if name in results
    }  # a loop of ours may have replaced one
    logged_last, module._current_fx_name = connector._current_fx, "training_step"
    results["log"] = results["reset"] = lambda *_, **__: None
    release = session.release
    session.scopes.is_rehearsing = True
    try:
        with (
            gradients_set_aside(module),
            names_kept(module),
            unpooled(),
            not_kept(),
            NoOwnSteps(),
            nullcontext() if release is None else release.rehearsed(),
        ):
            yield start
    finally:
        session.scopes.is_rehearsing = False
        del results["log"], results["reset"]
        results.update(own)
        connector._current_fx = logged_last
        metrics.restore()
        start.restore(gradients=False)
        forget_edits()


@contextmanager
def values_kept(batch: Batch) -> Iterator[None]:
    """Restore the tensors of a batch that a step changes in place, values and shapes; they are cloned for that.

    Of sparse and nested tensors, and of those that consist of several, only the values are restored.
    """
    has_values = (tensor for tensor in tensors_in(batch) if not (tensor.is_inference() or is_fake(tensor)))
    found = {id(tensor): tensor for tensor in has_values}.values()
    kept = [(tensor, tensor.detach(), tensor.detach().clone(), tensor._version) for tensor in found]
    sizes = {id(alias): alias.untyped_storage().nbytes() for _, alias, *_ in kept if _is_plain(alias)}
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, alias, before, version in kept:
                if not _is_plain(alias):
                    if tensor._version != version:
                        tensor.copy_(before)
                    continue
                if alias.untyped_storage().nbytes() < sizes[id(alias)]:
                    alias.untyped_storage().resize_(sizes[id(alias)])
                if not torch.equal(_bytes(alias), _bytes(before)):  # memory may be read-only
                    once = tuple(slice(None if stride else 1) for stride in alias.stride())  # of what is expanded
                    alias[once].copy_(before[once])
                tensor.data = alias


def _is_plain(tensor: Any) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not is_traceable_wrapper_subclass(tensor)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)  # NaN as well


def set_mode(module: L.LightningModule, is_training: bool) -> None:
    """Set the mode in which a loss is evaluated: training but for BatchNorm, which would move, or evaluation."""
    for layer in module.modules() if is_training else ():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.eval()
    if is_training:
        return
    module.eval()
    for layer in module.modules():
        # Bitsandbytes' 4-bit layers (seen in 0.50) pack their weights in eval mode, for good, on CPUs with instructions
        # for bfloat16, and no gradient goes through them any more.
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.train()
