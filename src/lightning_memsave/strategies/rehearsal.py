"""Run `training_step` to learn something about it, without leaving a trace of having run it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_memsave.memory.storages import tensors_in
from lightning_memsave.strategies.batch_start import BatchStart
from lightning_memsave.strategies.metrics import MergedMetrics
from lightning_memsave.techniques.microbatching.batchnorm import unpooled
from lightning_memsave.techniques.sparsity import sparse_layers


@contextmanager
def without_a_trace(trainer: Any, module: Any, batch: Any) -> Iterator[None]:
    """Nothing is logged or steps; modes, random state, gradients, buffers, metrics and plain attributes come back.

    So do the containers of the batch, of which a step may take things away.
    """
    noise = trainer.strategy.memsave.noise
    start = BatchStart(module, changing=None, batch=batch, noise=noise, small_bytes=math.inf)
    metrics = MergedMetrics(module)
    metrics.set_aside()
    gradients = {p: p.grad for p in module.parameters()}
    for parameter in gradients:
        parameter.grad = None
    results = vars(trainer._results)
    log_before = results.get("log")  # a loop of ours may have replaced it
    module._current_fx_name, results["log"] = "training_step", lambda *_, **__: None
    release = trainer.strategy.memsave.release
    try:
        with unpooled(), nullcontext() if release is None else release.rehearsed():
            yield
    finally:
        del results["log"]
        if log_before is not None:
            results["log"] = log_before
        metrics.restore()
        start.restore()
        for layer in sparse_layers(module).values():
            layer.dense_gradient = None  # of the rehearsal's backward
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


@contextmanager
def values_kept(batch: Any) -> Iterator[None]:
    """Tensors of a batch that a step changes in place get their values and shapes back; they are cloned for that."""
    found: list[Any] = list(tensors_in(batch))
    tensors = [t for t in found if t.layout is torch.strided and not is_traceable_wrapper_subclass(t)]
    places = [(t, t.untyped_storage(), t.storage_offset(), t.size(), t.stride()) for t in tensors]
    values = {storage.data_ptr(): (storage, storage.clone()) for _, storage, *_ in places}
    try:
        yield
    finally:
        for storage, before in values.values():
            if storage.nbytes() != before.nbytes():
                storage.resize_(before.nbytes())
            storage.copy_(before)
        for tensor, storage, *place in places:
            if [tensor.storage_offset(), tensor.size(), tensor.stride()] != place:
                with torch.no_grad():
                    tensor.set_(storage, *place)
