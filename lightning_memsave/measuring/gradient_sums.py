"""Sums of gradients that a run makes in place, and beside it while a dispatch mode looks on.

Where a tensor is used twice, backward adds the second use's gradient to the first's, in the first's memory if nothing
else holds it. Under any `TorchDispatchMode` torch makes a third tensor instead: `can_accumulate_inplace` in
torch/csrc/autograd/input_buffer.cpp then takes every tensor for that of a subclass. Who counts what a mode sees has to
leave that one out, as the run never has it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.torch_internals.autograd_graph import autograd_is_running
from lightning_memsave.torch_internals.private_names import find, missing

_ADD = torch.ops.aten.add.Tensor
_ENGINE = getattr(find("torch.autograd.graph._engine_run_backward"), "__code__", None)
_BETWEEN = ("torch._dynamo.eval_frame", "torch._compile")  # the engine and `__torch_dispatch__`
# The engine's buffer, and three of the call: nobody else has the tensor. Its storage: the tensor, and Python's handle.
_HOLDERS, _STORAGE_HOLDERS = 4, 2


def replaces_first(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a run may put the result of this operation where its first operand is.

    It does if another node has made that: sums inside of one node's formula look alike. To be asked in
    `__torch_dispatch__`, before the operation.
    """
    if missing("gradient sums"):
        return False
    if func is not _ADD or len(args) != 2 or not autograd_is_running() or torch.is_grad_enabled():
        return False
    first = args[0]
    if not isinstance(first, Tensor) or type(first) is not type(args[1]) or first.layout is not torch.strided:
        return False
    storage = first.untyped_storage()
    return (
        first._use_count() == _HOLDERS  # type: ignore[attr-defined]  # not in torch's stubs
        and torch._C._storage_Use_Count(storage._cdata) == _STORAGE_HOLDERS
        and storage.nbytes() == first.nbytes
        and _is_of_the_engine()
    )


def _is_of_the_engine() -> bool:
    """Return whether no function in Python asked for this operation.

    The engine's threads for devices have no other frames.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame and (frame.f_code.co_name == "__torch_dispatch__" or frame.f_globals.get("__name__") in _BETWEEN):
        frame = frame.f_back
    return frame is None or frame.f_code is _ENGINE
