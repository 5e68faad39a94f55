"""What a trial of a module's call may change, and is put back."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_memsave.saved_tensors.buffers import Buffers
from lightning_memsave.saved_tensors.module_state import held, is_replaced
from lightning_memsave.saved_tensors.parameter_edits import ParametersKept
from lightning_memsave.saved_tensors.randomness import Randomness, generators_in
from lightning_memsave.torch_internals.autograd_graph import unversioned
from lightning_memsave.torch_internals.containers import nested, refill


def python_noise() -> Any:
    """Return the state of Python's and numpy's global generators, to be compared."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else repr(numpy.random.get_state(legacy=False))


@contextlib.contextmanager
def put_back(module: nn.Module, devices: set[torch.device]) -> Iterator[None]:
    """Restore the module's buffers, parameters, attributes, hooks and containers, and generators."""
    owners = list(module.named_modules())
    containers = [each for _, owner in owners for each in _containers(owner)]
    before = [(container, copy.copy(container)) for container in containers]
    buffers = Buffers(owners, None)
    held_before = [(owner, key, p) for _, owner in owners for key, p in held(owner)]
    with contextlib.ExitStack() as stack:
        # What is edited, and then put back, is as it was for a graph that has kept it.
        for buffer in module.buffers():
            if not (is_lazy(buffer) or buffer.is_inference()):
                stack.enter_context(unversioned(buffer))
        stack.enter_context(ParametersKept(module))
        stack.enter_context(Randomness.untouched(devices, generators_in(*module.modules())))
        try:
            yield
        finally:
            for container, content in before:
                refill(container, content)
            buffers.put_back()
            for owner, key, parameter in held_before:
                if is_replaced(owner, key, parameter):
                    owner._parameters[key] = parameter


def _containers(owner: nn.Module) -> Iterator[Any]:
    yield vars(owner)
    for name, value in vars(owner).items():
        if name != "_parameters":  # FSDP2 exchanges them itself
            yield from nested(value, math.inf)[0]
