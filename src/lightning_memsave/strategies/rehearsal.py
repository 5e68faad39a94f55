"""Run `training_step` to learn something about it, without leaving a trace of having run it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_memsave.strategies.metrics import MergedMetrics


@contextmanager
def without_a_trace(trainer: Any, module: Any) -> Iterator[None]:
    """Nothing is logged inside; modes, random state, gradients, buffers, metrics and plain attributes come back."""
    training = {m: m.training for m in module.modules()}
    buffers = {b: b.detach().clone() for b in module.buffers()}
    gradients = {p: p.grad for p in module.parameters()}
    for parameter in gradients:
        parameter.grad = None
    attributes = {
        key: copy.copy(value)
        for key, value in vars(module).items()
        if not key.startswith("_") and isinstance(value, (int, float, str, list, dict, set, type(None)))
    }
    fx_name, metrics, results = module._current_fx_name, MergedMetrics(module), vars(trainer._results)
    log_before = results.get("log")  # a loop of ours may have replaced it
    module._current_fx_name, results["log"] = "training_step", lambda *_, **__: None
    try:
        with isolate_rng(include_cuda=True):
            yield
    finally:
        module._current_fx_name = fx_name
        del results["log"]
        if log_before is not None:
            results["log"] = log_before
        metrics.restore()
        for m, mode in training.items():
            m.training = mode
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)
        for key, value in attributes.items():
            _put_back(module, key, value)


def _put_back(module: Any, key: str, value: Any) -> None:
    current = vars(module).get(key)
    if isinstance(value, list) and isinstance(current, list):
        current[:] = value
    elif isinstance(value, (dict, set)) and type(current) is type(value):
        current.clear()
        current.update(value)
    else:
        vars(module)[key] = value
