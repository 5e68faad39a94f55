"""Outputs of kernels that fake tensors lack, or have in another size than the real ones.

oneDNN's LSTM returns a workspace, which is most of what a recurrent model keeps; its fake one is empty. Its size is
asked of the kernel itself, on zeros: of as many time steps, or of 64 and 128 where these would be large, as it grows
evenly but for the rounding of its parts to pages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_memsave.torch_internals.fake_tensors import unset_fake_temporarily

_WORKSPACE = 3  # which output
_LARGEST_BYTES = 2**26  # of an input that is made for this
_STEPS = 64


def _with_float_statistics(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Give statistics the dtype of a float32 weight, as normalisations of half-precision inputs do on CPU."""
    names = [argument.name for argument in func._schema.arguments]
    x, weight = args[0], args[names.index("weight")]
    if weight is None or weight.dtype == x.dtype or x.device.type != "cpu" or not out[1].numel():
        return out
    return (out[0], *(torch.empty_like(each, dtype=weight.dtype) for each in out[1:]))


def _with_gradient_of_the_input(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Give the gradient of a half-precision input its dtype; the fake one has that of a float32 weight."""
    x = args[1]
    if out[0] is None or out[0].dtype == x.dtype:
        return out
    return (torch.empty_like(out[0], dtype=x.dtype), *out[1:])


def _with_workspace(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    if not torch.is_grad_enabled():  # then the kernel keeps nothing
        return out
    tensors = {index: a for index, a in enumerate(args) if isinstance(a, Tensor)}
    shapes = tuple((index, tuple(t.shape), t.dtype) for index, t in tensors.items())
    plain = tuple(
        (index, tuple(a) if isinstance(a, list) else a) for index, a in enumerate(args) if index not in tensors
    )
    num_steps = args[0].shape[0]
    fewer = (num_steps,) if args[0].nbytes <= _LARGEST_BYTES or num_steps <= 2 * _STEPS else (_STEPS, 2 * _STEPS)
    found = [_workspace_bytes(func, shapes, plain, steps) for steps in fewer]
    num_bytes = found[0] + (num_steps - fewer[0]) * (found[-1] - found[0]) // _STEPS
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return (*out[:_WORKSPACE], workspace, *out[_WORKSPACE + 1 :])


@functools.cache
def _workspace_bytes(func: Any, shapes: Any, plain: Any, num_steps: int) -> int:
    args: dict[int, Any] = {index: list(a) if isinstance(a, tuple) else a for index, a in plain}
    with unset_fake_temporarily(), torch.enable_grad():
        for index, shape, dtype in shapes:
            args[index] = torch.zeros((num_steps, *shape[1:]) if index == 0 else shape, dtype=dtype, device="cpu")
        out = func(*(args[index] for index in sorted(args)))
    return int(out[_WORKSPACE].nbytes)


CORRECTIONS: Mapping[Any, Callable[[Any, Any, Any, Any], Any]] = {
    torch.ops.aten.mkldnn_rnn_layer.default: _with_workspace,
    torch.ops.aten.native_batch_norm.default: _with_float_statistics,
    torch.ops.aten.native_group_norm.default: _with_float_statistics,
    torch.ops.aten.native_group_norm_backward.default: _with_gradient_of_the_input,
    torch.ops.aten.native_layer_norm.default: _with_float_statistics,
}
"""Corrections by kernel.

Functions of it, its arguments and its fake outputs that give outputs as large as the real ones.
"""
